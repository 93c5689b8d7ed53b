"""Freed memory that is kept is given back where the process grows by it, and only there; in a process of its own."""

import subprocess
import sys

import pytest

from axonn_jax.memory.host import can_give_back

PROGRAM = """
import ctypes, time
from axonn_jax.memory import growth, host
MB = 1 << 20
host.keep_freed_memory()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]

def blocks(count, size):
    made = [libc.malloc(size) for _ in range(count)]
    for block in made:
        ctypes.memset(block, 1, size)
    return made

def within(seconds, holds):
    end = time.monotonic() + seconds
    while not holds() and time.monotonic() < end:
        time.sleep(0.01)
    assert holds(), (host.resident() - before) / MB

before = host.resident()
called = []
give_back = host.give_back_freed_memory
growth.give_back_freed_memory = lambda: (called.append(1), give_back())
watch = growth.Growth(50 * MB)
time.sleep(0.2)
made = blocks(30, MB)
for block in made:
    libc.free(block)
time.sleep(0.2)
assert not called and host.resident() > before + 25 * MB  # a little is kept
used = blocks(100, MB)
within(10, lambda: called)
time.sleep(0.2)
times = len(called)
assert times <= 2 and host.resident() > before + 95 * MB  # what is in use stays, and is not fought for ever
for block in used[::2]:
    libc.free(block)
more = blocks(30, 3 * MB)  # none fits where the others were
within(10, lambda: host.resident() < before + (50 + 90 + 30) * MB)
watch.close()
"""


@pytest.mark.skipif(not can_give_back(), reason="an allocator that cannot be told")
def test_what_was_freed_is_given_back_where_the_process_grows_by_it():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
