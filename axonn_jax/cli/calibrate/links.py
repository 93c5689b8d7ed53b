"""Link benchmarks of calibrate: collectives by size and placement, and messages of pipeline channels."""

import queue
import time
from collections.abc import Sequence
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from axonn_jax.cli.calibrate.device import Arrays, repeated, seconds, together
from axonn_jax.core.backend.workarounds import reduce_scatter
from axonn_jax.core.distributed.initialize import meet
from axonn_jax.planning.machines.machine import Measured

if TYPE_CHECKING:
    from mpi4py import MPI

KINDS: tuple[Measured, ...] = get_args(Measured)
_AXES = ("outer", "group", "inner")
Rate = dict[str, float]
"""Latency of a message (`latency_s`, seconds) and its bandwidth (`per_s`, bytes a second)."""


def group_meshes(devices: Sequence[jax.Device]) -> list[tuple[int, int, Mesh]]:
    """Return meshes with their inner product and group size: powers of two, and the number of devices."""
    count, meshes = len(devices), []
    sizes = [size for size in range(2, count + 1) if count % size == 0 and (size & (size - 1) == 0 or size == count)]
    for size in sizes:
        for inner in [1, *sizes]:
            if count % (inner * size) == 0:
                shape = (count // (inner * size), size, inner)
                meshes.append((inner, size, Mesh(np.asarray(devices).reshape(shape), _AXES)))
    return meshes


def collective_seconds(kind: Measured, mesh: Mesh, elements: Sequence[int], rounds: int) -> dict[int, float]:
    """Return the seconds of a collective over the axis `group`, by the bytes of the full buffer.

    Args:
        kind: Kind of collective.
        mesh: Mesh from `group_meshes`; all of its processes must call.
        elements: float32 elements of the full buffers, rounded up to a multiple of the group.
        rounds: Timed repetitions.
    """
    size = mesh.shape["group"]

    def body(arrays: Arrays) -> Arrays:
        a = arrays[0]
        if kind == "all-reduce":
            return (lax.psum(a, "group") / size,)
        if kind == "all-gather":
            return (lax.all_gather(a, "group", axis=0, tiled=True)[: a.shape[0]],)
        part = reduce_scatter(a, "group", 0) / size
        return (lax.dynamic_update_slice(a, part, (0,)),)

    if jax.process_count() > 1:
        meet(mesh, ("group",))
    times = {}
    for total in elements:
        shard = -(-total // size)
        count = shard if kind == "all-gather" else shard * size
        times[4 * shard * size] = together(repeated(body, [(count,)], jnp.float32, mesh), mesh, rounds)
    return times


def local_messages(devices: Sequence[jax.Device], elements: Sequence[int], rounds: int) -> Rate:
    """Return the rate of copies between two devices of this process.

    Args:
        devices: The first copies to the second.
        elements: float32 elements of the messages, smallest first.
        rounds: Timed repetitions.
    """
    times = []
    for count in elements:
        value = jax.device_put(np.ones(count, np.float32), devices[0])
        times.append(seconds(partial(jax.device_put, value, devices[1], may_alias=False), rounds))
    return _rate(times, 4.0 * elements[-1])


def mpi_messages(channel: str, elements: Sequence[int], rounds: int) -> Rate:
    """Return the rate of messages between neighbouring ranks, half of a round trip; collective over all ranks.

    All pairs of ranks send at the same time, and every rank returns the rate of rank 0.

    Args:
        channel: Name of the MPI channel.
        elements: float32 elements of the messages, smallest first.
        rounds: Timed round trips.
    """
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    rank = world.Get_rank()
    pair = world.Split(rank // 2, rank)
    rate = _round_trips(channel, pair, elements, rounds) if pair.Get_size() == 2 else None
    return world.bcast(rate)  # type: ignore[no-any-return]


def _round_trips(channel: str, pair: "MPI.Comm", elements: Sequence[int], rounds: int) -> Rate:
    from axonn_jax.pipe.channels.base import Ports
    from axonn_jax.pipe.channels.choice import open_channel
    from axonn_jax.pipe.schedule.tasks import Message

    rank, inbox = pair.Get_rank(), queue.SimpleQueue[object]()
    placement = NamedSharding(Mesh(np.asarray(jax.local_devices()[:1]), ("x",)), P())
    # Each message size has two stages of its own: the even one on rank 0 of the pair, the odd one on rank 1.
    shapes = {
        2 * place + rank: jax.ShapeDtypeStruct((count,), jnp.float32, sharding=placement)
        for place, count in enumerate(elements)
    }
    link = open_channel(channel, Ports(shapes, 2 * len(elements)), pair)
    link.start(lambda message, value: inbox.put(value), inbox.put)
    times = []
    for place, count in enumerate(elements):
        value = jax.device_put(np.ones(count, np.float32), placement)
        outgoing = Message("forward" if rank == 0 else "backward", 2 * place + 1 - rank, 0)
        trips = []
        for _ in range(rounds + 1):
            begin = time.perf_counter()
            if rank == 0:
                link.send(outgoing, value)
            received = inbox.get(timeout=60)
            if isinstance(received, BaseException):
                raise received
            jax.block_until_ready(received)
            if rank == 1:
                link.send(outgoing, value)
            trips.append((time.perf_counter() - begin) / 2)
        times.append(median(trips[1:]))  # the first trip is a warm-up
    pair.Barrier()
    link.flush(30)
    link.close()
    return _rate(times, 4.0 * elements[-1])


def _rate(times: Sequence[float], largest_bytes: float) -> Rate:
    # The smallest message gives the latency, and the time beyond it of the largest one the bandwidth. Noise can make
    # that difference vanish, hence the lower bound.
    return {"latency_s": times[0], "per_s": largest_bytes / max(times[-1] - times[0], 0.1 * times[-1])}
