"""Device benchmarks of calibrate: matmuls, attention, norms and activations, the optimizer, copies."""

import time
from collections.abc import Callable, Sequence
from statistics import median

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from axonn_jax.core.tensor.attention import causal_attention
from axonn_jax.core.tensor.specs import live_axes, shard_mapped

Arrays = tuple[jax.Array, ...]
Shapes = Sequence[tuple[int, ...]]
_TIMED_S, _MIN_REPEATS, _MAX_REPEATS = 0.08, 5, 100_000
_STREAMED = 1 << 24  # float32 elements
_LONE_REPEATS = 10
_BUFFERS = 64  # parameters of a pipeline stage
_UPDATED = 1 << 23  # parameters
_LIGHT_BYTES = 4 * 3 * (2 + 2 + 3)
"""Bytes per float32 element of a norm, an activation function and an addition: forward, and twice that backward."""
_UPDATE_BYTES = 2 * 4 + 2 * 3 * 4
"""Per parameter: gradients read, weights written; master weights and moments read and written."""


def seconds(call: Callable[[], object], rounds: int) -> float:
    """Return the median seconds of `rounds` calls, each timed until its result is ready, after one warm-up call."""
    jax.block_until_ready(call())
    times = []
    for _ in range(rounds):
        begin = time.perf_counter()
        jax.block_until_ready(call())
        times.append(time.perf_counter() - begin)
    return median(times)


def largest(value: float, mesh: Mesh) -> float:
    """Return the maximum of a value over the mesh's processes; collective, hence also a barrier."""
    spread, same = NamedSharding(mesh, P(mesh.axis_names)), NamedSharding(mesh, P())
    local = np.full(len(mesh.local_devices), value, np.float32)
    with jax.set_mesh(mesh):
        values = jax.make_array_from_process_local_data(spread, local)
        return float(jax.jit(jnp.max, out_shardings=same)(values))


def repeated(body: Callable[[Arrays], Arrays], shapes: Shapes, dtype: DTypeLike, mesh: Mesh) -> Callable[[int], object]:
    """Return a function that runs `body` a number of times in one program, on all devices of the mesh at once.

    Args:
        body: Maps a device's arrays to arrays of the same shapes, the input of the next iteration.
        shapes: Shapes of the arrays on one device; they start as ones.
        dtype: Dtype of the arrays.
        mesh: Devices to run on.
    """
    axes = live_axes(mesh) or mesh.axis_names[:1]
    mesh = Mesh(mesh.devices.reshape([mesh.shape[axis] for axis in axes]), axes)
    specs = (P(axes),) * len(shapes)

    def initial_inputs() -> Arrays:
        return tuple(jnp.ones((shape[0] * mesh.size, *shape[1:]), dtype) for shape in shapes)

    def loop(count: jax.Array, arrays: Arrays) -> Arrays:
        return lax.fori_loop(0, count, lambda _, carry: body(carry), arrays)

    with jax.set_mesh(mesh):
        inputs = jax.jit(initial_inputs, out_shardings=tuple(NamedSharding(mesh, partition) for partition in specs))()
        program = jax.jit(shard_mapped(loop, mesh, (P(), specs), specs, differentiated=False))

    def call(count: int) -> object:
        # The ambient mesh is the run's, whose axes or devices may differ.
        with jax.set_mesh(mesh):
            return program(jnp.int32(count), inputs)

    return call


def together(call: Callable[[int], object], mesh: Mesh, rounds: int) -> float:
    """Return the seconds of one iteration of a `repeated` function on the slowest process; collective over the mesh."""

    def timed(count: int) -> float:
        largest(0.0, mesh)  # barrier: every process starts when the last one is ready
        begin = time.perf_counter()
        jax.block_until_ready(call(count))
        return time.perf_counter() - begin

    # Iterate long enough that all devices work at the same time and a program's initial copies are negligible.
    count = 1
    while True:
        estimate = largest(min(timed(count) for _ in range(2)), mesh) / count
        if count >= _MIN_REPEATS:
            break
        count = max(_MIN_REPEATS, min(_MAX_REPEATS, int(_TIMED_S / estimate)))
    # The first estimate includes a program's start, which dominates short bodies: raise the count by the second one.
    count = max(count, min(_MAX_REPEATS, int(_TIMED_S / estimate)))
    return largest(median(timed(count) for _ in range(rounds)), mesh) / count


def matmul_rates(mesh: Mesh, dtype: DTypeLike, sizes: Sequence[int], rounds: int) -> dict[int, float]:
    """Return a device's FLOP/s in the matmuls of a linear layer by size, with all devices of the mesh busy.

    A size n means the three [n, n] products of forward and backward: output, input gradient and weight gradient, whose
    operands are transposed differently.
    """
    return {
        size: 6.0 * size**3 / together(repeated(_products, [(size, size)] * 2, dtype, mesh), mesh, rounds)
        for size in sizes
    }


def lone_matmul_rate(mesh: Mesh, dtype: DTypeLike, size: int, rounds: int) -> float:
    """Return the same rate for one size on a mesh of this process, without collectives."""
    call = repeated(_products, [(size, size)] * 2, dtype, mesh)
    return _LONE_REPEATS * 6.0 * size**3 / seconds(lambda: call(_LONE_REPEATS), rounds)


def _products(arrays: Arrays) -> Arrays:
    x, w = arrays
    y = x @ w / x.shape[0]
    return y @ w.T / x.shape[0], x.T @ y / x.shape[0]


def attention_share(mesh: Mesh, dtype: DTypeLike, rate: float, shape: tuple[int, int, int, int], rounds: int) -> float:
    """Return the FLOP/s of causal attention, forward and backward, as a share of `rate`, at most 1.

    Args:
        mesh: Devices, all busy.
        dtype: Dtype of queries, keys and values.
        rate: FLOP/s of matmuls.
        shape: [batch, seq, heads, head_dim] on one device.
        rounds: Timed repetitions.
    """
    batch, seq, heads, head_dim = shape

    def body(arrays: Arrays) -> Arrays:
        return jax.grad(lambda operands: causal_attention(*operands).astype(jnp.float32).sum())(arrays)

    elapsed = together(repeated(body, [shape] * 3, dtype, mesh), mesh, rounds)
    # Only the causal half counts: 2 FLOPs per entry of two products, halved. Backward counts 2.5 times as much as
    # forward, since it computes the scores again.
    return min(1.0, 3.5 * 2.0 * batch * seq**2 * heads * head_dim / elapsed / rate)


def memory_rate(mesh: Mesh, rounds: int) -> float:
    """Return the bytes a second that a device reads and writes in an addition, with all devices of the mesh busy."""

    def body(arrays: Arrays) -> Arrays:
        # In place, like donated training state: writing to a fresh array would also time its page faults.
        return (arrays[0] + 1.0,)

    return 2 * 4 * _STREAMED / together(repeated(body, [(_STREAMED,)], jnp.float32, mesh), mesh, rounds)


def light_rate(mesh: Mesh, shape: tuple[int, int], rounds: int) -> float:
    """Return the bytes a second of a norm, GELU and an addition, forward and backward, as the cost model counts them.

    Args:
        mesh: Devices, all busy.
        shape: [tokens, features] in float32 on one device.
        rounds: Timed repetitions.
    """

    def light(a: jax.Array) -> jax.Array:
        # Barriers keep the operations from being fused into one that reads and writes memory only once.
        b = lax.optimization_barrier(jax.checkpoint(_norm)(a))
        b = lax.optimization_barrier(jax.checkpoint(jax.nn.gelu)(b))
        return lax.optimization_barrier(a + b)

    def body(arrays: Arrays) -> Arrays:
        out, back = jax.vjp(light, arrays[0])
        return (back(out)[0] * 1e-3 + 1.0,)

    return _LIGHT_BYTES * shape[0] * shape[1] / together(repeated(body, [shape], jnp.float32, mesh), mesh, rounds)


def _norm(a: jax.Array) -> jax.Array:
    mean = jnp.mean(a, -1, keepdims=True)
    return (a - mean) * lax.rsqrt(jnp.mean(jnp.square(a - mean), -1, keepdims=True) + 1e-5)


def update_rate(mesh: Mesh, rounds: int) -> float:
    """Return the bytes a second of AdamW's update and the gradient norm in float32, as the cost model counts them."""
    optimizer = optax.adamw(1e-3)
    empty = optimizer.init(jnp.zeros((1,), jnp.float32))

    def body(arrays: Arrays) -> Arrays:
        params, grads, first_moment, second_moment = arrays
        factor = jnp.minimum(1.0, lax.rsqrt(jnp.sum(jnp.square(grads))))
        state = optax.tree_utils.tree_set(empty, mu=first_moment, nu=second_moment)
        with jax.numpy_dtype_promotion("standard"):
            updates, state = optimizer.update(grads * factor, state, params)
        get = optax.tree_utils.tree_get
        return optax.apply_updates(params, updates), grads, get(state, "mu"), get(state, "nu")  # type: ignore[return-value]

    return _UPDATE_BYTES * _UPDATED / together(repeated(body, [(_UPDATED,)] * 4, jnp.float32, mesh), mesh, rounds)


def launch_seconds(mesh: Mesh, rounds: int) -> float:
    """Return the seconds of one small operation in a program that runs many in sequence."""

    def body(arrays: Arrays) -> Arrays:
        return (jnp.cos(arrays[0] @ arrays[0]),)

    # The body has two operations: the product and the cosine.
    return max(1e-7, together(repeated(body, [(8, 8)], jnp.float32, mesh), mesh, rounds) / 2)


def program_seconds(rounds: int) -> float:
    """Return the seconds to call a nearly empty program on this process's first device and wait for its results.

    The program takes and returns as many arrays as a pipeline stage has parameters.
    """
    mesh = _first_local_device_mesh()
    replicated = NamedSharding(mesh, P())
    with jax.set_mesh(mesh):
        values = [jax.device_put(np.ones((8, 8), np.float32), replicated) for _ in range(_BUFFERS)]
        program = jax.jit(lambda arrays: [a + 1.0 for a in arrays])
        return seconds(lambda: program(values), 20 * rounds)


def host_rate(rounds: int) -> float:
    """Return the bytes a second of copies between a device and the host, in the slower direction."""
    mesh, times = _first_local_device_mesh(), []
    replicated = NamedSharding(mesh, P())
    with jax.set_mesh(mesh):
        add = jax.jit(lambda a: a + 1.0)
        source = jax.block_until_ready(add(jax.device_put(np.ones(_STREAMED, np.float32), replicated)))
        for _ in range(rounds + 1):
            begin = time.perf_counter()
            host_copy = np.array(source)
            copied = time.perf_counter()
            device_copy = jax.block_until_ready(jax.device_put(host_copy, replicated, may_alias=False))
            times.append(max(copied - begin, time.perf_counter() - copied))
            # Copy a new array each time: jax caches the host copy of an array, so a second one would be free.
            source = jax.block_until_ready(add(device_copy))
    return 4.0 * _STREAMED / median(times[1:])


def _first_local_device_mesh() -> Mesh:
    return Mesh(np.asarray(jax.local_devices()[:1]), ("all",))
