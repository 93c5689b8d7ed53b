"""Typing rules of elementwise primitives: which ones keep a mean a mean, and where a number of all rows enters."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import jax.numpy as jnp

from axonn_jax.any_flax.dependence.equation import Equation, by_rows
from axonn_jax.any_flax.dependence.row_types import (
    BY_COUNT,
    NO_AXES,
    OF_ALL,
    Divisor,
    Number,
    Rows,
    RowType,
    Running,
    Same,
    Sum,
    aligned,
    coupled,
    either,
    first_fault,
    scaled,
)

LINEAR = frozenset({"conj", "copy", "copy_p", "imag", "neg", "real", "stop_gradient"})
"""Functions of one value that commute with a sum over rows."""
_SMALL = 1e-5
"""Largest number that counts as an epsilon, added only to keep a divisor away from 0."""


def entries(eqn: Equation) -> RowType:
    """Return the type of an elementwise equation's result."""
    # Selections and comparisons with 0 come before the check for faults: a known predicate drops the faulty branch.
    if eqn.name == "select_n":
        return _select(eqn)
    if eqn.name in ("lt", "ge") and (decided := _compare_index(eqn)) is not None:
        return decided
    if (first := first_fault(eqn.types)) is not None:
        return first
    if any(isinstance(operand, Running) for operand in eqn.types):
        return _running(eqn)
    if eqn.name in LINEAR or (eqn.name in ("convert_element_type", "reduce_precision") and _keeps_sums(eqn)):
        return _linear(eqn)
    if rule := _SCALED.get(eqn.name):
        return rule(eqn)
    if any(isinstance(operand, Sum | Number) for operand in eqn.types):
        return _number(eqn)
    return _rowwise(eqn)


def _linear(eqn: Equation) -> RowType:
    """Return the type of a linear function of one value; a row's index survives only if its value is unchanged."""
    kind, integers = eqn.types[0], jnp.issubdtype(eqn.dtypes[-1], jnp.integer)
    # Integers of less than four bytes may wrap around, after which an index no longer points at its own row.
    exact = eqn.name in ("copy", "copy_p", "stop_gradient") or (
        eqn.name == "convert_element_type" and integers and jnp.dtype(eqn.dtypes[-1]).itemsize >= 4
    )
    if exact or not isinstance(kind, Same | Rows):
        return kind
    if isinstance(kind, Rows):
        return replace(kind, columns=NO_AXES)
    value = kind.value if eqn.name != "neg" or kind.value == 0 else None
    if value is not None and eqn.dtypes[-1] == jnp.bool_:
        value = float(value != 0)
    return replace(kind, value=value, place=None, columns=NO_AXES)


def _keeps_sums(eqn: Equation) -> bool:
    """Return whether a conversion is linear up to rounding; one from floats to integers is not."""
    return bool(jnp.issubdtype(eqn.dtypes[-1], jnp.inexact) or not jnp.issubdtype(eqn.dtypes[0], jnp.inexact))


def _compare_index(eqn: Equation) -> RowType | None:
    """Return the type of a comparison of a row's index with 0, if it is one; jnp's indexing tests for negatives."""
    first, second = eqn.types
    if isinstance(first, Same) and first.place is not None and isinstance(second, Same) and second.value == 0:
        return Same(value=float(eqn.name == "ge"))
    return None


def _running(eqn: Equation) -> RowType:
    """Return the type of a running total plus a row's value; any other use depends on the preceding rows."""
    totals = [operand for operand in eqn.types if isinstance(operand, Running)]
    addends = [operand for operand in eqn.types if not isinstance(operand, Running)]
    accumulates = eqn.name in ("add", "add_any", "convert_element_type", "copy", "stop_gradient")
    plain = all(isinstance(operand, Rows | Same) and not operand.degree for operand in addends)
    undivided = all(operand.divisor is None for operand in addends if isinstance(operand, Rows))
    if accumulates and plain and undivided and len(totals) == 1 and len(addends) < 2:
        return totals[0]
    return coupled("a running sum over rows")


def _add(eqn: Equation) -> RowType:
    """Return the type of a sum or a difference; a count plus an epsilon is still that count."""
    first, second = eqn.types
    for count, other, at in ((first, second, 0), (second, first, 1)):
        if isinstance(count, Sum) and isinstance(other, Same) and other.value is not None:
            if count.divisor is None and count.scalar and 0 < abs(other.value) <= _SMALL and count.degree:
                return Number(1, count.base, count.degree, count.counts)
            if abs(other.value) <= _SMALL:
                return replace(count, scalar=count.scalar or eqn.scalar(at))
    result = either(eqn.types)
    if isinstance(result, Sum):
        scalars = all(getattr(operand, "scalar", True) for operand in eqn.types)
        result = replace(result, base=eqn.key, scalar=scalars and all(map(eqn.scalar, range(2))))
    return result


def _max(eqn: Equation) -> RowType:
    """Return the type of a maximum; a count with a floor that only an empty mask reaches is still that count."""
    if not any(isinstance(operand, Sum | Number) for operand in eqn.types):
        return _rowwise(eqn)
    for at, (count, floor) in enumerate((eqn.types, eqn.types[::-1])):
        if isinstance(count, Sum) and isinstance(floor, Same) and floor.value is not None:
            # A floor of 1 is harmless for an unscaled count of items, but a mean or a scaled count may lie below 1.
            limit = 1 if eqn.keys[at] == count.base else _SMALL
            if count.scalar and count.divisor is None and floor.value <= limit:
                return Number(1, count.base, count.degree, count.counts)
    return _number(eqn)


def _rowwise(eqn: Equation) -> RowType:
    """Return the type of a nonlinear function, which is only known for operands without degree or divisor."""
    if any(operand.degree for operand in eqn.types if isinstance(operand, Same | Rows)):
        return BY_COUNT
    if any(operand.divisor is not None for operand in eqn.types if isinstance(operand, Rows)):
        return OF_ALL
    return aligned(eqn.types)


def _mul(eqn: Equation) -> RowType:
    # A mean is as often written as a sum times the reciprocal of a count as it is a quotient.
    for count, other in (eqn.types, eqn.types[::-1]):
        if isinstance(count, Number) and count.power == -1:
            return _times_inverse(other, count, eqn)
    return product(eqn)


def _div(eqn: Equation) -> RowType:
    value, count = eqn.types
    if isinstance(count, Same):
        return product(eqn, sign=-1)
    if isinstance(count, Sum) and count.scalar and count.divisor is None:
        return _times_inverse(value, Number(-1, count.base, -count.degree, count.counts), eqn)
    if isinstance(count, Number) and count.power == 1:
        return _times_inverse(value, replace(count, power=-1, degree=-count.degree), eqn)
    if isinstance(count, Rows) and count.divisor is None and isinstance(value, Same | Rows):
        return product(eqn, sign=-1)
    return _number(eqn)


def _times_inverse(value: RowType, inverse: Number, eqn: Equation) -> RowType:
    """Return the type of a value times the reciprocal of a count."""
    if isinstance(value, Same):
        if value.varies or value.drawn:
            return OF_ALL if by_rows(eqn.results[0]) else Number()
        return replace(inverse, degree=inverse.degree + value.degree)
    if isinstance(value, Rows | Sum) and value.divisor is None:
        return replace(value, degree=value.degree + inverse.degree, divisor=Divisor(inverse.base, inverse.counts))
    return OF_ALL if isinstance(value, Rows) else Number()


def product(eqn: Equation, sign: int = 1) -> RowType:
    """Return the type of a product, or of a quotient if `sign` is -1.

    The product of two values that each carry a divisor is rejected, since it is no longer linear in either mean.
    """
    first, second = eqn.types
    sums = [operand for operand in eqn.types if isinstance(operand, Sum)]
    if any(isinstance(operand, Number) for operand in eqn.types) or len(sums) > 1:
        return _number(eqn)
    if sums:
        factors = [operand for operand in eqn.types if not isinstance(operand, Sum)]
        if not isinstance(factors[0], Same):
            return _number(eqn)
        uniform = not factors[0].varies and not factors[0].drawn
        degree = sums[0].degree + sign * factors[0].degree
        return replace(
            sums[0], degree=degree, base=sums[0].base if uniform else eqn.key, scalar=sums[0].scalar and uniform
        )
    divisors = [operand.divisor for operand in eqn.types if isinstance(operand, Rows) and operand.divisor is not None]
    if len(divisors) > 1:
        return coupled("a product of two numbers of all rows")
    degree = getattr(first, "degree", 0.0) + sign * getattr(second, "degree", 0.0)
    return scaled(aligned(eqn.types), degree, divisors[0] if divisors else None)


def _power(eqn: Equation) -> RowType:
    count = eqn.types[0]
    if eqn.param["y"] == 1:
        return count
    if isinstance(count, Sum) and count.scalar and count.divisor is None and eqn.param["y"] == -1:
        return Number(-1, count.base, -count.degree, count.counts)
    if isinstance(count, Number) and count.power and eqn.param["y"] == -1:
        return replace(count, power=-count.power, degree=-count.degree)
    if isinstance(count, Sum | Number):
        return _number(eqn)
    if isinstance(count, Same):
        return replace(count, degree=count.degree * eqn.param["y"], value=None, place=None)
    return _rowwise(eqn)


def _number(eqn: Equation) -> RowType:
    """Return the type of any other use of sums, recording which sum it depends on if there is only one."""
    if any(isinstance(operand, Rows) for operand in eqn.types):
        return OF_ALL
    bases = {(operand.base, operand.counts) for operand in eqn.types if isinstance(operand, Sum | Number)}
    base, counts = bases.pop() if len(bases) == 1 else (None, False)
    return Number(0, base, counts=counts, empty=_tests_empty(eqn))


def _tests_empty(eqn: Equation) -> bool:
    """Return whether a value tests a count for 0, directly, as an integer below 1, or by passing such a test on."""
    count, *thresholds = eqn.types
    if isinstance(count, Number) and count.empty:
        return eqn.name in ("convert_element_type", "copy", "not", "stop_gradient")
    value = getattr(thresholds[0], "value", None) if thresholds else None
    if not isinstance(count, Sum) or not count.scalar or count.divisor is not None:
        return False
    integral = eqn.keys[0] == count.base  # unscaled, unlike a mean, which may lie below 1 without being 0
    return value in _EMPTY.get(eqn.name, ()) and (value == 0 or integral)


def _select(eqn: Equation) -> RowType:
    """Return the type of entries selected by a predicate; a constant predicate selects one operand statically."""
    predicate, *branches = eqn.types
    if isinstance(predicate, Same) and predicate.value is not None:
        return branches[int(predicate.value)]
    if (first := first_fault(eqn.types)) is not None:
        return first
    if any(isinstance(operand, Running) for operand in eqn.types):
        return coupled("a running sum over rows")
    if isinstance(predicate, Same):
        result = either(branches)
        if predicate.degree or not isinstance(result, Same | Rows):
            return BY_COUNT if predicate.degree else result
        return scaled(aligned((predicate, result)), result.degree, getattr(result, "divisor", None))
    if isinstance(predicate, Rows):
        result = either(branches)
        if predicate.degree or predicate.divisor is not None or isinstance(result, Sum | Number):
            return OF_ALL
        if not isinstance(result, Same | Rows):
            return result
        return scaled(aligned((predicate, *branches)), result.degree, getattr(result, "divisor", None))
    return _select_by_count(predicate, branches)


def _select_by_count(predicate: RowType, branches: Sequence[RowType]) -> RowType:
    """Return the type of a selection by a number of all rows.

    It stays a mean in the idioms that guard against an empty mask: 0 in place of a mean over nothing, or 1 in place of
    a count of 0.
    """
    base = predicate.base if isinstance(predicate, Number) and predicate.empty else None
    live = [operand for operand in branches if not (isinstance(operand, Same) and operand.value == 0)]

    def is_mean(kind: RowType) -> bool:
        return isinstance(kind, Sum | Rows) and kind.divisor is not None and kind.divisor.base == base

    if any(isinstance(operand, Rows) for operand in branches) and (base is None or not all(map(is_mean, live))):
        return OF_ALL
    if base is not None and len(live) == 1:
        if is_mean(live[0]):
            return live[0]
        if isinstance(live[0], Number) and live[0].base == base:
            return live[0]
    if base is not None and len(live) == 2:
        counts = [
            operand for operand in live if isinstance(operand, Sum) and operand.base == base and operand.divisor is None
        ]
        ones = [
            operand
            for operand in live
            if isinstance(operand, Same) and operand.value is not None and operand.value <= 1
        ]
        if counts and ones:
            return Number(1, base, counts[0].degree, counts[0].counts)
    return Number()


_SCALED: dict[str, Callable[[Equation], RowType]] = {
    "add": _add,
    "add_any": _add,
    "div": _div,
    "integer_pow": _power,
    "max": _max,
    "mul": _mul,
    "sub": _add,
}
"""Rules of primitives that treat sums over rows specially."""

_EMPTY = {"eq": (0,), "ne": (0,), "gt": (0,), "le": (0,), "ge": (1,), "lt": (1,)}
"""For each comparison, the numbers for which comparing a count with them tells whether it is 0."""
