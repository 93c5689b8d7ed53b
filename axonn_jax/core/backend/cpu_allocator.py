"""Control of glibc's allocator under the CPU backend: keep freed memory for the next step, and release it on demand.

XLA's CPU backend allocates all temporaries of a program with malloc on every execution.
"""

import ctypes
import os
import platform
import threading
import time
from pathlib import Path
from typing import Any

import jax

from axonn_jax.core.backend.traits import computes_on_cores

_SETTINGS = {-8: 1, -4: 0, -1: -1, -2: 64 << 20}.items()
"""Parameters of mallopt (malloc.h): M_ARENA_MAX, M_MMAP_MAX, M_TRIM_THRESHOLD, M_TOP_PAD."""
_MALLINFO2 = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
_MADV_HUGEPAGE, _HUGE_PAGE, _HUGE_REGION = 14, 2 << 20, 2 << 30
_HEADER, _GRAIN, _SPARE = 8, 16, 64 + 32
"""Bytes of glibc's block header and of its size granularity; then of XLA's alignment and a smallest block."""
WORTH_IT = 256_000_000
"""Bytes of temporaries per device below which waiting, which takes about 1 ms, does not pay off."""
_POLL_S, _GROWTH_POLL_S = 0.0005, 0.02
_LONGEST_S = 0.25
"""Longest wait for temporaries, far above the 20 ms seen on busy cores; beyond it, something else has grown."""


class _Mallinfo2(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in _MALLINFO2]


def keep_freed_memory() -> None:
    """Make glibc, if it is the allocator, keep freed memory; call before jax or MPI starts threads.

    By default large blocks are unmapped when freed, and page faults for every 4 KiB touched take a quarter of a step's
    time. Threads that started earlier may have arenas of their own, in which blocks above 64 MiB are still mapped.
    """
    if can_give_back():
        for parameter, value in _SETTINGS:
            _libc().mallopt(parameter, value)
        _ask_for_huge_pages()


def can_give_back() -> bool:
    """Return whether the allocator is glibc's, which can be configured to keep freed memory."""
    return platform.libc_ver()[0] == "glibc"


def give_back_freed_memory() -> None:
    """Return all freed memory to the kernel; the next step then pays page faults for its temporaries."""
    if can_give_back():
        _libc().malloc_trim(0)
        _ask_for_huge_pages()  # the trim has moved the end of the heap


def in_use() -> int | None:
    """Return the bytes that are allocated and not freed; None if the allocator cannot tell (glibc can since 2.33)."""
    info = _mallinfo2()
    return None if info is None else int(info.uordblks + info.hblkhd)


def resident() -> int:
    """Return the resident set size of this process in bytes (Linux)."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def block_addresses(size: int, count: int) -> list[int]:
    """Return the addresses that XLA would get for `count` blocks of `size` bytes, by allocating and freeing them.

    Pages are not touched. The list is empty if addresses are unknown, or if malloc maps every block separately (without
    `keep_freed_memory`).

    Args:
        size: Bytes of a block.
        count: Number of blocks.
    """
    libc, old_info = _libc(), _mallinfo2()
    padded = -(-(size + _HEADER) // _GRAIN) * _GRAIN + _SPARE
    blocks = [libc.malloc(padded) for _ in range(count)]
    new_info = _mallinfo2()
    for block in blocks:
        libc.free(block)
    on_heap = old_info is not None and new_info is not None and old_info.hblks == new_info.hblks
    return sorted(block or 0 for block in blocks) if on_heap else []


class TemporariesInPlace:
    """Waits until a program's temporaries are freed, so that those of its next run reuse the same memory.

    The backend reports a program as done some milliseconds before it frees its temporaries, a single block. If the next
    run started earlier, its block would lie in untouched pages next to the old one: the step would take up to twice as
    long, and the process would keep both. If the block moves nevertheless, because glibc holds remainders of it, free
    memory is returned to the kernel first.

    Args:
        program: The compiled program.
        mesh: Mesh of its devices.
    """

    def __init__(self, program: jax.stages.Compiled, mesh: jax.sharding.Mesh):
        on_cores = all(computes_on_cores(device.platform) for device in mesh.devices.flat)
        analysis: Any = program.memory_analysis()
        self._size = int(analysis.temp_size_in_bytes) if on_cores else 0
        self._count = len(mesh.local_devices)
        self._baseline: int | None = None
        self._addresses: list[int] = []

    def wait(self, last: object) -> None:
        """Wait for the previous run and its memory.

        Args:
            last: Results of the previous run; None before the first.
        """
        if self._size < WORTH_IT:
            return
        if last is not None:
            jax.block_until_ready(last)
        used, end = in_use(), time.monotonic() + _LONGEST_S
        if used is None:
            return
        # Half a block tells a block that is still allocated from small allocations that have come and gone.
        while self._baseline is not None and used > self._baseline + self._size // 2 and time.monotonic() < end:
            time.sleep(_POLL_S)
            used = in_use() or 0
        addresses = block_addresses(self._size, self._count)
        if any(abs(old - new) > self._size // 8 for old, new in zip(self._addresses, addresses, strict=False)):
            give_back_freed_memory()
        self._baseline, self._addresses = used, addresses


class GrowthLimit:
    """Thread that returns freed memory to the kernel whenever the process has grown by more than a margin.

    It is for work next to a step: the programs of a pipeline, an evaluation, an offloaded update.

    Args:
        margin: Bytes of growth.
    """

    def __init__(self, margin: int):
        self._margin, self._closed = margin, threading.Event()
        self._thread = threading.Thread(target=self._watch, name="axonn-growth", daemon=True)
        if can_give_back():
            self._thread.start()

    def close(self) -> None:
        """Stop the thread."""
        self._closed.set()
        if can_give_back():
            self._thread.join()

    def _watch(self) -> None:
        allowed = resident() + self._margin
        while not self._closed.wait(_GROWTH_POLL_S):
            if resident() > allowed:
                give_back_freed_memory()
                allowed = max(allowed, resident() + self._margin)  # what could not be returned is in use


def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.argtypes, libc.malloc_trim.argtypes = [ctypes.c_void_p], [ctypes.c_size_t]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return libc


def _mallinfo2() -> _Mallinfo2 | None:
    if not can_give_back() or not hasattr(libc := _libc(), "mallinfo2"):
        return None
    libc.mallinfo2.restype = _Mallinfo2
    return libc.mallinfo2()  # type: ignore[no-any-return]


def _ask_for_huge_pages() -> None:
    """Request huge pages for the next 2 GiB of the heap; with two ranks, each ran 5 % faster."""
    libc = _libc()
    if (block := libc.malloc(_HUGE_REGION)) is not None:  # under a limit on address space, stay with small pages
        start = -(-block // _HUGE_PAGE) * _HUGE_PAGE
        libc.madvise(start, (block + _HUGE_REGION - start) // _HUGE_PAGE * _HUGE_PAGE, _MADV_HUGEPAGE)
        libc.free(block)  # without trimming it becomes the end of the heap, which grows next
