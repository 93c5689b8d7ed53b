"""Typing rules of primitives that concatenate, slice and pad."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from axonn_jax.any_flax.dependence.equation import Equation, by_rows
from axonn_jax.any_flax.dependence.row_moves import moved
from axonn_jax.any_flax.dependence.row_types import (
    BY_COUNT,
    BY_PLACE,
    LOOP_AXIS,
    NO_AXES,
    Rows,
    RowType,
    Same,
    Sum,
    coupled,
    either,
    unknown,
)


def _concatenate(eqn: Equation) -> RowType:
    dim, kinds = eqn.param["dimension"], eqn.types
    rows = [operand for operand in kinds if isinstance(operand, Rows)]
    if rows and all(operand.axis == dim for operand in rows):
        return _concatenate_rows(eqn, rows, dim)
    if dim != len(eqn.result) - 1:
        return _concatenated(eqn, either(kinds), dim)
    # jnp's indexing builds the indices of a gather by concatenating columns. Remember which columns are the row's
    # index, so that x[arange(rows), labels] is recognized as reading each row's own entry.
    places, columns, parts, offset = set[int](), set[int](), list[RowType](), 0
    for kind, (shape, _) in zip(kinds, eqn.shapes, strict=True):
        if isinstance(kind, Same) and kind.place not in (None, dim) and (shape[dim] == 1 or kind.columns):
            places.add(kind.place)  # type: ignore[arg-type]
            columns |= {offset + column for column in kind.columns or {0}}
            kind = replace(kind, varies=kind.varies - {kind.place})  # type: ignore[operator]
        elif isinstance(kind, Rows):
            columns |= {offset + column for column in kind.columns}
        parts.append(kind)
        offset += shape[dim]
    result = _concatenated(eqn, either(parts), dim)
    if isinstance(result, Rows) and places <= {result.axis}:
        return replace(result, columns=frozenset(columns))
    if isinstance(result, Same) and len(places) == 1:
        return replace(result, varies=result.varies | places, place=places.pop(), columns=frozenset(columns))
    return BY_PLACE if places else result


def _concatenated(eqn: Equation, result: RowType, dim: int) -> RowType:
    if isinstance(result, Same):
        return replace(result, varies=result.varies | {dim}, place=None, value=None)
    if isinstance(result, Rows):
        return replace(result, columns=NO_AXES)
    return replace(result, base=eqn.key, scalar=False) if isinstance(result, Sum) else result


def _concatenate_rows(eqn: Equation, rows: Sequence[Rows], dim: int) -> RowType:
    """Return the type of arrays concatenated along the axis of rows, each holding all rows a number of times."""
    first = rows[0]
    if any(replace(operand, outer=first.outer, columns=first.columns) != first for operand in rows):
        return unknown("rows of other layouts behind each other")
    outer = 0
    for kind, shapes in zip(eqn.types, eqn.shapes, strict=True):
        if isinstance(kind, Rows):
            outer += kind.outer
            continue
        counts = [divmod(s[dim], n // first.group * first.inner) for s, n in zip(shapes, eqn.rows, strict=True)]
        if not isinstance(kind, Same) or counts[0] != counts[1] or counts[0][1] or dim in kind.varies:
            return coupled("rows beside others in one array")
        if kind.value != 0 and (kind.degree != first.degree or first.divisor is not None):
            return BY_COUNT
        outer += counts[0][0]
    return replace(first, outer=outer, columns=NO_AXES)


def _slice(eqn: Equation) -> RowType:
    kind = eqn.types[0]
    if isinstance(kind, Same):
        full = {axis for axis, (a, b) in enumerate(zip(eqn.shape, eqn.result, strict=True)) if a == b}
        return replace(kind, place=kind.place if kind.place in full else None, columns=NO_AXES)
    if not isinstance(kind, Rows):
        return replace(kind, base=eqn.key) if isinstance(kind, Sum) and not kind.scalar else kind
    cuts = []
    for params, shapes, rows in zip(eqn.params, eqn.shapes[0], eqn.rows, strict=True):
        start, stop = params["start_indices"][kind.axis], params["limit_indices"][kind.axis]
        stride = (params["strides"] or (1,) * len(shapes))[kind.axis]
        unit = rows // kind.group * kind.inner
        if stride == 1:
            cuts.append((1, *divmod(start, unit), *divmod(stop, unit)))
        else:  # a strided slice takes one row of every group of `stride`, if it covers all groups
            strided = start < stride and kind.inner == kind.outer == 1 and unit % stride == 0 and stop > unit - stride
            cuts.append((stride if strided else 0, start, 0, stride, 0))
    stride, first, over, last, past = cuts[0]
    if cuts[0] != cuts[1] or over or past or not stride:
        return coupled("rows chosen by their place")
    if stride > 1:
        return replace(kind, group=kind.group * stride, columns=NO_AXES)
    return replace(kind, outer=last - first, columns=NO_AXES)


def _split(eqn: Equation) -> Sequence[RowType]:
    kind, axis = eqn.types[0], eqn.param["axis"]
    if not isinstance(kind, Rows) or kind.axis != axis:
        # A part of an index array no longer starts at 0, so its entries are not their own index.
        plain = moved(kind, lambda at: at)
        return [replace(plain, place=None) if isinstance(plain, Same) else plain] * len(eqn.results)
    parts = []
    for sizes in zip(*(params["sizes"] for params in eqn.params), strict=True):
        units = {divmod(s, rows // kind.group * kind.inner) for s, rows in zip(sizes, eqn.rows, strict=True)}
        outer, over = units.pop()
        parts.append(coupled("rows chosen by their place") if units or over else replace(kind, outer=outer))
    return parts


def _pad(eqn: Equation) -> RowType:
    kind, filling = eqn.types
    if isinstance(kind, Rows) and kind.axis != LOOP_AXIS:
        outers = set()
        for params, rows in zip(eqn.params, eqn.rows, strict=True):
            low, high, inside = params["padding_config"][kind.axis]
            # Padding at both ends makes `low * high` differ between the programs, so it is only allowed at one end.
            outers.add((inside, *divmod(low + high, rows // kind.group * kind.inner), low * high))
        inside, more, over, _ = outers.pop()
        if outers or inside or over:
            return coupled("rows beside others in one array")
        result = either((replace(kind, outer=kind.outer + more), filling))
        return replace(result, columns=NO_AXES) if isinstance(result, Rows) else result
    padded = frozenset(axis for axis, config in enumerate(eqn.param["padding_config"]) if any(config))
    if isinstance(kind, Same) and (padded & by_rows(eqn.shapes[0])) and not eqn.agrees("padding_config"):
        return BY_COUNT
    result = either((kind, filling))
    if isinstance(result, Same):
        return replace(result, varies=result.varies | padded)
    return replace(result, base=eqn.key, scalar=False) if isinstance(result, Sum) else result


def _dynamic_slice(eqn: Equation) -> RowType:
    kind, *starts = eqn.types
    if not all(isinstance(operand, Same) for operand in starts):
        return unknown("entries chosen by rows")
    if isinstance(kind, Rows):
        full = eqn.shape[kind.axis] == eqn.result[kind.axis]
        return replace(kind, columns=NO_AXES) if full else coupled("rows chosen by their place")
    cut = frozenset(axis for axis, (a, b) in enumerate(zip(eqn.shape, eqn.result, strict=True)) if a != b)
    if isinstance(kind, Same):
        if cut & by_rows(eqn.shapes[0]):
            return BY_PLACE
        return replace(kind, value=None, place=None, columns=NO_AXES)
    return replace(kind, base=eqn.key) if isinstance(kind, Sum) and not kind.scalar else kind


def _dynamic_update_slice(eqn: Equation) -> RowType:
    kind, update, *starts = eqn.types
    if not all(isinstance(operand, Same) for operand in starts):
        return unknown("entries chosen by rows")
    axis = next((operand.axis for operand in (kind, update) if isinstance(operand, Rows)), None)
    if axis is not None and eqn.shapes[0][0][axis] != eqn.shapes[1][0][axis]:
        return coupled("rows beside others in one array")
    result = either((kind, update))
    if isinstance(result, Same):
        return replace(result, varies=result.varies | frozenset(range(len(eqn.result))))
    return replace(result, base=eqn.key, scalar=False) if isinstance(result, Sum) else result


def _stack(eqn: Equation) -> RowType:
    axis, result = eqn.param["axis"], either(eqn.types)
    if isinstance(result, Sum):
        return replace(result, base=eqn.key, scalar=False)
    result = moved(result, lambda at: at + (at >= axis))
    return replace(result, varies=result.varies | {axis}, value=None) if isinstance(result, Same) else result


def _tile(eqn: Equation) -> RowType:
    kind, times = eqn.types[0], eqn.param["reps"]
    if isinstance(kind, Rows):
        return replace(kind, outer=kind.outer * times[kind.axis], columns=NO_AXES)
    return replace(kind, place=None, columns=NO_AXES) if isinstance(kind, Same) else kind


def _unstack(eqn: Equation) -> RowType:
    axis, kind = eqn.param["axis"], eqn.types[0]
    if isinstance(kind, Rows) and kind.axis == axis:
        return coupled("rows chosen by their place")
    return moved(kind, lambda at: None if at == axis else at - (at > axis))


CUTS: dict[str, Callable[[Equation], RowType | Sequence[RowType]]] = {
    "concatenate": _concatenate,
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update_slice,
    "pad": _pad,
    "slice": _slice,
    "split": _split,
    "stack": _stack,
    "tile": _tile,
    "unstack": _unstack,
}
"""Rules by primitive."""
