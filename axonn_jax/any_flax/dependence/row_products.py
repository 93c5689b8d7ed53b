"""Typing rules of matmuls, convolutions, gathers and scatters."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from axonn_jax.any_flax.dependence.equation import Equation, by_rows
from axonn_jax.any_flax.dependence.row_types import (
    BY_COUNT,
    BY_PLACE,
    MISALIGNED,
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


def _dot(eqn: Equation) -> RowType:
    (lhs_contracting, rhs_contracting), (lhs_batch, rhs_batch) = eqn.param["dimension_numbers"]
    if any(isinstance(operand, Sum | Number) for operand in eqn.types):
        return _product_of_sums(eqn)
    sides = [
        (
            kind,
            tuple(contracting),
            tuple(batch),
            [a for a in range(len(shape)) if a not in contracting and a not in batch],
        )
        for kind, contracting, batch, (shape, _) in zip(
            eqn.types, (lhs_contracting, rhs_contracting), (lhs_batch, rhs_batch), eqn.shapes, strict=True
        )
    ]
    starts = (len(lhs_batch), len(lhs_batch) + len(sides[0][3]))
    degree = sum(operand.degree for operand in eqn.types if isinstance(operand, Same | Rows))
    divisors = [operand.divisor for operand in eqn.types if isinstance(operand, Rows) and operand.divisor is not None]
    if len(divisors) > 1:
        return coupled("a product of two numbers of all rows")
    divisor = divisors[0] if divisors else None
    # Express both operands in the axes [batch, lhs free, rhs free, contracting] and align them there as if the product
    # were elementwise. Rows along a contracting axis then make the result a sum over rows.
    seen: list[RowType] = []
    last = starts[1] + len(sides[1][3])
    for (kind, contracting, batch, free), start in zip(sides, starts, strict=True):
        to = {a: i for i, a in enumerate(batch)} | {a: start + i for i, a in enumerate(free)}
        to |= {a: last + i for i, a in enumerate(contracting)}
        if isinstance(kind, Same):
            seen.append(Same(frozenset(map(to.__getitem__, kind.varies)), frozenset(map(to.__getitem__, kind.drawn))))
        else:
            assert isinstance(kind, Rows)
            seen.append(Rows(to[kind.axis], kind.outer, kind.inner, kind.group))
    result = aligned(seen)
    if isinstance(result, Rows):
        if result.axis >= last:
            return Sum(degree + 1, divisor, eqn.key, not eqn.result, not any(eqn.of_model))
        return replace(result, degree=degree, divisor=divisor)
    if isinstance(result, Same):
        extents = {last + lhs_contracting.index(axis) for axis in by_rows(eqn.shapes[0]) if axis in lhs_contracting}
        if extents & result.varies:
            return BY_PLACE
        if extents & result.drawn:
            return Sum(degree + 1, divisor, eqn.key, not eqn.result)
        noncontracting = frozenset(range(last))
        return Same(result.varies & noncontracting, result.drawn & noncontracting, degree + len(extents))
    return result


def _product_of_sums(eqn: Equation) -> RowType:
    """Return the type of a product with sums; one sum times row-independent numbers is a sum again."""
    if any(isinstance(operand, Rows) for operand in eqn.types):
        return OF_ALL
    sums = [operand for operand in eqn.types if isinstance(operand, Sum)]
    factors = [operand for operand in eqn.types if isinstance(operand, Same)]
    if len(sums) != 1 or len(factors) != len(eqn.types) - 1 or any(by_rows(operand) for operand in eqn.shapes):
        return Number()
    degree = sums[0].degree + sum(operand.degree for operand in factors)
    return replace(sums[0], degree=degree, base=eqn.key, scalar=not eqn.result)


def _conv(eqn: Equation) -> RowType:
    dims, (lhs, rhs) = eqn.param["dimension_numbers"], eqn.types
    if any(isinstance(operand, Sum | Number) for operand in eqn.types):
        return _product_of_sums(eqn)
    if isinstance(lhs, Same) and isinstance(rhs, Same) and not any(map(by_rows, eqn.shapes)):
        return Same(frozenset(range(len(eqn.result))), degree=lhs.degree + rhs.degree)
    plain = eqn.param["batch_group_count"] == 1
    if isinstance(lhs, Rows) and isinstance(rhs, Same) and lhs.axis == dims.lhs_spec[0] and plain:
        return replace(lhs, axis=dims.out_spec[0], degree=lhs.degree + rhs.degree, columns=NO_AXES)
    if isinstance(lhs, Same) and isinstance(rhs, Same) and plain:
        out = frozenset(range(len(eqn.result))) - {dims.out_spec[0]}
        mixed = by_rows(eqn.shapes[0]) == {dims.lhs_spec[0]} and dims.lhs_spec[0] not in lhs.varies
        return Same(out, frozenset({dims.out_spec[0]}) if lhs.drawn else NO_AXES) if mixed else unknown("a convolution")
    return unknown("a convolution of rows with rows")


def _gather(eqn: Equation) -> RowType:
    kind, at = eqn.types
    dims = eqn.param["dimension_numbers"]
    if isinstance(at, Sum | Number):
        return coupled("entries chosen by a number of all rows")
    if isinstance(kind, Sum | Number):
        if isinstance(at, Rows):
            return OF_ALL
        return replace(kind, base=eqn.key, scalar=False) if isinstance(kind, Sum) else Number()
    if isinstance(at, Rows) and (at.degree or at.divisor is not None):
        return BY_COUNT if at.degree else OF_ALL
    batch = [axis for axis in range(len(eqn.result)) if axis not in dims.offset_dims]
    removed = (*dims.collapsed_slice_dims, *dims.operand_batching_dims)
    window = [axis for axis in range(len(eqn.shape)) if axis not in removed]
    last = len(eqn.shapes[1][0]) - 1

    def of_rows(axis: int) -> RowType:
        """Return the type of the result if the operand's rows lie along this axis."""
        assert isinstance(kind, Rows | Same)
        if axis in dims.operand_batching_dims:
            indices_axis = dims.start_indices_batching_dims[dims.operand_batching_dims.index(axis)]
            return _move_rows(kind, batch[indices_axis], at, indices_axis)
        if axis in window and all(
            params["slice_sizes"][axis] == s[axis] for params, s in zip(eqn.params, eqn.shapes[0], strict=True)
        ):
            if isinstance(at, Rows):
                return MISALIGNED
            return _move_rows(kind, dims.offset_dims[window.index(axis)], None, None)
        index_columns = _index_columns(at, eqn.shapes[1][0])
        if axis in dims.collapsed_slice_dims and axis in dims.start_index_map and index_columns is not None:
            place, columns = index_columns
            if list(dims.start_index_map).index(axis) in columns and place != last:
                return _move_rows(kind, batch[place], at if isinstance(at, Rows) else None, place)
        return coupled("rows chosen by their place, by a draw or by another row")

    if isinstance(kind, Rows):
        return of_rows(kind.axis)
    assert isinstance(kind, Same)
    wide = by_rows(eqn.shapes[0])
    if wide & (kind.varies | kind.drawn):
        return of_rows(next(iter(wide))) if len(wide) == 1 and not kind.varies & wide else BY_PLACE
    if isinstance(at, Rows):
        return Rows(batch[at.axis], at.outer, at.inner, at.group, kind.degree)
    assert isinstance(at, Same)
    varies = {batch[axis] for axis in at.varies if axis < len(batch)} if kind.varies or kind.drawn else set()
    if at.columns and at.place is not None and not by_rows(eqn.shapes[0]):
        return BY_PLACE
    offsets = {axis for axis in dims.offset_dims if eqn.result[axis] > 1} if kind.varies or kind.drawn else set()
    drawn = frozenset(batch[axis] for axis in at.drawn if axis < len(batch)) if kind.varies or kind.drawn else NO_AXES
    fills = kind.value if kind.value == 0 else None
    return Same(frozenset(varies | offsets), drawn, kind.degree, value=fills)


def _index_columns(at: RowType, shape: Sequence[int]) -> tuple[int, frozenset[int]] | None:
    """Return the axis along which an array of indices holds the row's index, and its columns, or None."""
    if isinstance(at, Rows) and at.columns and at.outer == at.inner == at.group == 1:
        return at.axis, at.columns
    if isinstance(at, Same) and at.place is not None:
        if at.columns:
            return at.place, at.columns
        return (at.place, frozenset({0})) if shape[-1] == 1 else None
    return None


def _move_rows(kind: Rows | Same, axis: int, at: RowType | None, indices_axis: int | None) -> RowType:
    """Return the type of entries that a gather moves to an axis; indices that depend on rows must match them."""
    if isinstance(kind, Same):
        return replace(at, axis=axis) if isinstance(at, Rows) else Same(NO_AXES, frozenset({axis}), kind.degree)
    if isinstance(at, Rows) and indices_axis is not None:
        joint = aligned((replace(kind, axis=indices_axis), at))
        if not isinstance(joint, Rows):
            return joint
        return replace(joint, axis=axis, degree=kind.degree, divisor=kind.divisor)
    return replace(kind, axis=axis, columns=NO_AXES)


def _scatter(eqn: Equation) -> RowType:
    kind, at, updates = eqn.types
    dims, adds = eqn.param["dimension_numbers"], eqn.name == "scatter-add"
    if isinstance(at, Sum | Number):
        return coupled("entries chosen by a number of all rows")
    if isinstance(updates, Sum | Number) or isinstance(kind, Sum | Number):
        if any(isinstance(operand, Rows) for operand in eqn.types):
            return OF_ALL
        result = either((kind, updates)) if adds else Number()
        return replace(result, base=eqn.key, scalar=False) if isinstance(result, Sum) else result
    scattered = [axis for axis in range(len(eqn.shapes[2][0])) if axis not in dims.update_window_dims]
    removed = (*dims.inserted_window_dims, *dims.operand_batching_dims)
    window = [axis for axis in range(len(eqn.shape)) if axis not in removed]

    def to(axis: int) -> int | None:
        """Return the operand's axis that an axis of the updates maps to one to one, or None."""
        if axis in dims.update_window_dims:
            operand_axis = window[dims.update_window_dims.index(axis)]
            return operand_axis if eqn.shapes[2][0][axis] == eqn.shape[operand_axis] else None
        at_axis = scattered.index(axis)
        if at_axis in dims.scatter_indices_batching_dims:
            return int(dims.operand_batching_dims[dims.scatter_indices_batching_dims.index(at_axis)])
        index_columns = _index_columns(at, eqn.shapes[1][0])
        if index_columns is not None and index_columns[0] == at_axis:
            over = [dims.scatter_dims_to_operand_dims[column] for column in index_columns[1]]
            return next((axis for axis in over if axis in by_rows(eqn.results[0])), None)
        return None

    if not any(isinstance(operand, Rows) for operand in eqn.types):
        wide = by_rows(eqn.shapes[2])
        if any(to(axis) is None for axis in wide):
            return unknown("numbers put down by a row's place")
        result = either((kind, updates))
        axes = frozenset(range(len(eqn.result))) - by_rows(eqn.results[0])
        return replace(result, varies=result.varies | axes, value=None) if isinstance(result, Same) else result
    source = updates if isinstance(updates, Rows) else None
    if source is None and isinstance(at, Rows):
        source = replace(at, axis=scattered[at.axis], degree=getattr(updates, "degree", 0.0), columns=NO_AXES)
    if source is None:  # row-independent updates are written to every row, at the same columns
        assert isinstance(kind, Rows)
        if kind.axis not in window or by_rows(eqn.shapes[1]):
            return coupled("rows chosen by their place")
        return either((kind, Same()))
    # Updates of a row must land in that row. Elsewhere they may at most be added up, as in a segment sum: then the
    # result is a sum over rows, and the operand must be 0 or of the same degree.
    target = to(source.axis)
    if isinstance(at, Rows) and scattered[at.axis] != source.axis:
        return MISALIGNED
    if target is not None:
        return either((kind, replace(source, axis=target, columns=NO_AXES)))
    if not adds:
        return coupled("rows put down over others")
    if not isinstance(kind, Same) or by_rows(eqn.shapes[0]):
        return coupled("rows added to others")
    if kind.value != 0 and source.degree + 1 != kind.degree:
        return coupled("a sum over rows beside a mean")
    return Sum(source.degree + 1, source.divisor, eqn.key, False, not any(eqn.of_model))


PRODUCTS: dict[str, Callable[[Equation], RowType]] = {
    "conv_general_dilated": _conv,
    "dot_general": _dot,
    "gather": _gather,
    **dict.fromkeys(("scatter", "scatter-add", "scatter-max", "scatter-min", "scatter-mul", "scatter-sub"), _scatter),
}
"""Rules by primitive."""
