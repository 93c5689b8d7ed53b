"""Timing of programs on every device of a mesh, all at work."""

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from axonn_jax.tensor.specs import live_axes, shard_mapped

Arrays = tuple[jax.Array, ...]
Shapes = Sequence[tuple[int, ...]]
_TIMED_S, _LEAST, _MOST = 0.08, 5, 100_000


def seconds(call: Callable[[], Any], rounds: int) -> float:
    """Return the median of `rounds` timed calls, each with its wait, after an untimed one."""
    jax.block_until_ready(call())
    taken = []
    for _ in range(rounds):
        begin = time.perf_counter()
        jax.block_until_ready(call())
        taken.append(time.perf_counter() - begin)
    return median(taken)


def largest(value: float, mesh: Mesh) -> float:
    """Return the largest value of the mesh's processes; collective: none goes on before the last."""
    spread, same = NamedSharding(mesh, P(mesh.axis_names)), NamedSharding(mesh, P())
    local = np.full(len(mesh.local_devices), value, np.float32)
    with jax.set_mesh(mesh):
        values = jax.make_array_from_process_local_data(spread, local)
        return float(jax.jit(jnp.max, out_shardings=same)(values))


def repeated(body: Callable[[Arrays], Arrays], shapes: Shapes, dtype: Any, mesh: Mesh) -> Callable[[int], Any]:
    """Return a call of `body` so many times in a row in one program, on every device of the mesh at once.

    `body` turns arrays of `shapes` on a device into such arrays, the input of the next run; the first input is ones.
    """
    axes = live_axes(mesh) or mesh.axis_names[:1]
    mesh = Mesh(mesh.devices.reshape([mesh.shape[axis] for axis in axes]), axes)
    spec = (P(axes),) * len(shapes)

    def make() -> Arrays:
        return tuple(jnp.ones((shape[0] * mesh.size, *shape[1:]), dtype) for shape in shapes)

    def loop(count: jax.Array, arrays: Arrays) -> Arrays:
        return lax.fori_loop(0, count, lambda _, held: body(held), arrays)

    with jax.set_mesh(mesh):
        made = jax.jit(make, out_shardings=tuple(NamedSharding(mesh, each) for each in spec))()
        program = jax.jit(shard_mapped(loop, mesh, (P(), spec), spec, differentiated=False))

    def call(count: int) -> Any:
        with jax.set_mesh(mesh):  # not the run's, which may have other axes or devices
            return program(jnp.int32(count), made)

    return call


def together(call: Callable[[int], Any], mesh: Mesh, rounds: int) -> float:
    """Return the seconds of one repetition in a `repeated` call, by the slowest process.

    Every process starts when the last is ready and runs long enough that all work at once and a program's first copies
    do not count. Collective over the mesh.
    """

    def timed(count: int) -> float:
        largest(0.0, mesh)
        begin = time.perf_counter()
        jax.block_until_ready(call(count))
        return time.perf_counter() - begin

    count = 1
    while True:
        few = largest(min(timed(count) for _ in range(2)), mesh) / count
        if count >= _LEAST:
            break
        count = max(_LEAST, min(_MOST, int(_TIMED_S / few)))
    count = max(count, min(_MOST, int(_TIMED_S / few)))  # a program's start was much of a short one
    return largest(median(timed(count) for _ in range(rounds)), mesh) / count
