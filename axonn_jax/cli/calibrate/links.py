"""Rates between devices: collectives by size and place, messages of pipeline channels."""

import queue
import time
from collections.abc import Sequence
from functools import partial
from statistics import median
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from axonn_jax.backend.repairs import reduce_scatter
from axonn_jax.cli.calibrate.device import Arrays, repeated, seconds, together
from axonn_jax.distributed.initialize import meet
from axonn_jax.planner.machines.machine import Measured

KINDS: tuple[Measured, ...] = get_args(Measured)
_AXES = ("outer", "group", "inner")
Rate = dict[str, float]
"""Seconds before a message's first byte, and bytes a second behind it."""


def group_meshes(devices: Sequence[Any]) -> list[tuple[int, int, Mesh]]:
    """Meshes for every (product of inner axes, size of a group): powers of two and the number of devices."""
    count, meshes = len(devices), []
    sizes = [size for size in range(2, count + 1) if count % size == 0 and (size & (size - 1) == 0 or size == count)]
    for size in sizes:
        for inner in [1, *sizes]:
            if count % (inner * size) == 0:
                shape = (count // (inner * size), size, inner)
                meshes.append((inner, size, Mesh(np.asarray(devices).reshape(shape), _AXES)))
    return meshes


def collective_seconds(kind: Measured, mesh: Mesh, elements: Sequence[int], rounds: int) -> dict[int, float]:
    """Seconds of a collective over the axis `group` by bytes of the whole buffer.

    `elements` are the numbers of float32 in a buffer, by kind. Collective over the mesh.
    """
    size = mesh.shape["group"]

    def body(held: Arrays) -> Arrays:
        a = held[0]
        if kind == "all-reduce":
            return (lax.psum(a, "group") / size,)
        if kind == "all-gather":
            return (lax.all_gather(a, "group", axis=0, tiled=True)[: a.shape[0]],)
        part = reduce_scatter(a, "group", 0) / size
        return (lax.dynamic_update_slice(a, part, (0,)),)

    if jax.process_count() > 1:
        meet(mesh, ("group",))
    taken = {}
    for total in elements:
        each = -(-total // size)
        count = each if kind == "all-gather" else each * size
        taken[4 * each * size] = together(repeated(body, [(count,)], jnp.float32, mesh), mesh, rounds)
    return taken


def local_messages(devices: Sequence[Any], elements: Sequence[int], rounds: int) -> Rate:
    """Messages between two devices of this process, of so many float32, smallest first."""
    taken = []
    for count in elements:
        value = jax.device_put(np.ones(count, np.float32), devices[0])
        taken.append(seconds(partial(jax.device_put, value, devices[1], may_alias=False), rounds))
    return _rate(taken, 4.0 * elements[-1])


def mpi_messages(channel: str, elements: Sequence[int], rounds: int) -> Rate:
    """Messages between neighbours through an MPI channel, of so many float32, smallest first; half round trips.

    Collective over all ranks, whose pairs send at once; all get rank 0's rate.
    """
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    me = world.Get_rank()
    pair = world.Split(me // 2, me)
    rate = _round_trips(channel, pair, elements, rounds) if pair.Get_size() == 2 else None
    return world.bcast(rate)  # type: ignore[no-any-return]


def _round_trips(channel: str, pair: Any, elements: Sequence[int], rounds: int) -> Rate:
    from axonn_jax.channels.base import Ports
    from axonn_jax.channels.choice import open_channel
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
    """Return the rate: the smallest message's time is the latency, the largest message's further time the slope."""
    return {"latency_s": taken[0], "per_s": sent / max(taken[-1] - taken[0], 0.1 * taken[-1])}
