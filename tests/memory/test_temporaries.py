"""On the CPU backend a program's runs use one place for their temporaries; in processes of their own."""

import subprocess
import sys

import pytest

from axonn_jax.memory.host import can_give_back, in_use

KEEP = """
from axonn_jax.memory import host
host.keep_freed_memory()
"""

BEFORE = """
import ctypes, threading, time
from types import SimpleNamespace as Some
from axonn_jax.memory import host, temporaries
MB = 1 << 20
import jax, jax.numpy as jnp, numpy as np
temporaries.WORTH_IT = 64 * MB
mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("x",))
libc = ctypes.CDLL(None)
libc.aligned_alloc.restype, libc.aligned_alloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t, ctypes.c_size_t]
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]

def taken(size):
    block = libc.aligned_alloc(64, size)
    ctypes.memset(block, 1, size)
    return block

def looking(size):
    return temporaries.Temporaries(Some(memory_analysis=lambda: Some(temp_size_in_bytes=size)), mesh)
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
temporaries.time = Some(monotonic=time.monotonic, sleep=lambda seconds: naps.append(seconds) or time.sleep(seconds))
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
here, called = [host.places(200 * MB, 1), [1], [33], [2**30]], []
assert host.places(200 * MB, 1) == here[0] and len(set(host.places(200 * MB, 2))) == 2
temporaries.places = lambda size, count: here.pop(0)
temporaries.give_back_freed_memory = lambda: called.append(len(here))
for _ in range(4):
    watch.wait(None)
assert called == [2, 0]  # where the place is another one than before, not a few bytes further

block = taken(100 * MB)
libc.free(block)
full = host.resident()
host.give_back_freed_memory()
assert host.resident() < full - 90 * MB
"""

MAPPED = """
called = []
temporaries.give_back_freed_memory = lambda: called.append(1)
assert host.places(200 * MB, 1) == []
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
watch = temporaries.Temporaries(compiled, mesh)
last, seen = None, []
for _ in range(12):
    watch.wait(last)
    last = compiled(x)
    last.block_until_ready()
    seen.append(host.resident())  # its temporaries have all been touched
assert max(seen) - seen[0] < size // 4, [value / MB for value in seen]
"""


@pytest.mark.skipif(not can_give_back() or in_use() is None, reason="an allocator that cannot tell")
@pytest.mark.parametrize(
    "program",
    [KEEP + BEFORE + WAITS, KEEP + BEFORE + MOVES, BEFORE + MAPPED, KEEP + BEFORE + RUNS],
    ids=["waits", "moves", "mapped", "runs"],
)
def test_temporaries_keep_one_place(program):
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
