"""Host memory on the CPU backend: freed memory is kept instead of being returned to the kernel."""

import ctypes
import platform

# glibc's mallopt parameters (malloc.h).
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -2, -4, -8


def keep_freed_memory() -> bool:
    """Tells glibc to keep freed memory; returns whether it could. Call before jax starts its threads.

    XLA's CPU backend allocates all temporaries of a program anew at each execution. glibc maps such large blocks
    and unmaps them when freed, so every step pays a page fault for each 4 KiB it touches: measured at a quarter of
    a training step. One arena that grows and never shrinks makes the second step find its memory in place.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    settings = ((_M_ARENA_MAX, 1), (_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, -1), (_M_TOP_PAD, 64 << 20))
    done = [mallopt(parameter, value) for parameter, value in settings]  # every one, also after a failure
    return all(done)
