"""Local shards of an array, their bytes on the host, and the array rebuilt from shards."""

from collections.abc import Sequence

import jax
import numpy as np

_ALIGNMENT = 64  # bytes; jax turns a host buffer with this alignment into a CPU device array without a copy


def local_devices(sharding: jax.sharding.Sharding) -> list[jax.Device]:
    """Return this process's devices of a sharding in mesh order, in which the peer process sends its shards."""
    addressable = sharding.addressable_devices
    if isinstance(sharding, jax.sharding.NamedSharding):
        return [device for device in sharding.mesh.devices.flat if device in addressable]
    return sorted(addressable, key=lambda device: device.id)


def local_shards(value: jax.Array) -> list[jax.Array]:
    """Return this process's shards, replicas included, as single-device arrays in mesh order."""
    by_device = {shard.device: shard.data for shard in value.addressable_shards}
    return [by_device[device] for device in local_devices(value.sharding)]


def rebuild(form: jax.ShapeDtypeStruct, shards: Sequence[jax.Array]) -> jax.Array:
    """Assemble an array from this process's shards.

    Args:
        form: Shape, dtype and sharding of the array.
        shards: This process's shards in mesh order, as `local_shards` returns them.
    """
    return jax.make_array_from_single_device_arrays(form.shape, form.sharding, list(shards), dtype=form.dtype)


def host_bytes(shard: jax.Array) -> np.ndarray:
    """Return a shard's bytes on the host: a view on CPU devices, otherwise a copy."""
    return np.ascontiguousarray(np.asarray(shard)).reshape(-1).view(np.uint8)


def empty_bytes(count: int) -> np.ndarray:
    """Allocate `count` bytes that `from_bytes` can turn into a CPU device array without a copy."""
    # NumPy does not guarantee this alignment, so allocate more and start at the first aligned byte.
    raw = np.empty(count + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + count]


def from_bytes(received: np.ndarray, form: jax.ShapeDtypeStruct, device: jax.Device) -> jax.Array:
    """Put a received shard on a device.

    Args:
        received: The shard's bytes, which the array may share: they must not be written again.
        form: Shape, dtype and sharding of the full array.
        device: The device.
    """
    shape = form.sharding.shard_shape(form.shape)
    return jax.device_put(received.view(form.dtype).reshape(shape), device)


def shard_bytes(form: jax.ShapeDtypeStruct) -> int:
    """Return the size of one shard of `form` in bytes."""
    return int(np.prod(form.sharding.shard_shape(form.shape), dtype=np.int64)) * np.dtype(form.dtype).itemsize
