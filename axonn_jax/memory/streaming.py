"""Buckets of state that travel between a host and its devices, and those that stay on the devices."""

from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from axonn_jax.backend.traits import computes_on_cores
from axonn_jax.memory.host_arrays import HOST, transferred
from axonn_jax.memory.report import unused


def stream(states: list[Any], update: Callable[[int, Any], Any], staying: Collection[int] = ()) -> None:
    """Replace each state, a tree in host memory, by `update(number, its copy on the devices)`; numbers stay there.

    States whose numbers are `staying` are on the devices: `update` gets them themselves. Returns early: waits only for
    the host's copy of a state where the devices have no room for another one.
    """
    travelling = [number for number in range(len(states)) if number not in staying]
    arriving = transferred(states[travelling[0]], "device") if travelling else None
    position = 0
    for number, state in enumerate(states):
        if position == len(travelling) or number != travelling[position]:
            states[number] = update(number, state)
            continue
        current = arriving
        if position >= 2:  # its place on the device is free: room for the next
            jax.block_until_ready(states[travelling[position - 2]])
        position += 1
        if position < len(travelling):
            arriving = transferred(states[travelling[position]], "device")
        states[number] = transferred(update(number, current), HOST)


def settle(states: list[Any], staying: Collection[int]) -> None:
    """Move the states whose numbers are `staying` to the devices, one after another."""
    for number in sorted(staying):
        if not stays(states[number]):
            states[number] = jax.block_until_ready(transferred(states[number], "device"))


def stays(state: Any) -> bool:
    """True if all arrays of a state are on the devices; False for a state of numbers alone."""
    kinds = {array.sharding.memory_kind for array in jax.tree.leaves(state) if array.ndim}
    return bool(kinds) and HOST not in kinds


def chosen(sizes: Sequence[int], budget: int) -> set[int]:
    """Return the numbers of the buckets that stay on the devices, the first that fit; `sizes` are bytes a device."""
    left, staying = budget, set[int]()
    for number, size in enumerate(sizes):
        if 0 < size <= left:
            staying.add(number)
            left -= size
    return staying


def room(mesh: Mesh) -> int:
    """Return half of the bytes that no device of a mesh has ever used, the same in all its processes; 0 on CPUs.

    The other half is for what comes later: an evaluation, batches of another shape, microbatches in flight. Collective
    where processes share the mesh: a minimum of one number.
    """
    if computes_on_cores(mesh.devices.flat[0].platform):
        return 0
    half = unused(mesh, 1) // 2
    if len({device.process_index for device in mesh.devices.flat}) == 1:
        return half
    layout = NamedSharding(mesh, P(mesh.axis_names))
    given = jax.make_array_from_callback((mesh.size,), layout, lambda _: np.full(1, half >> 20, np.int32))
    return int(jax.jit(jnp.min, out_shardings=NamedSharding(mesh, P()))(given)) << 20
