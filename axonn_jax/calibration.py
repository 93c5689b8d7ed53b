"""Measures the devices that jax has: matmuls, memory, attention, collectives, copies to the host and back."""

import queue
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from axonn_jax.tensor.attention import causal_attention
from axonn_jax.tensor.region import live_axes, manual

Kind = Literal["all-reduce", "all-gather", "reduce-scatter"]
KINDS: tuple[Kind, ...] = ("all-reduce", "all-gather", "reduce-scatter")
_ATTENTION = (1, 1024, 8, 64)
_STREAMED, _PASSES = 1 << 24, 8
_AXES = ("outer", "group", "inner")


@dataclass(frozen=True)
class Rate:
    """A fixed time, and the rate beyond it, of something whose time grows with its size."""

    latency_s: float
    per_s: float
    """Bytes a second."""


def seconds(call: Callable[[], Any], rounds: int) -> float:
    """Median of `rounds` timed calls, after one that is not; each is waited for."""
    jax.block_until_ready(call())
    taken = []
    for _ in range(rounds):
        begin = time.perf_counter()
        jax.block_until_ready(call())
        taken.append(time.perf_counter() - begin)
    return median(taken)


def on_all(f: Callable[..., jax.Array], shapes: Sequence[tuple[int, ...]], dtype: Any, mesh: Mesh) -> Callable[[], Any]:
    """A call that runs `f` on arrays of ones of these shapes, on every device of the mesh at once."""
    axes = live_axes(mesh) or mesh.axis_names[:1]
    mesh = Mesh(mesh.devices.reshape([mesh.shape[axis] for axis in axes]), axes)
    spec = P(axes)

    def make() -> tuple[jax.Array, ...]:
        return tuple(jnp.ones((shape[0] * mesh.size, *shape[1:]), dtype) for shape in shapes)

    with jax.set_mesh(mesh):
        made = jax.jit(make, out_shardings=(NamedSharding(mesh, spec),) * len(shapes))()
        program = jax.jit(manual(f, mesh, (spec,) * len(shapes), spec, differentiated=False))

    def call() -> jax.Array:
        with jax.set_mesh(mesh):  # not the run's, which may have other axes or devices
            return program(*made)  # type: ignore[no-any-return]

    return call


def largest(value: float, mesh: Mesh) -> float:
    """The largest of what the processes of the mesh have; all of them call it."""
    spread, same = NamedSharding(mesh, P(mesh.axis_names)), NamedSharding(mesh, P())
    local = np.full(len(mesh.local_devices), value, np.float32)
    with jax.set_mesh(mesh):
        values = jax.make_array_from_process_local_data(spread, local)
        return float(jax.jit(jnp.max, out_shardings=same)(values))


def matmul_rates(mesh: Mesh, dtype: Any, sizes: Sequence[int], rounds: int) -> dict[int, float]:
    """FLOP/s of a device in `[n, n] @ [n, n]` by n, all devices of the mesh at work."""
    rates = {}
    for size in sizes:
        call = on_all(lambda a, b: a @ b, [(size, size)] * 2, dtype, mesh)
        rates[size] = 2.0 * size**3 / seconds(call, rounds)
    return rates


def attention_share(mesh: Mesh, dtype: Any, rate: float, rounds: int) -> float:
    """Rate of causal attention's forward pass as a share of `rate`, its causal half of the FLOPs counted."""
    batch, seq, heads, head_dim = _ATTENTION
    call = on_all(causal_attention, [_ATTENTION] * 3, dtype, mesh)
    return min(1.0, 2.0 * batch * seq**2 * heads * head_dim / seconds(call, rounds) / rate)


def memory_rate(mesh: Mesh, rounds: int) -> float:
    """Bytes a second that a device reads and writes in an addition, all devices of the mesh at work."""

    def run(
        a: jax.Array,
    ) -> jax.Array:  # in place, as donated state is updated: a fresh array has its pages to find first
        return lax.fori_loop(0, _PASSES, lambda _, b: b + 1.0, a)

    taken = seconds(on_all(run, [(_STREAMED,)], jnp.float32, mesh), rounds)
    return _PASSES * 2 * 4 * _STREAMED / taken


def launch_seconds(mesh: Mesh, rounds: int) -> float:
    """Seconds of one small operation beyond the others of a program that runs many, one after the other."""

    def many(count: int) -> float:
        def run(a: jax.Array) -> jax.Array:
            return lax.fori_loop(0, count, lambda _, b: jnp.cos(b @ b), a)

        return seconds(on_all(run, [(8, 8)], jnp.float32, mesh), rounds)

    few, more = 16, 272
    return max(1e-7, (many(more) - many(few)) / (2 * (more - few)))


def host_rate(rounds: int, size: int = _STREAMED) -> float:
    """Bytes a second of a copy between a device and the host, the slower way."""
    mesh = Mesh(np.asarray(jax.local_devices()[:1]), ("all",))
    values = np.ones(size, np.float32)
    here = NamedSharding(mesh, P())
    there = seconds(lambda: jax.device_put(values, here, may_alias=False), rounds)
    add = on_all(lambda a: a + 1.0, [(size,)], jnp.float32, mesh)
    computed = seconds(add, rounds)
    # A new array each time: jax keeps the host's copy of an old one.
    back = seconds(lambda: np.array(add()), rounds) - computed
    return 4.0 * size / max(there, back, 1e-9)


def group_meshes(devices: Sequence[Any]) -> list[tuple[int, int, Mesh]]:
    """Every (product of inner axes, size of a group) of powers of two and the whole, with the devices so arranged."""
    count, found = len(devices), []
    sizes = [size for size in range(2, count + 1) if count % size == 0 and (size & (size - 1) == 0 or size == count)]
    for size in sizes:
        for inner in [1, *sizes]:
            if count % (inner * size) == 0:
                shape = (count // (inner * size), size, inner)
                found.append((inner, size, Mesh(np.asarray(devices).reshape(shape), _AXES)))
    return found


def collective_rate(kind: Kind, mesh: Mesh, elements: Sequence[int], rounds: int) -> Rate:
    """Latency and rate of a collective over the axis `group`, from messages of `elements` float32 a device.

    The rate is that of the largest, the latency the time of the smallest. Collective over the mesh.
    """
    size = mesh.shape["group"]

    def run(a: jax.Array) -> jax.Array:
        if kind == "all-reduce":
            return lax.psum(a, "group")
        if kind == "all-gather":
            return lax.all_gather(a, "group", axis=0, tiled=True)[: a.shape[0]]
        part = lax.psum_scatter(a, "group", scatter_dimension=0, tiled=True)
        return jnp.tile(part, size)

    sent, taken = [], []
    for count in elements:
        count = count // size * size
        taken.append(seconds(on_all(run, [(count,)], jnp.float32, mesh), rounds))
        whole = count * 4 * (size if kind == "all-gather" else 1)
        sent.append((2 if kind == "all-reduce" else 1) * (size - 1) / size * whole)
    return _rate(taken, sent[-1])


def local_messages(devices: Sequence[Any], elements: Sequence[int], rounds: int) -> Rate:
    """Messages between two devices of this process, of so many float32, smallest first."""
    taken = []
    for count in elements:
        value = jax.device_put(np.ones(count, np.float32), devices[0])
        taken.append(seconds(partial(jax.device_put, value, devices[1], may_alias=False), rounds))
    return _rate(taken, 4.0 * elements[-1])


def mpi_messages(channel: str, elements: Sequence[int], rounds: int) -> Rate:
    """Messages between ranks 0 and 1 through an MPI channel, of so many float32, smallest first; half round trips.

    Collective over all ranks; those beside the two get what rank 0 measured.
    """
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    me = world.Get_rank()
    pair = world.Split(0 if me < 2 else MPI.UNDEFINED, me)
    found = _round_trips(channel, pair, elements, rounds) if me < 2 else None
    return world.bcast(found)  # type: ignore[no-any-return]


def _round_trips(channel: str, pair: Any, elements: Sequence[int], rounds: int) -> Rate:
    from axonn_jax.channels import Ports, open_channel
    from axonn_jax.schedule.tasks import Message

    me, inbox = pair.Get_rank(), queue.SimpleQueue[Any]()
    here = NamedSharding(Mesh(np.asarray(jax.local_devices()[:1]), ("x",)), P())
    forms = {
        2 * place + me: jax.ShapeDtypeStruct((count,), jnp.float32, sharding=here)
        for place, count in enumerate(elements)
    }
    opened = open_channel(channel, Ports(forms, 2 * len(elements)), pair)
    opened.start(lambda message, value: inbox.put(value), inbox.put)
    taken = []
    for place, count in enumerate(elements):
        value = jax.device_put(np.ones(count, np.float32), here)
        away = Message("forward" if me == 0 else "backward", 2 * place + 1 - me, 0)
        trips = []
        for _ in range(rounds + 1):
            begin = time.perf_counter()
            if me == 0:
                opened.send(away, value)
            got = inbox.get(timeout=60)
            if isinstance(got, BaseException):
                raise got
            jax.block_until_ready(got)
            if me == 1:
                opened.send(away, value)
            trips.append((time.perf_counter() - begin) / 2)
        taken.append(median(trips[1:]))
    pair.Barrier()
    opened.flush(30)
    opened.close()
    return _rate(taken, 4.0 * elements[-1])


def _rate(taken: Sequence[float], sent: float) -> Rate:
    """The latency is the time of the smallest, the rate that of the largest beyond it."""
    return Rate(taken[0], sent / max(taken[-1] - taken[0], 0.1 * taken[-1]))
