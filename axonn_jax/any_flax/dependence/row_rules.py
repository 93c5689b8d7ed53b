"""Typing rules of all primitives that do not call another program."""

from collections.abc import Sequence
from dataclasses import replace

from axonn_jax.any_flax.dependence.equation import Equation, Shapes, by_rows
from axonn_jax.any_flax.dependence.row_arithmetic import LINEAR, entries
from axonn_jax.any_flax.dependence.row_cuts import CUTS
from axonn_jax.any_flax.dependence.row_moves import MOVES
from axonn_jax.any_flax.dependence.row_products import PRODUCTS
from axonn_jax.any_flax.dependence.row_types import (
    BY_COUNT,
    LOOP_AXIS,
    MISALIGNED,
    NO_AXES,
    Fault,
    Number,
    Rows,
    RowType,
    Running,
    Same,
    Sum,
    aligned,
    coupled,
    first_fault,
    unknown,
)
from axonn_jax.core.backend.elementwise import ELEMENTWISE

ENTRIES = (
    ELEMENTWISE
    | LINEAR
    | {"add_any", "bitcast_convert_type", "clamp", "clz", "complex", "eq_to", "igamma", "igammac", "le_to", "lt_to"}
    | {"polygamma", "population_count", "random_gamma_grad", "regularized_incomplete_beta", "zeta"}
)
"""Primitives whose every result entry depends only on the operands' entries at the same position."""
DRAWS = frozenset(
    {"random_bits", "random_clone", "random_fold_in", "random_gamma", "random_seed", "random_split", "random_unwrap"}
    | {"random_wrap", "threefry2x32"}
)
"""Primitives that make keys or draw with them."""
LEADING = {
    **dict.fromkeys(("cholesky", "eig", "eigh", "hessenberg", "householder_product", "lu", "qr", "schur", "svd"), 2),
    **dict.fromkeys(("triangular_solve", "tridiagonal", "tridiagonal_solve"), 2),
    "fft": 0,  # its fft_lengths give the number
    "lu_pivots_to_permutation": 1,
}
"""Primitives that act on this many trailing axes and are batched over the leading ones."""
UNCHANGED = frozenset(
    {"copy_to_host", "device_put", "layout_constraint", "mesh_cast", "optimization_barrier", "pbroadcast", "pcast"}
    | {"pvary", "reshard", "sharding_constraint"}
)
"""Primitives that return their operands, one result per operand."""
SHARED = frozenset({"pmax", "pmin", "psum", "psum2", "psum_invariant"})
"""Collectives over a named axis."""
RULES = {**MOVES, **CUTS, **PRODUCTS}
"""Primitives with a rule of their own."""
SUPPORTED = ENTRIES | UNCHANGED | DRAWS | LEADING.keys() | SHARED | RULES.keys()
"""Primitives that have a rule."""


def types_of(eqn: Equation, shared_axis: str) -> Sequence[RowType]:
    """Return the types of an equation's results.

    A primitive without a rule is typed only if none of its operands depends on rows.

    Args:
        eqn: The equation, with the types of its operands.
        shared_axis: Name of the axis over which layers compute statistics of all parts.
    """
    count, types = len(eqn.results), eqn.types
    if eqn.name in UNCHANGED:
        return list(types)
    if eqn.name in ENTRIES:
        return [entries(eqn)] * count
    if (first := first_fault(types)) is not None:
        return [first] * count
    if any(isinstance(operand, Running) for operand in types):
        return [coupled("a running sum over rows")] * count
    loop_rows = [operand for operand in types if isinstance(operand, Rows) and operand.axis == LOOP_AXIS]
    if loop_rows:
        return [loop_row_type(types)] * count
    if eqn.name in SHARED:
        return [_shared(eqn, kind, shared_axis) for kind in types]
    if (rule := RULES.get(eqn.name)) is not None:
        result = rule(eqn)
        return [result] * count if isinstance(result, RowType) else result
    if eqn.name in DRAWS:
        return _drawn(eqn)
    if eqn.name in LEADING:
        return [_leading(eqn, LEADING[eqn.name])] * count
    return [_no_rule(eqn, shapes) for shapes in eqn.results]


def loop_row_type(types: Sequence[RowType]) -> RowType:
    """Return the type of any function of one row inside a loop over rows."""
    if any(isinstance(operand, Rows) and operand.axis != LOOP_AXIS for operand in types):
        return MISALIGNED
    if any(isinstance(operand, Sum | Number) for operand in types):
        return coupled("a number of all rows beside each")
    rows = [operand for operand in types if isinstance(operand, Rows)]
    # An arbitrary function need not be linear, so a scale is only carried through functions of a single value.
    if any(operand.degree or operand.divisor is not None for operand in rows) and len(types) > 1:
        return unknown("a scaled number inside a loop over rows")
    return replace(aligned(rows), degree=rows[0].degree, divisor=rows[0].divisor)  # type: ignore[return-value,arg-type]


def _shared(eqn: Equation, kind: RowType, shared_axis: str) -> RowType:
    """Return the type of a collective: a mean over the shared axis is the mean of all rows, the same in every part."""
    axes = eqn.param.get("axes", eqn.param.get("axis_name"))
    if isinstance(kind, Same):
        return kind
    if isinstance(kind, Sum) and kind.divisor is None and not kind.degree and axes == (shared_axis,):
        return Same(wide(eqn.result))
    return coupled("a collective of rows")


def _drawn(eqn: Equation) -> Sequence[RowType]:
    """Return the types of random draws; draws along an axis as long as the rows belong to one row each."""
    if any(isinstance(operand, Sum | Number) for operand in eqn.types):
        return [coupled("a key by a number of all rows")] * len(eqn.results)
    joint = aligned(eqn.types)
    if isinstance(joint, Rows):
        return [Rows(joint.axis, joint.outer, joint.inner, joint.group)] * len(eqn.results)
    seed = not by_rows(eqn.results[0]) and eqn.name in ("random_seed", "random_wrap", "random_unwrap")
    if isinstance(joint, Fault) or seed:
        return [joint if isinstance(joint, Fault) else Same()] * len(eqn.results)
    # Keys split by row index count as draws: a part gets different ones, but with the same distribution.
    return [Same(wide(shapes[0]) - by_rows(shapes), by_rows(shapes)) for shapes in eqn.results]


def _leading(eqn: Equation, last: int) -> RowType:
    last = last or len(eqn.param.get("fft_lengths", ()))
    if any(isinstance(operand, Sum | Number) for operand in eqn.types):
        return coupled("a number of all rows") if any(isinstance(e, Rows) for e in eqn.types) else Number()
    if any(operand.degree for operand in eqn.types if isinstance(operand, Rows | Same)):
        return BY_COUNT
    result = aligned(eqn.types)
    if isinstance(result, Rows):
        return MISALIGNED if result.axis >= len(eqn.shape) - last else replace(result, columns=NO_AXES)
    return _no_rule(eqn, eqn.results[0]) if not by_rows(eqn.shapes[0]) else unknown("numbers by a row's place")


def _no_rule(eqn: Equation, shapes: Shapes) -> RowType:
    """Return the type of a result of a primitive that has no rule; it is known only if no operand depends on rows."""
    if any(isinstance(operand, Rows) for operand in eqn.types):
        return unknown("no rule for it on rows")
    if any(isinstance(operand, Sum | Number) for operand in eqn.types):
        return Number() if not by_rows(shapes) else unknown("no rule for it on numbers of all rows")
    if any(by_rows(operand) for operand in (*eqn.shapes, shapes)):
        return unknown("no rule for it on as many entries as rows")
    return BY_COUNT if any(getattr(operand, "degree", 0) for operand in eqn.types) else Same(wide(shapes[0]))


def wide(shape: Sequence[int]) -> frozenset[int]:
    """Return the axes of size above one."""
    return frozenset(axis for axis, size in enumerate(shape) if size > 1)
