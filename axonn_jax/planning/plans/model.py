"""`ax.plan`: the grids on which a Flax model of one's own can be trained, by predicted time of a step."""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from axonn_jax.any_flax.modules.job import check_loss
from axonn_jax.any_flax.parallelize.api import parallelize
from axonn_jax.any_flax.parallelize.report import sharding_report
from axonn_jax.core.errors import UserError, integer, typed_arguments
from axonn_jax.core.grid import MESH_AXES, MOST_DEVICES, Grid, GridShape, divisors, without_mesh
from axonn_jax.core.memory.precision import precisions
from axonn_jax.core.tensor.specs import spec_axes
from axonn_jax.core.terminal import Ticker, table
from axonn_jax.planning.machines.machine import Machine
from axonn_jax.planning.machines.machine_file import load_machine
from axonn_jax.planning.machines.network import GroupLinks, ring_bytes
from axonn_jax.planning.memory import ADAM, itemsize
from axonn_jax.planning.plans.given import Batch, Loss, batch_of, check_value, module_of, trained, value_of
from axonn_jax.planning.plans.program import device_work


@dataclass(frozen=True)
class PlannedGrid:
    """A grid with the predicted time, communication and memory of a step on it."""

    grid: GridShape
    step_s: float
    """Predicted seconds of a step: compute, communication, update."""
    compute_s: float
    comm_s: Mapping[str, float]
    """Seconds of communication by axes (``data+z`` for a reduction over both), none of it hidden."""
    sent: Mapping[str, int]
    """Bytes that a device sends in a step, by axes."""
    memory_bytes: float
    """Bytes of parameters, optimizer state, gradients and activations."""
    unsplit: float
    """Share of the parameters in layers that are left to the compiler, whose communication is only estimated."""

    @property
    def sizes(self) -> dict[str, int]:
        """Arguments of `init` for the grid."""
        return {axis: size for axis in MESH_AXES if (size := getattr(self.grid, axis)) > 1}


@dataclass(frozen=True)
class ModelPlan:
    """Grids for a model, fastest first; `str` is a table with the line that creates the first grid."""

    grids: tuple[PlannedGrid, ...]
    """Grids that fit in memory."""
    too_large: tuple[PlannedGrid, ...]
    """Grids that do not fit in memory, the smallest first."""
    left_out: Mapping[str, int]
    """Numbers of rejected grids by reason."""
    title: str
    limit: float
    """Bytes that a step may use on a device."""

    @property
    def best(self) -> PlannedGrid:
        """The fastest grid."""
        return self.grids[0]

    def __str__(self) -> str:
        head = (*("data", "z", "y", "x"), "step, s", "compute, s", "sends, s", "memory, GB")
        rows = [
            (
                *(str(getattr(planned.grid, axis)) for axis in ("data", "z", "y", "x")),
                *(f"{s:,.4f}" for s in (planned.step_s, planned.compute_s, sum(planned.comm_s.values()))),
                f"{planned.memory_bytes / 1e9:,.2f}",
            )
            for planned in self.grids[:_SHOWN]
        ]
        out = [f"{count} grids left out: {why}" for why, count in self.left_out.items()]
        if self.too_large:
            least = self.too_large[0]
            out.append(f"{len(self.too_large)} grids need more than {self.limit / 1e9:.1f} GB, at least {_gb(least)}")
        if self.best.unsplit >= _NOTED:
            share = f"{self.best.unsplit:.0%} of the parameters are in layers that are left to the compiler"
            out.append(f"{share}: what these send and keep is a guess; see ax.sharding_report")
        sizes = ", ".join(f"{axis}={size}" for axis, size in self.best.sizes.items())
        return "\n".join([self.title, "", *table(head, rows), "", *out, f"grid = ax.init({sizes})"])


_SHOWN = 8
"""Grids in the table."""
_SHORT = 0.31
"""Largest measured underestimate of memory in models whose layers are split (docs/plan.md)."""
_NOTED = 0.02
"""Share of parameters left to the compiler above which the table mentions it."""
_TIE = 0.03
"""Times closer than this count as equal: the simplest grid is first."""


@typed_arguments
def plan(model: object, loss: Loss, batch: object, *, machine: str | Path, devices: int) -> ModelPlan:
    """Predict which grid trains a Flax NNX model fastest on a machine, without its devices; nothing is computed.

    Each grid's step is traced with the layers of `parallelize`: its matmuls at the machine's rate, all else by bytes
    through memory, and the collectives of `sharding_report` one after the other, none hidden. Memory is that of
    `Trainer` with AdamW and one microbatch: parameters and optimizer state as they are split, and the most that
    gradients and activations take in the order of the trace. Tracing takes about 0.1 s a grid and layer.

    Args:
        model: The module, or a function that makes it. Arrays may be shapes alone.
        loss: Function of (model, batch) or (model, batch, key), as of `Trainer`.
        batch: Tree of arrays or `jax.ShapeDtypeStruct`, the whole batch of a step, rows first.
        machine: Name of a machine, or the path of a machine file (docs/plan.md).
        devices: Number of devices.

    Returns:
        The grids, fastest first; ``str`` of it is a table.

    Raises:
        UserError: An argument is wrong, or no grid fits.
    """
    check_loss(loss)
    integer("devices", devices, 1, MOST_DEVICES)
    hardware = load_machine(str(machine)).shared(devices)
    module, abstract_batch = module_of(model), batch_of(batch)
    check_value(module, loss, abstract_batch.shapes)
    planned, excluded = list[PlannedGrid](), Counter[str]()
    with without_mesh(), Ticker("tracing grids") as ticker:
        grids = list(_grids(devices, abstract_batch.rows, hardware, excluded))
        for at, shape in enumerate(grids):
            ticker.now(f"tracing grid {at + 1} of {len(grids)}")
            planned.append(_planned(module, loss, abstract_batch, shape, hardware))
    limit = hardware.device.program_bytes * (1.0 - _SHORT)
    fits = sorted((entry for entry in planned if entry.memory_bytes <= limit), key=lambda entry: entry.step_s)
    large = sorted((entry for entry in planned if entry.memory_bytes > limit), key=lambda entry: entry.memory_bytes)
    if not fits:
        why = f"at least {_gb(large[0])} of {limit / 1e9:.1f} GB a device" if large else _listed(excluded)
        raise UserError("devices", devices, f"a number for which a grid fits; {why}")
    # Predictions closer than `_TIE` do not rank grids, so prefer the one with the fewest axes and least communication.
    alike = [entry for entry in fits if entry.step_s < fits[0].step_s * (1 + _TIE)]
    first = min(alike, key=lambda entry: (len(entry.sizes), entry.grid.y * entry.grid.x, entry.grid.z))
    name, rows = type(module).__name__, abstract_batch.rows
    title = f"{name} on {devices} x {hardware.device.kind}, {rows} rows a step, {hardware.half}"
    return ModelPlan((first, *(entry for entry in fits if entry is not first)), tuple(large), excluded, title, limit)


def _listed(reasons: Mapping[str, int]) -> str:
    return "; ".join(f"{count} grids: {why}" for why, count in reasons.items())


def _gb(planned: PlannedGrid) -> str:
    sizes = " x ".join(f"{axis} {size}" for axis, size in planned.sizes.items()) or "one device"
    return f"{planned.memory_bytes / 1e9:.1f} GB ({sizes})"


def _grids(devices: int, rows: int, machine: Machine, excluded: Counter[str]) -> Iterator[GridShape]:
    """Yield the grids of `devices` devices with `y` and `x` inside a node and an integer number of rows per device."""
    for z, y, x in product(divisors(devices), repeat=3):
        if devices % (z * y * x):
            continue
        grid = GridShape(data=devices // (z * y * x), z=z, y=y, x=x)
        if y * x > machine.node.devices:
            excluded[f"y * x is above {machine.node.devices}, the devices of a node"] += 1
        elif rows % grid.batch_shards:
            excluded[f"data * z does not divide the batch's {rows} rows"] += 1
        else:
            yield grid


def _planned(module: nnx.Module, loss: Loss, batch: Batch, shape: GridShape, machine: Machine) -> PlannedGrid:
    sizes = {axis: int(getattr(shape, axis)) for axis in MESH_AXES}
    mesh: Any = AbstractMesh(tuple(sizes.values()), MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))

    def call(model: nnx.Module) -> object:
        return value_of(loss, model, jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), batch.shapes))

    split = parallelize(module, Grid(shape, mesh, {0: mesh}), call=call)
    pieces: Any = nnx.split(split, trained, ...)
    graph, params, non_params = pieces
    half = precisions(machine.half).compute

    def graded(params: Any, non_params: object, rows: object) -> object:
        def of(params: object) -> Any:
            state = jax.tree.map(lambda leaf: leaf, non_params)  # Variables of this trace, which calls may change
            return jnp.asarray(value_of(loss, nnx.merge(graph, params, state), rows), jnp.float32)

        return jax.value_and_grad(of)(params)

    # Parameters are cast before the trace because `Trainer` computes in half precision on float32 masters.
    cast = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, half), params)
    with jax.numpy_dtype_promotion("standard"):  # a user's model need not name the dtypes of its constants
        traced = jax.make_jaxpr(graded)(cast, non_params, batch.shapes)
    parts = [prod(sizes[axis] for axis in _axes(leaf)) for leaf in jax.tree.leaves((params, non_params))]
    input_parts = [*parts, *(shape.batch_shards if rowed else 1 for rowed in batch.rowed)]
    work = device_work(traced.jaxpr, input_parts, len(parts), sizes, shape.batch_shards)
    local_params = sum(p.size / n for p, n in zip(jax.tree.leaves(params), parts, strict=False))
    state_leaves = jax.tree.leaves(non_params)
    state_bytes = sum(
        v.size * v.dtype.itemsize / n
        for v, n in zip(state_leaves, parts[len(parts) - len(state_leaves) :], strict=True)
    )
    sent, seconds, unsplit = _sent(split, shape, machine, half)
    rate = machine.peak(machine.half) * machine.matmul.large * machine.matmul.sustained
    light = machine.device.light_bytes_per_s or machine.device.memory_bytes_per_s
    compute = work.flops / rate + work.moved / light
    update = local_params * (2 * (4 + ADAM) + 4 + itemsize(machine.half)) / machine.device.memory_bytes_per_s
    memory = (
        local_params * (4 + ADAM + (itemsize(machine.half) if machine.half != "fp32" else 0)) + state_bytes + work.peak
    )
    step = compute + sum(seconds.values()) + update
    return PlannedGrid(shape, step, compute, seconds, sent, memory, unsplit)


def _axes(leaf: object) -> frozenset[str]:
    """Return the mesh axes that split an array."""
    return spec_axes(getattr(getattr(leaf, "sharding", None), "spec", P()))


def _sent(
    model: nnx.Module, shape: GridShape, machine: Machine, half: DTypeLike
) -> tuple[dict[str, int], dict[str, float], float]:
    """Return bytes and seconds of a step's communication by axes, and the share of parameters that no layer splits.

    For sharded layers it is the communication of the sharding report. For all other layers the model assumes that
    parameters are gathered over the axes that split them, and that gradients are reduced over these axes and those of
    the rows.
    """
    links, sent, seconds = GroupLinks(shape, machine), Counter[str](), dict[str, float]()
    report = sharding_report(model)
    for entry in report.entries:
        if entry.dtype == jnp.float32:  # `Trainer` computes in half precision where a layer names no dtype
            entry = replace(entry, dtype=half)
        moves: list[tuple[Any, Collection[str], int]] = [
            (transfer.kind, transfer.axes, transfer.bytes) for transfer in entry.transfers
        ]
        if not entry.plan.sharded:
            spread_axes = frozenset[str]().union(*(spec_axes(spec) for _, spec in entry.plan.spread))
            moves += [("all-gather", spread_axes, entry.bytes)] if spread_axes else []
            moves.append(("all-reduce", spread_axes | {"data", "z"}, entry.bytes))
        for kind, over, count in moves:
            axes = tuple(axis for axis in MESH_AXES if axis in over and getattr(shape, axis) > 1)
            group = prod(int(getattr(shape, axis)) for axis in axes)
            if group > 1:  # the report has bytes on the ring, and buffers are counted here
                ring = count if isinstance(over, tuple) else int(ring_bytes(kind, count, group))
                name = "+".join(axes)
                bucketed = "data" in axes and name in seconds  # gradients over `data` travel together
                latency = 0.0 if bucketed else links.latency(kind, axes)
                sent[name] += ring
                seconds[name] = seconds.get(name, 0.0) + latency + ring / links.rate(axes)
    unsplit = sum(entry.bytes for entry in report.entries if not entry.plan.sharded)
    return dict(sent), seconds, unsplit / max(report.bytes, 1)
