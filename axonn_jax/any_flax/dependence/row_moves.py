"""Typing rules of primitives that move axes, reshape, reduce and scan along axes."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from math import prod
from typing import Any

from axonn_jax.any_flax.dependence.equation import Equation, by_rows
from axonn_jax.any_flax.dependence.row_types import (
    BY_COUNT,
    BY_PLACE,
    LOOP_AXIS,
    NO_AXES,
    OF_ALL,
    Number,
    Rows,
    RowType,
    Same,
    Sum,
    aligned,
    coupled,
    either,
    unknown,
)

Place = tuple[int, int, int, int]
"""Layout of rows in an array: axis, outer, inner and group, as in `Rows`."""


def _at(axes: Iterable[int], axis_map: Callable[[int], int | None]) -> frozenset[int]:
    return frozenset(at for axis in axes if (at := axis_map(axis)) is not None)


def moved(kind: RowType, axis_map: Callable[[int], int | None]) -> RowType:
    """Return a type with its axes renumbered.

    Args:
        kind: The type.
        axis_map: Function from an old axis to the new one, or to None for an axis that is removed.
    """
    if isinstance(kind, Same):
        place = None if kind.place is None else axis_map(kind.place)
        return replace(
            kind, varies=_at(kind.varies, axis_map), drawn=_at(kind.drawn, axis_map), place=place, columns=NO_AXES
        )
    if isinstance(kind, Rows) and kind.axis != LOOP_AXIS:
        axis = axis_map(kind.axis)
        return (
            unknown("an axis of rows that is left out") if axis is None else replace(kind, axis=axis, columns=NO_AXES)
        )
    return kind


def _broadcast(eqn: Equation) -> RowType:
    dims, kind = eqn.param["broadcast_dimensions"], eqn.types[0]
    if not eqn.agrees("broadcast_dimensions"):
        return unknown("another broadcast for the rows of a part")
    if isinstance(kind, Sum) and eqn.scalar(0):
        return replace(kind, scalar=True)
    spread = [axis for axis, at in enumerate(dims) if eqn.shape[axis] == eqn.result[at]]
    return moved(kind, lambda axis: dims[axis] if axis in spread else None)


def _transpose(eqn: Equation) -> RowType:
    return moved(eqn.types[0], list(eqn.param["permutation"]).index)


def _reshape(eqn: Equation) -> RowType:
    kind = eqn.types[0]
    if isinstance(kind, Rows):
        sides = list(zip(eqn.shapes[0], eqn.results[0], eqn.rows, strict=True))
        # The layout must hold in both programs: one that exists for all rows alone would tie rows to the batch size.
        axes = [axis for axis, size in enumerate(eqn.result) if size > 1]
        layout = next((place for axis in axes if (place := _reshaped(kind, *sides[0], axis)) is not None), None)
        if layout is None or layout != _reshaped(kind, *sides[1], layout[0]):
            return coupled("rows divided into chunks, or put together with others")
        axis, outer, inner, group = layout
        return replace(kind, axis=axis, outer=outer, inner=inner, group=group, columns=NO_AXES)
    if not isinstance(kind, Same) or not kind.varies | kind.drawn:
        return kind
    old, new = eqn.shape, eqn.result
    old_wide, new_wide = ([axis for axis, size in enumerate(shape) if size > 1] for shape in (old, new))
    if [old[axis] for axis in old_wide] == [
        new[axis] for axis in new_wide
    ]:  # only axes of size one were added or removed
        to = dict(zip(old_wide, new_wide, strict=True))
        return moved(kind, to.get)
    return Same(_spans(kind.varies, old, new), _spans(kind.drawn, old, new), kind.degree, value=kind.value)


def _reshaped(kind: Rows, old: Sequence[int], new: Sequence[int], rows: int, axis: int) -> Place | None:
    """Return the layout of the rows along an axis of the new shape, or None if they do not lie along it.

    Args:
        kind: Layout in the old shape.
        old: Old shape.
        new: New shape.
        rows: Number of rows.
        axis: Axis of the new shape.
    """
    # Compare strides in row-major order: the distance between neighboring groups of rows in the old shape with that
    # between neighbors along the new axis. A larger new stride merges neighboring rows into one group.
    step, count = kind.inner * prod(old[kind.axis + 1 :]), rows // kind.group
    stride = prod(new[axis + 1 :])
    if stride * new[axis] % (step * count):
        return None
    outer = stride * new[axis] // (step * count)
    if step % stride == 0:
        return axis, outer, step // stride, kind.group
    if stride % step == 0 and count % (stride // step) == 0:
        return axis, outer, 1, kind.group * (stride // step)
    return None


def _spans(axes: Iterable[int], old: Sequence[int], new: Sequence[int]) -> frozenset[int]:
    """Return the axes of a new shape whose range of strides overlaps that of the old axes."""
    spans = [(prod(old[axis + 1 :]), prod(old[axis:])) for axis in axes]
    sides = [(axis, prod(new[axis + 1 :]), prod(new[axis:])) for axis, size in enumerate(new) if size > 1]
    return frozenset(axis for axis, low, high in sides if any(lo < high and low < hi for lo, hi in spans))


def _squeeze(eqn: Equation) -> RowType:
    removed = {axis % len(eqn.shape) for axis in eqn.param["dimensions"]}
    remaining = [axis for axis in range(len(eqn.shape)) if axis not in removed]
    return moved(eqn.types[0], lambda axis: remaining.index(axis) if axis in remaining else None)


def _expand(eqn: Equation) -> RowType:
    new = {axis % len(eqn.result) for axis in eqn.param["dimensions"]}
    remaining = [axis for axis in range(len(eqn.result)) if axis not in new]
    return moved(eqn.types[0], remaining.__getitem__)


def _iota(eqn: Equation) -> RowType:
    dim = eqn.param["dimension"]
    return Same(frozenset({dim}), place=dim if dim in by_rows(eqn.results[0]) else None)


def _reduce(eqn: Equation) -> RowType:
    kind, axes = eqn.types[0], set(eqn.param["axes"])
    remaining = [axis for axis in range(len(eqn.shape)) if axis not in axes]

    def axis_map(axis: int) -> int | None:
        return remaining.index(axis) if axis in remaining else None

    # Only sums commute with the split into parts. Any other reduction over rows couples them.
    adds = eqn.name == "reduce_sum"
    if isinstance(kind, Sum):
        if not adds:
            return Number(0, kind.base, counts=kind.counts) if kind.scalar else Number()
        degree = kind.degree + len(by_rows(eqn.shapes[0]) & axes)
        return replace(kind, degree=degree, base=eqn.key, scalar=prod(eqn.result) == 1)
    if isinstance(kind, Number):
        return Number()
    if isinstance(kind, Rows):
        if kind.axis in axes:
            unit = "rows" if kind.group == 1 else "groups of rows"
            return _total(eqn, kind.degree, kind.divisor) if adds else coupled(f"{_PLAIN[eqn.name]} over {unit}")
        return moved(kind, axis_map) if adds else _undivided(kind, moved(kind, axis_map))
    assert isinstance(kind, Same)
    kind = replace(kind, place=None, columns=NO_AXES)
    over = by_rows(eqn.shapes[0]) & axes
    if not over or kind.value == 0:
        return moved(replace(kind, value=kind.value if kind.value == 0 else None), axis_map)
    if kind.varies & over:
        return BY_PLACE
    if kind.drawn & over:
        return _total(eqn, kind.degree, None) if adds else coupled(f"{_PLAIN[eqn.name]} over draws of rows")
    if eqn.name in ("reduce_prod", "reduce_xor", "argmax", "argmin"):
        return BY_COUNT
    # Adding up identical numbers over the axis of rows multiplies them by the number of rows.
    return moved(replace(kind, degree=kind.degree + adds, value=None), axis_map)


def _total(eqn: Equation, degree: float, divisor: Any) -> Sum:
    counts = not any(eqn.of_model)
    return Sum(degree + 1, divisor, eqn.key, prod(eqn.result) == 1, counts)


def _undivided(kind: Rows, result: RowType) -> RowType:
    """Return the result's type if its operand has no scale, which a nonlinear function would not carry through."""
    return OF_ALL if kind.divisor is not None else BY_COUNT if kind.degree else result


def along(eqn: Equation, axes: Iterable[int]) -> RowType:
    """Return the type of a function that mixes entries along some axes, such as a cumulative sum or a sort."""
    axes = set(axes)
    if any(isinstance(operand, Sum | Number) for operand in eqn.types):
        if any(isinstance(operand, Rows) for operand in eqn.types):
            return OF_ALL
        return either(eqn.types) if eqn.name == "cumsum" and len(eqn.types) == 1 else Number()
    scaled = [operand for operand in eqn.types if isinstance(operand, Rows | Same) and operand.degree]
    if eqn.name not in ("cumsum", "rev") and scaled:
        return BY_COUNT
    result = either(eqn.types) if len(eqn.types) == 1 else aligned(eqn.types)
    if isinstance(result, Rows):
        if result.axis in axes:
            return coupled(f"{_PLAIN.get(eqn.name, eqn.name)} over rows")
        return result if eqn.name in ("cumsum", "rev") else _undivided(result, replace(result, columns=NO_AXES))
    if isinstance(result, Same):
        over = axes & by_rows(eqn.shapes[0])
        if result.drawn & over:
            return coupled("rows in an order that is drawn")
        return replace(result, varies=result.varies | axes, value=None, place=None, columns=NO_AXES)
    return result


def _along(name: str) -> Callable[[Equation], RowType]:
    def rule(eqn: Equation) -> RowType:
        axes = eqn.param[name]
        return along(eqn, axes if isinstance(axes, tuple) else (axes % len(eqn.shape),))

    return rule


def _last(eqn: Equation) -> RowType:
    return along(eqn, (len(eqn.shape) - 1,))


def _window(eqn: Equation) -> RowType:
    """Return the type of a pooling; along the axis of rows, windows must hold a single row."""
    kinds = [
        operand for operand in eqn.types if not (isinstance(operand, Same) and operand.value is not None)
    ] or eqn.types
    if any(isinstance(operand, Sum | Number) for operand in kinds):
        return OF_ALL if any(isinstance(operand, Rows) for operand in kinds) else Number()
    result = aligned(kinds)
    axes = [result.axis] if isinstance(result, Rows) else sorted(by_rows(eqn.shapes[0]))
    windows, padding = eqn.param["window_dimensions"], eqn.param["padding"]
    strides = eqn.param.get("window_strides", (1,) * len(windows))
    if any(windows[a] != 1 or strides[a] != 1 or tuple(padding[a]) != (0, 0) for a in axes):
        return coupled("a window over rows")
    first = kinds[0]
    if isinstance(result, Rows) and isinstance(first, Rows) and eqn.name == "reduce_window_sum":
        return replace(result, degree=first.degree, divisor=first.divisor)
    return _undivided(first, result) if isinstance(first, Rows) else result


_PLAIN = {
    "argmax": "the largest",
    "argmin": "the smallest",
    "reduce_and": "whether all",
    "reduce_max": "the largest",
    "reduce_min": "the smallest",
    "reduce_or": "whether any",
    "reduce_prod": "a product",
    "reduce_xor": "a parity",
    "sort": "an order",
    "top_k": "the largest",
    "cumsum": "a running sum",
    "rev": "an order",
}
"""Words for a primitive's result in the reason of a verdict."""

MOVES: dict[str, Callable[[Equation], RowType | Sequence[RowType]]] = {
    **dict.fromkeys(("argmax", "argmin", "reduce_and", "reduce_max", "reduce_min", "reduce_or"), _reduce),
    **dict.fromkeys(("reduce_prod", "reduce_sum", "reduce_xor"), _reduce),
    **dict.fromkeys(("cumlogsumexp", "cummax", "cummin", "cumprod", "cumsum"), _along("axis")),
    **dict.fromkeys(("reduce_window_max", "reduce_window_min", "reduce_window_sum"), _window),
    **dict.fromkeys(("select_and_gather_add", "select_and_scatter_add"), _window),
    "broadcast_in_dim": _broadcast,
    "expand_dims": _expand,
    "iota": _iota,
    "reshape": _reshape,
    "rev": _along("dimensions"),
    "sort": _along("dimension"),
    "squeeze": _squeeze,
    "top_k": _last,
    "transpose": _transpose,
}
"""Rules by primitive."""
