"""Memory of the CPU backend: freed memory is kept for the next step, and given back where room is needed.

XLA's CPU backend allocates all temporaries of a program anew at each execution, from glibc's malloc.
"""

import ctypes
import os
import platform
import threading
import time
from pathlib import Path
from typing import Any

import jax

from axonn_jax.backend.traits import computes_on_cores

_SETTINGS = {-8: 1, -4: 0, -1: -1, -2: 64 << 20}.items()
"""Settings of mallopt (malloc.h): M_ARENA_MAX, M_MMAP_MAX, M_TRIM_THRESHOLD, M_TOP_PAD."""
_MALLINFO2 = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
_MADV_HUGEPAGE, _HUGE_PAGE, _HUGE_REGION = 14, 2 << 20, 2 << 30
_HEADER, _GRAIN, _SPARE = 8, 16, 64 + 32
"""Bytes of glibc's header before a block, and of its unit of sizes; then XLA's alignment and a smallest block."""
WORTH_IT = 256_000_000
"""Bytes of temporaries on a device below which nothing is done: such a step is short, and so is the waste of 1 ms."""
_POLL_S, _GROWTH_POLL_S = 0.0005, 0.02
_LONGEST_S = 0.25
"""Limit of a wait for temporaries, far above the 20 ms seen on busy cores; beyond it something else has grown."""


class _Mallinfo2(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in _MALLINFO2]


def keep_freed_memory() -> None:
    """Tell glibc, where it is the allocator, to keep freed memory. Call before jax or MPI starts threads.

    Else large blocks are unmapped when freed, and every step pays a page fault for each 4 KiB it touches: a quarter of
    its time. An earlier thread may have its own arena, in which blocks above 64 MiB stay mapped.
    """
    if can_give_back():
        for parameter, value in _SETTINGS:
            _libc().mallopt(parameter, value)
        _ask_for_huge_pages()


def can_give_back() -> bool:
    """Return True if the allocator can be told to keep freed memory: glibc's can."""
    return platform.libc_ver()[0] == "glibc"


def give_back_freed_memory() -> None:
    """Return all freed memory to the kernel; between two steps it costs the next one the faults of its temporaries."""
    if can_give_back():
        _libc().malloc_trim(0)
        _ask_for_huge_pages()  # for the heap's new end


def in_use() -> int | None:
    """Bytes that this process has allocated and not freed; None where the allocator cannot tell (glibc since 2.33)."""
    info = _mallinfo2()
    return None if info is None else int(info.uordblks + info.hblkhd)


def resident() -> int:
    """Bytes of this process in memory (Linux)."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def block_addresses(size: int, count: int) -> list[int]:
    """Addresses of `count` blocks of `size` bytes if XLA took them now; nothing is touched or kept.

    Empty where such blocks are mapped and unmapped one by one (without `keep_freed_memory`), or unknown.
    """
    libc, before = _libc(), _mallinfo2()
    padded = -(-(size + _HEADER) // _GRAIN) * _GRAIN + _SPARE
    blocks = [libc.malloc(padded) for _ in range(count)]
    after = _mallinfo2()
    for block in blocks:
        libc.free(block)
    kept = before is not None and after is not None and before.hblks == after.hblks
    return sorted(block or 0 for block in blocks) if kept else []


class TemporariesInPlace:
    """Wait for the temporaries of a program's last run to be free, so that the next run's take their place.

    The backend reports a program as done some milliseconds before it frees its temporaries, one block. The next run's
    would lie beside them, in pages never touched before: the step takes up to twice as long, and the old block stays.
    Where the block moves all the same (glibc may keep its cuttings), free memory is given back first.
    """

    def __init__(self, program: jax.stages.Compiled, mesh: jax.sharding.Mesh):
        on_cores = all(computes_on_cores(device.platform) for device in mesh.devices.flat)
        analysis: Any = program.memory_analysis()
        self._size = int(analysis.temp_size_in_bytes) if on_cores else 0
        self._count = len(mesh.local_devices)
        self._before: int | None = None
        self._addresses: list[int] = []

    def wait(self, last: Any) -> None:
        """Wait before a run for `last`, the results of the run before (None for the first run), and for its memory."""
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
        addresses = block_addresses(self._size, self._count)
        if any(abs(old - new) > self._size // 8 for old, new in zip(self._addresses, addresses, strict=False)):
            give_back_freed_memory()
        self._before, self._addresses = used, addresses


class GrowthLimit:
    """Thread that gives freed memory back whenever the process has grown by more than `margin` bytes.

    For work beside a step: the programs of a pipeline, an evaluation, an offloaded update.
    """

    def __init__(self, margin: int):
        self._margin, self._closed = margin, threading.Event()
        self._thread = threading.Thread(target=self._watch, name="axonn-growth", daemon=True)
        if can_give_back():
            self._thread.start()

    def close(self) -> None:
        """End the watch."""
        self._closed.set()
        if can_give_back():
            self._thread.join()

    def _watch(self) -> None:
        allowed = resident() + self._margin
        while not self._closed.wait(_GROWTH_POLL_S):
            if resident() > allowed:
                give_back_freed_memory()
                allowed = max(allowed, resident() + self._margin)  # remaining blocks are in use


def _libc() -> Any:
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
    """Let the heap's next 2 GiB come in huge pages where the kernel grants them: two ranks ran 5 % faster each."""
    libc = _libc()
    if (block := libc.malloc(_HUGE_REGION)) is not None:  # else, a limit on address space, small pages it is
        start = -(-block // _HUGE_PAGE) * _HUGE_PAGE
        libc.madvise(start, (block + _HUGE_REGION - start) // _HUGE_PAGE * _HUGE_PAGE, _MADV_HUGEPAGE)
        libc.free(block)  # as nothing is trimmed, it is what grows next
