"""A step's temporaries on the CPU backend: freed before the next step takes its own, and kept in one place."""

import time
from typing import Any

import jax

from axonn_jax.memory.host import give_back_freed_memory, in_use, places

WORTH_IT = 256_000_000
"""Bytes of temporaries on a device below which nothing is done: such a step is short, and so is the waste.

What is done takes 1 to 2 ms a step, in which the cores have nothing to do.
"""
_POLL_S = 0.0005
_LONGEST_S = 0.25
"""Far longer than what is waited for was seen to take, 20 ms on busy cores: something else has grown."""


class Temporaries:
    """Waits until the temporaries of a program's last run are free, so that those of the next find their place.

    XLA's CPU backend tells that a program is done some milliseconds before it frees its temporaries, one block, and
    takes those of the next run as soon as what it waits for is there. The new block then lies beside the old one, in
    pages never touched before: the step takes up to twice as long, and the old place stays, with the next miss a
    third. Seldom the block moves all the same: XLA asks for it aligned, and glibc may keep the cuttings, so that the
    next one no longer fits. Then what is free is given back to the kernel first.
    """

    def __init__(self, program: jax.stages.Compiled, mesh: jax.sharding.Mesh):
        on_cores = all(device.platform == "cpu" for device in mesh.devices.flat)
        analysis = program.memory_analysis() if on_cores else None
        self._size = int(getattr(analysis, "temp_size_in_bytes", 0))
        self._blocks = len(mesh.local_devices)
        self._before: int | None = None
        self._places: list[int] = []

    def wait(self, last: Any) -> None:
        """Before a run: waits for `last`, results of the run before (None: this is the first), and for its memory."""
        if self._size < WORTH_IT:
            return
        if last is not None:
            jax.block_until_ready(last)
        used, end = in_use(), time.monotonic() + _LONGEST_S
        if used is None:
            return
        while self._before is not None and used > self._before + self._size // 2 and time.monotonic() < end:
            time.sleep(_POLL_S)
            used = in_use() or 0
        found = places(self._size, self._blocks)
        if any(abs(one - other) > self._size // 8 for one, other in zip(self._places, found, strict=False)):
            give_back_freed_memory()
        self._before, self._places = used, found
