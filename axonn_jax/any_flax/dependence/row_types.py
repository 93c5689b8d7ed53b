"""Types of the values of a traced loss: how each depends on the rows of a batch.

A loss is traced twice, for all rows of a batch and for the rows of one part, and both programs are walked in lockstep.
A value has one type in both:

* `Same`: independent of rows, with the same numbers in both programs;
* `Rows`: one entry per row, or per group of neighboring rows, along one axis, computed from that row alone;
* `Sum`: linear in one number per row, so that the sums of the parts add up to the sum of all rows;
* `Number`: computed from sums in any other way, such as the inverse of how many targets a mask counts;
* `Fault`: none of these, with the reason. It is harmless unless a result depends on it.

Except for `Fault`, the `degree` of a type is the power of the number of rows that scales a value: a sum over rows has
degree 1, and dividing by the number of rows lowers the degree by one. A mean has degree 0, like a value that depends on
no row.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import lcm
from typing import Any, Literal, NamedTuple

Axes = frozenset[int]
NO_AXES: Axes = frozenset()

LOOP_AXIS = -1
"""Stands for the axis of rows inside a loop over the rows, whose body sees one row at a time."""


class Divisor(NamedTuple):
    """A sum over rows that a value has been divided by."""

    base: Any
    """Name of the sum, as in `Sum.base`."""
    counts: bool
    """True if the sum depends only on the batch, as the sum of a mask does."""


@dataclass(frozen=True)
class Same:
    """Numbers that depend on no row.

    If entries differ along an axis as long as the rows, they differ by the row's index in the batch, and a row's index
    in a part is a different one. Random draws are not part of `varies`: every row gets one, whatever its index.
    """

    varies: Axes = NO_AXES
    """Axes along which entries differ."""
    drawn: Axes = NO_AXES
    """Axes along which every entry is an independent draw."""
    degree: float = 0.0
    place: int | None = None
    """Axis, as long as the rows, along which each entry is its index, as in `jnp.arange(rows)`."""
    columns: Axes = NO_AXES
    """Columns along the last axis whose entries are the index along axis `place`."""
    value: float | None = None
    """Value of every entry, if it is a known constant."""


@dataclass(frozen=True)
class Rows:
    """One entry per group of `group` neighboring rows; `axis` is laid out as [outer, rows / group, inner]."""

    axis: int
    outer: int = 1
    inner: int = 1
    group: int = 1
    degree: float = 0.0
    divisor: Divisor | None = None
    """Sum over all rows that every entry has been divided by."""
    columns: Axes = NO_AXES
    """In an array of indices, the columns along the last axis whose entries are the row's index."""


@dataclass(frozen=True)
class Sum:
    """A sum over rows."""

    degree: float = 1.0
    divisor: Divisor | None = None
    base: Any = field(default=None, compare=False)
    """Name of the sum, shared by sums that are proportional to it."""
    scalar: bool = False
    """True if all entries are equal."""
    counts: bool = field(default=False, compare=False)
    """True if the sum depends only on the batch, as the sum of a mask does."""


@dataclass(frozen=True)
class Running:
    """Running total of a loop over rows."""

    carry: int
    """Position in the loop's carry: a total may only add to itself."""


@dataclass(frozen=True)
class Number:
    """A number computed from sums; if `power` is 1 or -1, proportional to that power of the sum `base`."""

    power: int = 0
    base: Any = None
    degree: float = 0.0
    counts: bool = False
    empty: bool = False
    """True for a test whether the sum `base` is 0, as it is for a mask that selects nothing."""


@dataclass(frozen=True)
class Fault:
    """A value that parts of the rows would compute differently, or that no rule covers."""

    verdict: Literal["coupled", "not understood"]
    reason: str
    primitive: str = ""
    where: str = ""
    """File and line of the user's code."""


RowType = Same | Rows | Sum | Running | Number | Fault


def coupled(reason: str) -> Fault:
    """Return the type of a value that several rows determine together."""
    return Fault("coupled", reason)


def unknown(reason: str) -> Fault:
    """Return the type of a value that no rule covers."""
    return Fault("not understood", reason)


MISALIGNED = coupled("rows beside other rows")
BY_PLACE = coupled("numbers by a row's place in the batch")
BY_COUNT = coupled("a number by how many rows there are")
OF_ALL = coupled("a number of all rows beside each")


def first_fault(types: Sequence[RowType]) -> Fault | None:
    """Return the first fault among the types, if any."""
    return next((kind for kind in types if isinstance(kind, Fault)), None)


def aligned(types: Sequence[RowType]) -> RowType:
    """Return the type of an elementwise function of values of one shape, none of which depends on a sum.

    Groups of different sizes merge into groups of their least common multiple, whose rows every entry stays within. The
    result has degree 0 and no divisor; the caller sets them, because they depend on the function.
    """
    rows = [kind for kind in types if isinstance(kind, Rows)]
    same = [kind for kind in types if isinstance(kind, Same)]
    if not rows:
        return Same(NO_AXES.union(*(kind.varies for kind in same)), NO_AXES.union(*(kind.drawn for kind in same)))
    # Rescale every layout to the common group size, so that equal placements compare equal.
    group = lcm(*(kind.group for kind in rows))
    layouts = {(kind.axis, kind.outer, kind.inner * group // kind.group) for kind in rows}
    if len(layouts) > 1:
        return MISALIGNED
    axis, outer, inner = layouts.pop()
    if any(axis in kind.varies for kind in same):
        return BY_PLACE
    return Rows(axis, outer, inner, group)


def either(types: Sequence[RowType]) -> RowType:
    """Return the type of a value that has one of these types, by a choice that does not depend on rows."""
    if (first := first_fault(types)) is not None:
        return first
    # A constant 0 has every degree and divisor: it is the usual initial value of a sum, and the fill of a masked mean.
    live = [kind for kind in types if not (isinstance(kind, Same) and kind.value == 0)] or list(types)
    scales = {(kind.degree, getattr(kind, "divisor", None)) for kind in live if isinstance(kind, Same | Rows | Sum)}
    if any(isinstance(kind, Running) for kind in live):
        return live[0] if all(kind == live[0] for kind in types) else coupled("a running sum over rows")
    if any(isinstance(kind, Number) for kind in live):
        return OF_ALL if any(isinstance(kind, Rows) for kind in live) else Number()
    if any(isinstance(kind, Sum) for kind in live):
        if any(isinstance(kind, Rows) for kind in live):
            return OF_ALL
        sums = {(kind.degree, kind.divisor) for kind in live if isinstance(kind, Sum)}
        plain = {kind.degree for kind in live if isinstance(kind, Same)}
        if len(sums) > 1 or not plain <= {degree for degree, _ in sums}:
            return coupled("a mean beside another mean or a sum")
        return summed(live)
    if len(scales) > 1:
        return BY_COUNT if len({degree for degree, _ in scales}) > 1 else coupled("a mean beside another mean")
    degree, divisor = scales.pop()
    return scaled(aligned(types), degree, divisor)


def scaled(kind: RowType, degree: float, divisor: Divisor | None) -> RowType:
    """Return a result of `aligned` with a degree and a divisor."""
    if isinstance(kind, Rows):
        return replace(kind, degree=degree, divisor=divisor)
    return replace(kind, degree=degree) if isinstance(kind, Same) else kind


def summed(types: Sequence[RowType]) -> Sum:
    """Return the type of a linear function of these types, whose sums share one degree and divisor."""
    sums = [kind for kind in types if isinstance(kind, Sum)]
    return Sum(sums[0].degree, sums[0].divisor, counts=all(kind.counts for kind in sums))
