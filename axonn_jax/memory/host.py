"""Host memory on the CPU backend: freed memory is kept, not returned to the kernel, until something needs the room."""

import ctypes
import os
import platform
from pathlib import Path

# glibc's mallopt parameters (malloc.h).
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -2, -4, -8
_MALLINFO2 = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
_MADV_HUGEPAGE = 14
_ALIGNED, _SMALLEST, _HEADER, _GRAIN = 64, 32, 8, 16
"""What XLA aligns memory to; glibc's smallest block, what it puts before one, and what sizes are multiples of."""
_HUGE_PAGE = 2 << 20
_HUGE_REGION = 2 << 30
"""Address space, not memory: a page is taken when first touched."""


def keep_freed_memory() -> bool:
    """Tells glibc to keep freed memory; returns whether it could. Call before jax or MPI starts threads.

    XLA's CPU backend allocates all temporaries of a program anew at each execution. glibc maps such large blocks
    and unmaps them when freed, so every step pays a page fault for each 4 KiB it touches: measured at a quarter of
    a training step. One arena that grows and never shrinks makes the second step find its memory in place. A thread
    that is there before may have an arena of its own, which later threads then share: in it blocks above 64 MiB are
    mapped and unmapped all the same.
    """
    if not can_give_back():
        return False
    libc = ctypes.CDLL(None)
    mallopt = libc.mallopt
    settings = ((_M_ARENA_MAX, 1), (_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, -1), (_M_TOP_PAD, 64 << 20))
    done = [mallopt(parameter, value) for parameter, value in settings]  # every one, also after a failure
    _ask_for_huge_pages(libc)
    return all(done)


def can_give_back() -> bool:
    """Whether the allocator is one that can be told what to keep: glibc's."""
    return platform.libc_ver()[0] == "glibc"


def give_back_freed_memory() -> None:
    """Returns all freed memory to the kernel, where the allocator can be told to.

    What a step frees is its temporaries: called between two steps it costs the next one their page faults, called
    during a step it gives back only what no step would use.
    """
    if not can_give_back():
        return
    libc = ctypes.CDLL(None)
    libc.malloc_trim.argtypes = [ctypes.c_size_t]
    libc.malloc_trim(0)
    _ask_for_huge_pages(libc)  # the heap now ends at its last block, and so does what was asked for before


class _Mallinfo2(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in _MALLINFO2]


def in_use() -> int | None:
    """Bytes that this process has allocated and not freed; None where the allocator cannot tell (glibc since 2.33)."""
    found = _mallinfo2()
    return None if found is None else int(found.uordblks + found.hblkhd)


def places(size: int, count: int) -> list[int]:
    """Where `count` blocks of `size` bytes would lie, were XLA to take them now; nothing is touched or kept.

    An aligned block is cut out of one larger by its alignment and the smallest block; just that one is asked for. Empty
    where such blocks are mapped and unmapped one by one (without `keep_freed_memory`), or nobody can tell.
    """
    libc = ctypes.CDLL(None)
    _declare_malloc(libc)
    before = _mallinfo2()
    whole = -(-(size + _HEADER) // _GRAIN) * _GRAIN + _ALIGNED + _SMALLEST
    blocks = [libc.malloc(whole) for _ in range(count)]
    after = _mallinfo2()
    for block in blocks:
        libc.free(block)
    kept = before is not None and after is not None and before.hblks == after.hblks
    return sorted(block or 0 for block in blocks) if kept else []


def _declare_malloc(libc: ctypes.CDLL) -> None:
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]


def _mallinfo2() -> _Mallinfo2 | None:
    mallinfo2 = getattr(ctypes.CDLL(None), "mallinfo2", None) if can_give_back() else None
    if mallinfo2 is None:
        return None
    mallinfo2.restype = _Mallinfo2
    return mallinfo2()  # type: ignore[no-any-return]


def resident() -> int:
    """Bytes of this process in memory (Linux)."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _ask_for_huge_pages(libc: ctypes.CDLL) -> None:
    """Lets the heap's next 2 GiB come in huge pages where the kernel grants them on request.

    Fewer address translations go through the memory that cores share: two ranks on two cores ran 5 % faster each, one
    rank alone the same (measured). The block is given back at once and, as nothing is trimmed, is what grows next.
    """
    _declare_malloc(libc)
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    block = libc.malloc(_HUGE_REGION)
    if block is None:  # a limit on address space: small pages it is
        return
    start = -(-block // _HUGE_PAGE) * _HUGE_PAGE
    libc.madvise(start, (block + _HUGE_REGION - start) // _HUGE_PAGE * _HUGE_PAGE, _MADV_HUGEPAGE)
    libc.free(block)
