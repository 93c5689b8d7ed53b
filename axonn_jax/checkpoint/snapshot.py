"""Copies of a state that outlive the next step: the CPU backend's host memory is the arrays in use."""

import mmap
from typing import Any

import jax
import numpy as np

from axonn_jax.backend.traits import computes_on_cores
from axonn_jax.checkpoint.naming import State

_ALIGNED = 64
"""Alignment in bytes at which XLA takes memory over without a copy."""


def snapshot(state: State) -> int:
    """Replace arrays on the CPU backend by copies, one after another; saving copies other arrays anyway.

    Returns the bytes of the copies. An array under write cannot be donated: the next step would make a copy, in memory
    that the process then keeps. The kernel gets the memory back when the last copy is freed.
    """
    copied = {
        name: {_key(shard.index): shard.data for shard in value.addressable_shards}  # once, of several copies
        for name, value in state.items()
        if on_the_hosts_cores(value)
    }
    size = sum(_room(data.nbytes) for parts in copied.values() for data in parts.values())
    if not size:
        return 0
    memory, at = _memory(size), 0
    for name, parts in copied.items():
        value = state[name]
        copies = {}
        for key, data in parts.items():
            copy = memory[at : at + data.nbytes].view(data.dtype).reshape(data.shape)
            np.copyto(copy, np.asarray(data))
            copies[key] = copy
            at += _room(data.nbytes)
        shards = [
            jax.device_put(copies[_key(shard.index)], shard.device, may_alias=True)
            for shard in value.addressable_shards
        ]
        kind = value.sharding.with_memory_kind(shards[0].sharding.memory_kind)
        state[name] = jax.make_array_from_single_device_arrays(value.shape, kind, shards)
    return size


def on_the_hosts_cores(value: Any) -> bool:
    """True if the devices of an array compute with the host's cores, in the host's memory."""
    return all(computes_on_cores(device.platform) for device in value.sharding.device_set)


def _key(index: tuple[slice, ...]) -> Any:
    return tuple((part.start, part.stop) for part in index)


def _room(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED


def _memory(size: int) -> np.ndarray:
    """Return memory from the kernel, not the allocator, in huge pages where possible, for fewer page faults."""
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # shared pages are never huge
    if hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(pages, np.uint8)
