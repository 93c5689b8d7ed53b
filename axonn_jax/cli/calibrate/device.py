"""Rates of a device: matmuls, attention, norms and activation functions, the optimizer, copies; how they are timed."""

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from axonn_jax.tensor.attention import causal_attention
from axonn_jax.tensor.specs import live_axes, shard_mapped

Arrays = tuple[jax.Array, ...]
Shapes = Sequence[tuple[int, ...]]
_TIMED_S, _LEAST, _MOST = 0.08, 5, 100_000
_STREAMED = 1 << 24
_LONE = 10
_BUFFERS = 64
_UPDATED = 1 << 23
_LIGHT_BYTES = 4 * 3 * (2 + 2 + 3)
"""Bytes of a norm, an activation function and an addition, forward and (twice as many) backward, per float32 element.
"""
_UPDATE_BYTES = 2 * 4 + 2 * 3 * 4
"""Per parameter: gradients read, weights written; master weights and moments read and written."""


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


def matmul_rates(mesh: Mesh, dtype: Any, sizes: Sequence[int], rounds: int) -> dict[int, float]:
    """FLOP/s of a device in a linear layer's three products of [n, n] matrices by n, all devices of the mesh at work.

    Products: the output, and the gradients of input and weight, with operands in other orders.
    """
    return {
        size: 6.0 * size**3 / together(repeated(_products, [(size, size)] * 2, dtype, mesh), mesh, rounds)
        for size in sizes
    }


def lone_matmul_rate(mesh: Mesh, dtype: Any, size: int, rounds: int) -> float:
    """The same on a process's own mesh, whatever other processes do."""
    call = repeated(_products, [(size, size)] * 2, dtype, mesh)
    return _LONE * 6.0 * size**3 / seconds(lambda: call(_LONE), rounds)


def _products(held: Arrays) -> Arrays:
    x, w = held
    y = x @ w / x.shape[0]
    return y @ w.T / x.shape[0], x.T @ y / x.shape[0]


def attention_share(mesh: Mesh, dtype: Any, rate: float, shape: tuple[int, int, int, int], rounds: int) -> float:
    """Rate of causal attention, [batch, seq, heads, head_dim], as a share of `rate`, counting the causal half.

    Forward, and backward, counted 2.5 times since scores are computed again.
    """
    batch, seq, heads, head_dim = shape

    def body(held: Arrays) -> Arrays:
        return jax.grad(lambda arrays: causal_attention(*arrays).astype(jnp.float32).sum())(held)

    taken = together(repeated(body, [shape] * 3, dtype, mesh), mesh, rounds)
    return min(1.0, 3.5 * 2.0 * batch * seq**2 * heads * head_dim / taken / rate)


def memory_rate(mesh: Mesh, rounds: int) -> float:
    """Bytes a second read and written by a device in an addition, all devices of the mesh at work."""

    def body(held: Arrays) -> Arrays:  # in place, as donated state is: a fresh array has its pages to find first
        return (held[0] + 1.0,)

    return 2 * 4 * _STREAMED / together(repeated(body, [(_STREAMED,)], jnp.float32, mesh), mesh, rounds)


def light_rate(mesh: Mesh, shape: tuple[int, int], rounds: int) -> float:
    """Bytes a second of a block's work beside matmuls and attention, on float32 [tokens, features].

    A norm, GELU and an addition, forward and backward, each by itself; bytes as the cost model counts them.
    """

    def light(a: jax.Array) -> jax.Array:
        b = lax.optimization_barrier(jax.checkpoint(_norm)(a))
        b = lax.optimization_barrier(jax.checkpoint(jax.nn.gelu)(b))
        return lax.optimization_barrier(a + b)

    def body(held: Arrays) -> Arrays:
        out, back = jax.vjp(light, held[0])
        return (back(out)[0] * 1e-3 + 1.0,)

    return _LIGHT_BYTES * shape[0] * shape[1] / together(repeated(body, [shape], jnp.float32, mesh), mesh, rounds)


def _norm(a: jax.Array) -> jax.Array:
    mean = jnp.mean(a, -1, keepdims=True)
    return (a - mean) * lax.rsqrt(jnp.mean(jnp.square(a - mean), -1, keepdims=True) + 1e-5)


def update_rate(mesh: Mesh, rounds: int) -> float:
    """Bytes a second of AdamW's update of float32 parameters with the gradients' norm, as the cost model counts."""
    optimizer = optax.adamw(1e-3)
    empty = optimizer.init(jnp.zeros((1,), jnp.float32))

    def body(held: Arrays) -> Arrays:
        params, grads, first, second = held
        factor = jnp.minimum(1.0, lax.rsqrt(jnp.sum(jnp.square(grads))))
        state = optax.tree_utils.tree_set(empty, mu=first, nu=second)
        with jax.numpy_dtype_promotion("standard"):
            updates, state = optimizer.update(grads * factor, state, params)
        got = optax.tree_utils.tree_get
        return optax.apply_updates(params, updates), grads, got(state, "mu"), got(state, "nu")  # type: ignore[return-value]

    return _UPDATE_BYTES * _UPDATED / together(repeated(body, [(_UPDATED,)] * 4, jnp.float32, mesh), mesh, rounds)


def launch_seconds(mesh: Mesh, rounds: int) -> float:
    """Seconds of one small operation in a program of many, one after the other."""

    def body(held: Arrays) -> Arrays:
        return (jnp.cos(held[0] @ held[0]),)

    return max(1e-7, together(repeated(body, [(8, 8)], jnp.float32, mesh), mesh, rounds) / 2)


def program_seconds(rounds: int) -> float:
    """Return the seconds of a call, with the wait, of a nearly empty program on this process's first device.

    The program takes and gives as many arrays as a stage of a pipeline has parameters.
    """
    mesh = _alone()
    here = NamedSharding(mesh, P())
    with jax.set_mesh(mesh):
        values = [jax.device_put(np.ones((8, 8), np.float32), here) for _ in range(_BUFFERS)]
        program = jax.jit(lambda arrays: [a + 1.0 for a in arrays])
        return seconds(lambda: program(values), 20 * rounds)


def host_rate(rounds: int) -> float:
    """Bytes a second of a copy between a device and the host, the slower way."""
    mesh, taken = _alone(), []
    here = NamedSharding(mesh, P())
    with jax.set_mesh(mesh):
        add = jax.jit(lambda a: a + 1.0)
        held = jax.block_until_ready(add(jax.device_put(np.ones(_STREAMED, np.float32), here)))
        for _ in range(rounds + 1):
            begin = time.perf_counter()
            values = np.array(held)
            copied = time.perf_counter()
            moved = jax.block_until_ready(jax.device_put(values, here, may_alias=False))
            taken.append(max(copied - begin, time.perf_counter() - copied))
            held = jax.block_until_ready(add(moved))  # a new array: jax keeps the host's copy of an old one
    return 4.0 * _STREAMED / median(taken[1:])


def _alone() -> Mesh:
    return Mesh(np.asarray(jax.local_devices()[:1]), ("all",))
