"""Types of the values of a traced loss: how each depends on the rows of a batch.

A loss is traced twice, for all rows of a batch and for those of one part, and both programs are read side by side. A
value has one type in both:

* `Same`: of no row, the same numbers in both;
* `Rows`: an entry for each row, or group of neighbouring rows, along one axis, computed from that row alone;
* `Sum`: linear in one such number of each row, so that the sums of parts add up to that of all rows;
* `Number`: computed from sums in any other way, as the inverse of how many targets a mask counts;
* `Told`: what none of these holds, with the reason. It does no harm where no result depends on it.

Of all but the last `degree` says what the number of rows does to a value: a sum over them has degree 1, what is divided
by their number one less. A mean has degree 0, as a value that has seen no row.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import lcm
from typing import Any, Literal, NamedTuple

Axes = frozenset[int]
NO_AXES: Axes = frozenset()

LOOP_AXIS = -1
"""Axis of rows inside a loop over them, where a value is that of one row."""


class Divisor(NamedTuple):
    """A sum over rows that others are divided by."""

    base: Any
    """Name of the sum, as `Sum` has it."""
    counts: bool
    """True if it depends on nothing but the batch, as the sum of a mask."""


@dataclass(frozen=True)
class Same:
    """Numbers that depend on no row.

    Along an axis of as many entries as the batch has rows, entries that differ do so by the row's place in the batch,
    which in a part is another. Draws are left out of `varies`: every row has one of its own, whatever its place.
    """

    varies: Axes = NO_AXES
    """Axes along which entries differ."""
    drawn: Axes = NO_AXES
    """Axes along which each entry is a draw of its own."""
    degree: float = 0.0
    place: int | None = None
    """Axis along which each entry is its own index, of as many entries as rows."""
    columns: Axes = NO_AXES
    """Indices along the last axis at which entries are the index along axis `place`."""
    value: float | None = None
    """The number, where it is known, of all entries."""


@dataclass(frozen=True)
class Rows:
    """An entry along `axis` for each group of `group` neighbouring rows, [outer, rows / group, inner] in that axis."""

    axis: int
    outer: int = 1
    inner: int = 1
    group: int = 1
    degree: float = 0.0
    divisor: Divisor | None = None
    """Sum of all rows that every entry is divided by."""
    columns: Axes = NO_AXES
    """Indices along the last axis at which entries are the row's own index, in an array of indices."""


@dataclass(frozen=True)
class Sum:
    """A sum over rows."""

    degree: float = 1.0
    divisor: Divisor | None = None
    base: Any = field(default=None, compare=False)
    """Name of the sum; others that are proportional to it have the same."""
    scalar: bool = False
    """True if all entries are one number."""
    counts: bool = field(default=False, compare=False)
    """True if it depends on nothing but the batch, as the sum of a mask."""


@dataclass(frozen=True)
class Running:
    """Running total of a loop over rows."""

    carry: int
    """Place among the values that the loop carries: each adds to itself alone."""


@dataclass(frozen=True)
class Number:
    """A number computed from sums; proportional to a power of the sum `base` where that is 1 or -1."""

    power: int = 0
    base: Any = None
    degree: float = 0.0
    counts: bool = False
    empty: bool = False
    """True if it says whether the sum `base` is 0, as of a mask under which nothing counts."""


@dataclass(frozen=True)
class Told:
    """A value that rows decide in a way that parts of the rows cannot keep, or that no rule is known for."""

    verdict: Literal["coupled", "not understood"]
    reason: str
    primitive: str = ""
    where: str = ""
    """The user's file and line."""


RowType = Same | Rows | Sum | Running | Number | Told


def coupled(reason: str) -> Told:
    """Return the type of what rows decide together."""
    return Told("coupled", reason)


def unknown(reason: str) -> Told:
    """Return the type of what no rule is known for."""
    return Told("not understood", reason)


MISALIGNED = coupled("rows beside other rows")
BY_PLACE = coupled("numbers by a row's place in the batch")
BY_COUNT = coupled("a number by how many rows there are")
OF_ALL = coupled("a number of all rows beside each")


def first_fault(types: Sequence[RowType]) -> Told | None:
    """Return the first of the types that nothing holds of."""
    return next((kind for kind in types if isinstance(kind, Told)), None)


def aligned(types: Sequence[RowType]) -> RowType:
    """Return the type of what is computed, entry by entry, from values of one shape that have seen no sum.

    Of groups of other sizes the larger counts, as an entry of the smaller has seen one of its rows. The result has no
    degree and no divisor: those are the caller's.
    """
    rows = [kind for kind in types if isinstance(kind, Rows)]
    same = [kind for kind in types if isinstance(kind, Same)]
    if not rows:
        return Same(NO_AXES.union(*(kind.varies for kind in same)), NO_AXES.union(*(kind.drawn for kind in same)))
    group = lcm(*(kind.group for kind in rows))
    layouts = {(kind.axis, kind.outer, kind.inner * group // kind.group) for kind in rows}
    if len(layouts) > 1:
        return MISALIGNED
    axis, outer, inner = layouts.pop()
    if any(axis in kind.varies for kind in same):
        return BY_PLACE
    return Rows(axis, outer, inner, group)


def either(types: Sequence[RowType]) -> RowType:
    """Return the type of a value that is one or another of these, by a choice that no row makes."""
    if (first := first_fault(types)) is not None:
        return first
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
    """Return a type that `aligned` returns, of a degree and a divisor."""
    if isinstance(kind, Rows):
        return replace(kind, degree=degree, divisor=divisor)
    return replace(kind, degree=degree) if isinstance(kind, Same) else kind


def summed(types: Sequence[RowType]) -> Sum:
    """Return the type of a linear function of these, of which the sums have one degree and divisor."""
    sums = [kind for kind in types if isinstance(kind, Sum)]
    return Sum(sums[0].degree, sums[0].divisor, counts=all(kind.counts for kind in sums))
