"""Local shards of an array, their bytes on the host, and the array rebuilt from shards."""

from collections.abc import Sequence

import jax
import numpy as np

_ALIGNMENT = 64  # bytes: jax takes a host buffer aligned so as a CPU device array, without a copy


def local_devices(sharding: jax.sharding.Sharding) -> list[jax.Device]:
    """Return this process's devices of a sharding in mesh order, which matches the peer's."""
    addressable = sharding.addressable_devices
    if isinstance(sharding, jax.sharding.NamedSharding):
        return [device for device in sharding.mesh.devices.flat if device in addressable]
    return sorted(addressable, key=lambda device: device.id)


def local_shards(value: jax.Array) -> list[jax.Array]:
    """Return this process's shards as one-device arrays, in mesh order; replicated copies too."""
    by_device = {shard.device: shard.data for shard in value.addressable_shards}
    return [by_device[device] for device in local_devices(value.sharding)]


def rebuild(form: jax.ShapeDtypeStruct, shards: Sequence[jax.Array]) -> jax.Array:
    """Return the array of `form` whose shards here, in mesh order, are `shards`."""
    return jax.make_array_from_single_device_arrays(form.shape, form.sharding, list(shards), dtype=form.dtype)


def host_bytes(shard: jax.Array) -> np.ndarray:
    """Return a shard's bytes on the host: a view on CPU devices, else a copy."""
    return np.ascontiguousarray(np.asarray(shard)).reshape(-1).view(np.uint8)


def empty_bytes(count: int) -> np.ndarray:
    """Return `count` fresh bytes that `from_bytes` can turn into a CPU device array without a copy."""
    raw = np.empty(count + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + count]


def from_bytes(received: np.ndarray, form: jax.ShapeDtypeStruct, device: jax.Device) -> jax.Array:
    """Return the received shard on `device`; `received` may become part of it and must not be written again."""
    shape = form.sharding.shard_shape(form.shape)
    return jax.device_put(received.view(form.dtype).reshape(shape), device)


def shard_bytes(form: jax.ShapeDtypeStruct) -> int:
    """Return the bytes of one shard of `form`."""
    return int(np.prod(form.sharding.shard_shape(form.shape), dtype=np.int64)) * np.dtype(form.dtype).itemsize
