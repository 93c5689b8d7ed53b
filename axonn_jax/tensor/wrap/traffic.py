"""Bytes that a layer communicates in one training call, by the formulas of DESIGN section 4."""

from collections.abc import Iterator
from math import prod
from typing import NamedTuple

from axonn_jax.grid import BATCH_AXES
from axonn_jax.tensor.wrap.plan import LayerPlan


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


def transfers(plan: LayerPlan, shapes: dict[str, tuple[int, ...]], itemsize: int) -> list[Transfer]:
    """Every collective of a forward and backward pass over all of the layer's calls, `shapes` those of its parameters.

    Activations and travelling weights take `itemsize` bytes an element, gradients of parameters four.
    """
    if not plan.sharded:
        return []
    found = _norm(plan, shapes) if plan.kind in ("LayerNorm", "RMSNorm") else _contraction(plan, shapes, itemsize)
    return [transfer for transfer in found if transfer.bytes]


def _contraction(plan: LayerPlan, shapes: dict[str, tuple[int, ...]], itemsize: int) -> Iterator[Transfer]:
    embed = plan.kind == "Embed"
    kernel = "embedding" if embed else "kernel"
    weight = _local(plan, shapes[kernel], kernel) * (1 if plan.z_dim is None else plan.size("z"))
    split = plan.size(*BATCH_AXES) if plan.rows_known and plan.rows_split else 1
    x_size, y_size = (size // split for size in plan.sizes)
    if plan.z_dim is not None:
        yield _transfer(plan, "all-gather", ("z",), False, weight * itemsize)
        if not embed and plan.rows_split:  # a lookup's backward does not need the table
            yield _transfer(plan, "all-gather", ("z",), True, weight * itemsize)
        if plan.rows_split:
            yield _transfer(plan, "reduce-scatter", ("z",), True, weight * itemsize)
    alone = plan.in_axis == plan.out_axis  # groups of features that do not mix, or none split
    if plan.in_axis is not None and not alone:
        yield _transfer(plan, "all-reduce", (plan.in_axis,), False, y_size // plan.size(plan.out_axis) * itemsize)
    if plan.out_axis is not None and not alone and not embed:
        yield _transfer(plan, "all-reduce", (plan.out_axis,), True, x_size // plan.size(plan.in_axis) * itemsize)
    if not plan.rows_split:  # every device of data and z has the whole gradient
        return
    for name, shape in shapes.items():
        axes = ("data",) if name == kernel and plan.z_dim is not None else BATCH_AXES
        yield _transfer(plan, "all-reduce", axes, True, _local(plan, shape, name) * 4)


def _norm(plan: LayerPlan, shapes: dict[str, tuple[int, ...]]) -> Iterator[Transfer]:
    assert plan.in_axis is not None
    split = plan.size(*BATCH_AXES) if plan.rows_known and plan.rows_split else 1
    features = max((prod(shape) for shape in shapes.values()), default=plan.sizes[0])
    rows = max(1, plan.sizes[0] // features // split)
    # LayerNorm combines mean, centred and squared sums; backward, the cotangents of mean and factor.
    forward, backward = (3, 2) if plan.kind == "LayerNorm" else (1, 1)
    yield _transfer(plan, "all-reduce", (plan.in_axis,), False, forward * rows * 4)
    yield _transfer(plan, "all-reduce", (plan.in_axis,), True, backward * rows * 4)
    for name, shape in shapes.items():
        yield _transfer(plan, "all-reduce", BATCH_AXES, True, _local(plan, shape, name) * 4)


def _local(plan: LayerPlan, shape: tuple[int, ...], name: str) -> int:
    """Elements of a parameter on one device."""
    spec = plan.spec(name)
    axes = [axis for dim in spec for axis in ((dim,) if isinstance(dim, str) else dim or ())]
    return prod(shape) // plan.size(*axes)


def _transfer(plan: LayerPlan, kind: str, axes: tuple[str, ...], backward: bool, buffer: int) -> Transfer:
    over = tuple(axis for axis in axes if plan.mesh.shape[axis] > 1)
    group = plan.size(*over)
    times = 2 if kind == "all-reduce" else 1
    return Transfer(kind, over, backward, buffer, times * (group - 1) * buffer // group)
