"""The communication model of the SC 24 runs exactly as its authors' code has it, search and discrepancy included.

Bandwidth only, no latency, no overlap, four matmuls a layer, powers of two. Its known discrepancy is kept: the
down-projection (4 hidden to hidden) is charged as if its output were 4 hidden wide and its input hidden. Row, column
and depth of that code are y, x and z here.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from axonn_jax.core.errors import UserError
from axonn_jax.core.grid import GridShape
from axonn_jax.core.models.config import ModelShape
from axonn_jax.planning.machines.machine import GIB, Machine

_ITEM = 2  # bytes: everything is bfloat16

MIN_TENSOR = {
    "gpt-5b": 4, "gpt-10b": 8, "gpt-20b": 16, "gpt-40b": 32, "gpt-60b": 64, "gpt-80b": 64, "gpt-160b": 128,
    "gpt-320b": 256, "gpt-640b": 512,
}  # fmt: skip
"""Smallest x * y * z that fits 40 GB, by model, as the authors gave it to their search."""


@dataclass(frozen=True)
class Published:
    """One configuration of the published search, with its communication time in seconds by axis."""

    grid: GridShape
    comm_s: dict[str, float]

    @property
    def total_s(self) -> float:
        """All axes together: nothing overlaps in this model."""
        return sum(self.comm_s.values())


def communication(shape: ModelShape, grid: GridShape, batch: int, machine: Machine) -> dict[str, float]:
    """Seconds a step communicates along each axis, by the published formula.

    Raises ``UserError`` for a machine without measured bandwidths.
    """
    rows = batch / grid.data / grid.z * shape.seq_len
    hidden, sizes = shape.hidden, {"x": grid.x, "y": grid.y, "z": grid.z, "data": grid.data}
    volumes = dict.fromkeys(sizes, 0.0)
    # (rows of the weight, columns, whether x and y swap roles), in units of hidden: QKV, output, up, down as published.
    for wide_in, wide_out, transposed in ((1, 3, False), (1, 1, True), (1, 4, False), (1, 4, True)):
        weight = wide_in * wide_out * hidden * hidden * _ITEM / (grid.x * grid.y)
        volumes["data"] += 4 * _ring(grid.data) * weight / grid.z
        volumes["z"] += 3 * _ring(grid.z) * weight  # two gathers and a reduce-scatter
        inside, outside = ("y", "x") if transposed else ("x", "y")
        # The output is all-reduced forward and in the recomputation, the input's gradient once.
        volumes[inside] += 4 * _ring(sizes[inside]) * rows * wide_out * hidden * _ITEM / sizes[outside]
        volumes[outside] += 2 * _ring(sizes[outside]) * rows * wide_in * hidden * _ITEM / sizes[inside]
    times, inner = {}, 1
    for axis, size in sizes.items():
        rate = machine.measured(inner, size) if size > 1 else GIB
        if rate is None:
            raise UserError("--machine", machine.name, "one with measured bandwidths: the published model has no other")
        times[axis] = shape.layers * volumes[axis] / rate
        inner *= size
    return times


def _ring(size: int) -> float:
    return (size - 1) / size


def search(shape: ModelShape, machine: Machine, devices: int, batch: int, *, min_tensor: int = 1) -> list[Published]:
    """The published search: powers of two, x * y * z at least `min_tensor`, batch divisible by data * z; best first.

    Raises ``UserError`` where that leaves nothing.
    """
    found = [
        Published(grid, communication(shape, grid, batch, machine))
        for grid in _grids(devices)
        if grid.x * grid.y * grid.z >= min_tensor and batch % grid.batch_shards == 0
    ]
    if not found:
        accepted = f"a power of two with a grid of x*y*z >= {min_tensor} whose data*z divides {batch} sequences"
        raise UserError("--devices", devices, accepted)
    return sorted(found, key=lambda one: one.total_s)


def _grids(devices: int) -> Iterator[GridShape]:
    powers = [2**power for power in range(devices.bit_length()) if 2**power <= devices]
    for x in powers:
        for y in powers:
            for z in powers:
                if devices % (x * y * z) == 0 and (data := devices // (x * y * z)) in powers:
                    yield GridShape(1, data, z, y, x)
