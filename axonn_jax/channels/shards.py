"""Local shards of an array, the array rebuilt from shards, and MPI tags of shards."""

from collections.abc import Sequence

import jax
import numpy as np

from axonn_jax.errors import UserError
from axonn_jax.schedule.tasks import Message

_ALIGNMENT = 64  # bytes: jax takes a host buffer aligned so as a CPU device array, without a copy


def local_devices(sharding: jax.sharding.Sharding) -> list[jax.Device]:
    """Return this process's devices of a sharding in mesh order, which matches the peer's."""
    here = sharding.addressable_devices
    if isinstance(sharding, jax.sharding.NamedSharding):
        return [device for device in sharding.mesh.devices.flat if device in here]
    return sorted(here, key=lambda device: device.id)


def local_shards(value: jax.Array) -> list[jax.Array]:
    """Return this process's shards as one-device arrays, in mesh order; replicated copies too."""
    held = {shard.device: shard.data for shard in value.addressable_shards}
    return [held[device] for device in local_devices(value.sharding)]


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


class Tags:
    """MPI tags for (stage, microbatch, shard): `(microbatch * stages + stage) * shards + shard`."""

    def __init__(self, stages: int, shards: int, largest: int):
        self._stages, self._shards, self._largest = stages, shards, largest

    @property
    def microbatches(self) -> int:
        """Microbatches for which there are tags."""
        return (self._largest + 1) // (self._stages * self._shards)

    def of(self, message: Message, shard: int = 0) -> int:
        """Return the tag of a shard; ``UserError`` where this MPI's tags do not go that far."""
        if message.microbatch >= self.microbatches:
            raise UserError(
                "train.microbatches", f"{message.microbatch + 1} or more",
                f"at most {self.microbatches}: this MPI has tags up to {self._largest} (MPI_TAG_UB) for "
                f"{self._stages} stages and {self._shards} devices a process",
            )  # fmt: skip
        return (message.microbatch * self._stages + message.stage) * self._shards + shard

    def read(self, tag: int) -> tuple[int, int, int]:
        """Return stage, microbatch and shard of a tag."""
        rest, shard = divmod(tag, self._shards)
        microbatch, stage = divmod(rest, self._stages)
        return stage, microbatch, shard
