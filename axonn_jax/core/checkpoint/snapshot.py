"""Snapshots of a state on the CPU backend, where host copies for a save would alias the arrays in use."""

import mmap
from typing import Any

import jax
import numpy as np

from axonn_jax.core.backend.traits import computes_on_cores
from axonn_jax.core.checkpoint.naming import State

_ALIGNED = 64
"""Alignment in bytes from which XLA uses host memory without copying it."""


def snapshot(state: State) -> int:
    """Replace arrays on the CPU backend by copies, one after another; return the bytes of the copies.

    Arrays on other backends stay: saving copies them to the host anyway.
    """
    # An array that is being written cannot be donated: the next step would copy it into memory that the process never
    # returns. These copies are in memory of their own, which the kernel gets back when the last of them is freed.
    copied = {
        name: {_key(shard.index): shard.data for shard in value.addressable_shards}  # one copy of replicated shards
        for name, value in state.items()
        if on_the_hosts_cores(value)
    }
    size = sum(_room(data.nbytes) for parts in copied.values() for data in parts.values())
    if not size:
        return 0
    memory, offset = _memory(size), 0
    for name, parts in copied.items():
        value = state[name]
        copies = {}
        for key, data in parts.items():
            copy = memory[offset : offset + data.nbytes].view(data.dtype).reshape(data.shape)
            np.copyto(copy, np.asarray(data))
            copies[key] = copy
            offset += _room(data.nbytes)
        shards = [
            jax.device_put(copies[_key(shard.index)], shard.device, may_alias=True)
            for shard in value.addressable_shards
        ]
        kind = value.sharding.with_memory_kind(shards[0].sharding.memory_kind)
        state[name] = jax.make_array_from_single_device_arrays(value.shape, kind, shards)
    return size


def on_the_hosts_cores(value: Any) -> bool:
    """Return True if an array's devices are the host's cores, with the host's memory."""
    return all(computes_on_cores(device.platform) for device in value.sharding.device_set)


def _key(index: tuple[slice, ...]) -> tuple[tuple[int | None, int | None], ...]:
    return tuple((part.start, part.stop) for part in index)


def _room(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED


def _memory(size: int) -> np.ndarray:
    # From the kernel, not the allocator, which would keep it; in huge pages where possible, for fewer page faults.
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # shared pages are never huge
    if hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(pages, np.uint8)
