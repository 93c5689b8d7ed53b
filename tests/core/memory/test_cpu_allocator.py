"""Memory on the CPU backend: temporaries in one place, freed memory given back; in processes of their own."""

import os
import subprocess
import sys

import pytest

from axonn_jax.core.backend.cpu_allocator import can_give_back, in_use

KEEP = """
from axonn_jax.core.backend import cpu_allocator
cpu_allocator.keep_freed_memory()
"""

BEFORE = """
import ctypes, threading, time
from types import SimpleNamespace as Some
from axonn_jax.core.backend import cpu_allocator
MB = 1 << 20
import jax, jax.numpy as jnp, numpy as np
cpu_allocator.WORTH_IT = 64 * MB
mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("x",))
libc = ctypes.CDLL(None)
libc.aligned_alloc.restype, libc.aligned_alloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t, ctypes.c_size_t]
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]

def taken(size):
    block = libc.aligned_alloc(64, size)
    ctypes.memset(block, 1, size)
    return block

def looking(size):
    return cpu_allocator.TemporariesInPlace(Some(memory_analysis=lambda: Some(temp_size_in_bytes=size)), mesh)
"""

WAITS = """
watch = looking(200 * MB)
watch.wait(None)
block = taken(200 * MB)
freed = []
def free_later():
    time.sleep(0.1)
    freed.append(time.monotonic())
    libc.free(block)
threading.Thread(target=free_later).start()
watch.wait(None)
assert freed and time.monotonic() >= freed[0]

kept = taken(150 * MB)  # something else that stays is not waited for long, nor twice
naps = []
cpu_allocator.time = Some(monotonic=time.monotonic, sleep=lambda seconds: naps.append(seconds) or time.sleep(seconds))
watch.wait(None)
assert naps
naps.clear()
watch.wait(None)
assert not naps
libc.free(kept)

small = looking(1 * MB)
small.wait(None)
block = taken(1 * MB)
small.wait(None)
assert not naps
"""

MOVES = """
watch = looking(200 * MB)
here, called = [cpu_allocator.block_addresses(200 * MB, 1), [1], [33], [2**30]], []
assert cpu_allocator.block_addresses(200 * MB, 1) == here[0]
assert len(set(cpu_allocator.block_addresses(200 * MB, 2))) == 2
cpu_allocator.block_addresses = lambda size, count: here.pop(0)
give_back = cpu_allocator.give_back_freed_memory
cpu_allocator.give_back_freed_memory = lambda: called.append(len(here))
for _ in range(4):
    watch.wait(None)
assert called == [2, 0]  # where the place is another one than before, not a few bytes further

block = taken(100 * MB)
libc.free(block)
full = cpu_allocator.resident()
give_back()
assert cpu_allocator.resident() < full - 90 * MB
"""

MAPPED = """
called = []
cpu_allocator.give_back_freed_memory = lambda: called.append(1)
assert cpu_allocator.block_addresses(200 * MB, 1) == []
watch = looking(200 * MB)
others = []
for _ in range(3):
    watch.wait(None)
    block = taken(200 * MB)
    others.append(libc.malloc(100 * MB))
    libc.free(block)
assert not called
"""

RUNS = """
@jax.jit
def program(x):
    for _ in range(4):
        x = jnp.flip(jnp.cumsum(x, axis=0), axis=1).T
    return x.sum()

x = jnp.ones((5000, 5000))
compiled = program.lower(x).compile()
size = compiled.memory_analysis().temp_size_in_bytes
assert size >= 100_000_000, size
watch = cpu_allocator.TemporariesInPlace(compiled, mesh)
last, seen = None, []
for _ in range(12):
    watch.wait(last)
    last = compiled(x)
    last.block_until_ready()
    seen.append(cpu_allocator.resident())  # its temporaries have all been touched
assert max(seen) - seen[0] < size // 4, [value / MB for value in seen]
"""


GROWS = """
import ctypes, time
from axonn_jax.core.backend import cpu_allocator
MB = 1 << 20
cpu_allocator.keep_freed_memory()
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
    assert holds(), (cpu_allocator.resident() - before) / MB

before = cpu_allocator.resident()
called = []
give_back = cpu_allocator.give_back_freed_memory
cpu_allocator.give_back_freed_memory = lambda: (called.append(1), give_back())
watch = cpu_allocator.GrowthLimit(50 * MB)
time.sleep(0.2)
made = blocks(30, MB)
for block in made:
    libc.free(block)
time.sleep(0.2)
assert not called and cpu_allocator.resident() > before + 25 * MB  # a little is kept
used = blocks(100, MB)
within(10, lambda: called)
time.sleep(0.2)
times = len(called)
assert times <= 2 and cpu_allocator.resident() > before + 95 * MB  # what is in use stays, and is not fought for ever
for block in used[::2]:
    libc.free(block)
more = blocks(30, 3 * MB)  # none fits where the others were
within(10, lambda: cpu_allocator.resident() < before + (50 + 90 + 30) * MB)
watch.close()
"""


@pytest.mark.skipif(not can_give_back() or in_use() is None, reason="an allocator that cannot tell")
@pytest.mark.parametrize(
    "program",
    [KEEP + BEFORE + WAITS, KEEP + BEFORE + MOVES, BEFORE + MAPPED, KEEP + BEFORE + RUNS, GROWS],
    ids=["waits", "moves", "mapped", "runs", "grows"],
)
def test_temporaries_keep_one_place_and_freed_memory_is_given_back_where_the_process_grows(program):
    env = {**os.environ, "XLA_FLAGS": ""}  # a program that is not optimised takes minutes
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, env=env)
    assert done.returncode == 0, done.stderr
