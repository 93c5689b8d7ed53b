"""A layer's parameters on a device, and its collectives in a training call."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from axonn_jax.tensor.parallelize.kinds import Norm
from axonn_jax.tensor.parallelize.layouts import Call, LayerPlan
from axonn_jax.tensor.specs import spec_axes


class Transfer(NamedTuple):
    """One collective of a layer."""

    kind: str
    """"all-gather", "all-reduce" or "reduce-scatter"."""
    axes: tuple[str, ...]
    backward: bool
    buffer: int
    """Bytes of the whole buffer on a device: gathered, to be reduced, or to be scattered."""
    bytes: int
    """Bytes a device sends on a ring: `(G-1)/G` of the buffer, twice that for an all-reduce."""


def _transfers(plan: LayerPlan, shapes: dict[str, tuple[int, ...]], itemsize: int) -> list[Transfer]:
    """Return every collective of a forward and backward pass over the layer's calls; `shapes` are the parameters'."""
    if not plan.sharded or plan.of is None or plan.calls == ():
        return []
    # One row where the calls are not known; a lookup's ids have no gradient.
    calls = plan.calls or (Call(*plan.of.features, rows=None, input_grad=plan.kind != "Embed"),)
    if isinstance(plan.of, Norm):
        each = [_norm(plan, plan.of, call, shapes) for call in calls]
    else:
        gathered = _gathered(plan, shapes, itemsize)
        each = [gathered, *(_contraction(plan, call, shapes, itemsize) for call in calls)]
    return [transfer for call in each for transfer in call if transfer.bytes]


def _gathered(plan: LayerPlan, shapes: dict[str, tuple[int, ...]], itemsize: int) -> Iterator[Transfer]:
    """Gathers of the forward pass, which all calls have in common."""
    for name, spec in plan.spread:  # gathered where the region begins
        yield _transfer(plan, "all-gather", _more(plan, name, spec), False, _local(plan, shapes[name], name) * 4)
    if plan.z_dim is not None:
        yield _transfer(plan, "all-gather", ("z",), False, _weight(plan, shapes) * itemsize)


def _contraction(plan: LayerPlan, call: Call, shapes: dict[str, tuple[int, ...]], itemsize: int) -> Iterator[Transfer]:
    split, weight = plan.splits(call), _weight(plan, shapes) * itemsize
    x_size, y_size = _local_sizes(plan, call)
    in_axis, out_axis = (plan.out_axis, plan.in_axis) if call.attend else (plan.in_axis, plan.out_axis)
    if plan.z_dim is not None and split:
        if call.input_grad:
            yield _transfer(plan, "all-gather", ("z",), True, weight)
        yield _transfer(plan, "reduce-scatter", ("z",), True, weight)
    alone = in_axis == out_axis  # groups of features that do not mix, or none split
    if in_axis is not None and not alone:
        yield _transfer(plan, "all-reduce", (in_axis,), False, y_size // plan.size(out_axis) * itemsize)
    if out_axis is not None and not alone and call.input_grad:
        yield _transfer(plan, "all-reduce", (out_axis,), True, x_size // plan.size(in_axis) * itemsize)
    if not split:  # every device of data and z has the whole gradient
        return
    for name, shape in shapes.items():
        axes = plan.replica_axes if name in _KERNELS and plan.z_dim is not None else plan.row_axes
        yield _transfer(plan, "all-reduce", axes, True, _local(plan, shape, name) * 4)


def _norm(plan: LayerPlan, norm: Norm, call: Call, shapes: dict[str, tuple[int, ...]]) -> Iterator[Transfer]:
    assert plan.in_axis is not None
    features = max((prod(shape) for shape in shapes.values()), default=norm.size)
    rows = max(1, _local_sizes(plan, call)[0] // features)
    # LayerNorm combines mean, centred and squared sums; backward, the cotangents of mean and factor.
    forward, backward = (3, 2) if plan.kind == "LayerNorm" else (1, 1)
    yield _transfer(plan, "all-reduce", (plan.in_axis,), False, forward * rows * 4)
    if call.input_grad:
        yield _transfer(plan, "all-reduce", (plan.in_axis,), True, backward * rows * 4)
    for name, shape in shapes.items():
        yield _transfer(plan, "all-reduce", plan.row_axes, True, _local(plan, shape, name) * 4)


def _local_sizes(plan: LayerPlan, call: Call) -> tuple[int, int]:
    """Elements of a call's input and output on the devices that have the same rows."""
    parts = plan.size(*plan.row_axes) if call.rows is not None and plan.splits(call) else 1
    return call.in_size // parts, call.out_size // parts


_KERNELS = ("kernel", "embedding")


def _weight(plan: LayerPlan, shapes: dict[str, tuple[int, ...]]) -> int:
    """Elements of the weight on one device, gathered over `z`."""
    name = next(name for name in _KERNELS if name in shapes)
    return _local(plan, shapes[name], name) * (1 if plan.z_dim is None else plan.size("z"))


def _local(plan: LayerPlan, shape: tuple[int, ...], name: str) -> int:
    """Elements of a parameter on one device."""
    return prod(shape) // plan.size(*spec_axes(plan.spec(name)))


def _more(plan: LayerPlan, name: str, kept: P) -> tuple[str, ...]:
    """The axes over which a parameter is gathered where the layer begins to compute."""
    return tuple(sorted(spec_axes(kept) - spec_axes(plan.spec(name))))


def _transfer(plan: LayerPlan, kind: str, axes: tuple[str, ...], backward: bool, buffer: int) -> Transfer:
    over = tuple(axis for axis in axes if plan.mesh.shape[axis] > 1)
    group = plan.size(*over)
    times = 2 if kind == "all-reduce" else 1
    return Transfer(kind, over, backward, buffer, times * (group - 1) * buffer // group)


@dataclass(frozen=True)
class Entry:
    """One layer, or another module with parameters."""

    path: str
    plan: LayerPlan
    params: dict[str, Any]
    """Parameters and statistics by name: arrays, or shapes with a layout."""
    dtype: Any
    """The computation's."""

    @property
    def bytes(self) -> int:
        """Bytes of all parameters and statistics, each counted once."""
        return sum(value.size * value.dtype.itemsize for value in self.params.values())

    @property
    def device_bytes(self) -> int:
        """Bytes of the parameters and statistics on one device."""
        return sum(prod(a.sharding.shard_shape(a.shape)) * a.dtype.itemsize for a in self.params.values())

    @property
    def whole(self) -> int:
        """Bytes of the parameters and statistics that every device has."""
        return sum(a.size * a.dtype.itemsize for a in self.params.values() if a.sharding.is_fully_replicated)

    @property
    def transfers(self) -> tuple[Transfer, ...]:
        """Collectives of the layer in a training call."""
        shapes = {name: value.shape for name, value in self.params.items()}
        return tuple(_transfers(self.plan, shapes, jnp.dtype(self.dtype).itemsize))

    @property
    def reason(self) -> str:
        """Why some of it is whole or left to the compiler, and what becomes of that; ``""`` if nothing is."""
        spread = [f"{name} over {', '.join(_more(self.plan, name, spec))}" for name, spec in self.plan.spread]
        kept = f"kept {'; '.join(spread)}, and gathered by the compiler" if spread else ""
        whole = f"{self.whole:,} B whole" if self.whole else ""
        return "; ".join(filter(None, (self.plan.note, kept, whole)))

    @property
    def roles(self) -> str:
        """The axes of input and output, such as ``x -> y``; a dot where one is not split."""
        axes = (self.plan.in_axis, self.plan.out_axis)
        if axes == (None, None):
            return "left to the compiler" if self.plan.spread else "replicated"
        shown = axes[:1] if isinstance(self.plan.of, Norm) else axes
        return " -> ".join(axis or "." for axis in shown)
