"""Rows of a machine file that were measured: matmuls by size, collectives and messages by place."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import log
from typing import TypeVar

from axonn_jax.errors import UserError, nearest

MEASURED_KINDS = ("all-reduce", "all-gather", "reduce-scatter")
"""What `Collective.kind` may be."""


@dataclass(frozen=True)
class Measured:
    """A measured bandwidth of ring collectives, all groups of an axis at once."""

    inner: int
    """Product of the axes inside (faster) of this one; counts from here to the next entry's."""
    size: int
    """Devices of a group; counts from here to the next entry's."""
    gib_per_s: float
    """What a device sends, in 2^30 bytes a second."""


@dataclass(frozen=True)
class Collective:
    """A measured time of one kind of collective, all groups of an axis at once."""

    kind: str
    """What it does: all-reduce, all-gather or reduce-scatter."""
    inner: int
    """Product of the axes inside (faster) of this one; counts from here to the next entry's."""
    size: int
    """Devices of a group; counts from here to the next entry's."""
    bytes: float
    """Of the whole buffer: gathered, or to be reduced."""
    seconds: float
    """What it took."""


@dataclass(frozen=True)
class Messages:
    """Measured messages between pipeline stages inside a node."""

    channel: str
    """What carried them, as in `pipeline.channel`."""
    bytes_per_s: float
    """Of long ones."""
    latency_s: float
    """Of short ones."""


@dataclass(frozen=True)
class MatmulShare:
    """How much of the rate of large matmuls those of one size reach."""

    size: int
    """Cube root of the product of its three dims."""
    share: float
    """At most 1."""


Curve = tuple[tuple[float, float], ...]
"""Points (x, y), x ascending."""

Row = TypeVar("Row", Measured, Collective)


def at_place(rows: Sequence[Row], inner: int, size: int) -> list[Row]:
    """Those of the largest measured product of inner axes, and then size, that are not larger."""
    rows = [row for row in rows if row.inner <= inner]
    level = max((row.inner for row in rows), default=0)
    rows = [row for row in rows if row.inner == level and row.size <= size]
    return [row for row in rows if row.size == max(other.size for other in rows)]


def check_measured(matmuls: Sequence[MatmulShare], collectives: Sequence[Collective]) -> None:
    """Raises ``UserError`` for what no single number's range can say."""
    for at, row in enumerate(matmuls):
        if row.share > 1:
            raise UserError(f"matmuls[{at}].share", row.share, "a share above 0 and of at most 1")
    for at, one in enumerate(collectives):
        if one.kind not in MEASURED_KINDS:
            accepted = f"one of {', '.join(MEASURED_KINDS)}{nearest(one.kind, MEASURED_KINDS)}"
            raise UserError(f"collectives[{at}].kind", one.kind, accepted)


def between(curve: Curve, at: float) -> float:
    """The value of a curve: linear between its points, the first y before them, `slope` beyond the last."""
    if at <= curve[0][0]:
        return curve[0][1]
    for (x, y), (further, higher) in pairwise(curve):
        if at <= further:
            return y + (at - x) * (higher - y) / (further - x)
    return curve[-1][1] + (at - curve[-1][0]) * slope(curve)


def slope(curve: Curve) -> float:
    """How y grows with x where x is large: as between the last two points; in proportion to x if there is one."""
    if len(curve) == 1:
        return curve[0][1] / curve[0][0]
    (x, y), (further, higher) = curve[-2:]
    return max(0.0, higher - y) / (further - x)


def matmul_share(rows: tuple[MatmulShare, ...], size: float) -> float:
    """Share at a size, between measured ones by its logarithm; that of the nearest outside, 1 where there are none."""
    if not rows:
        return 1.0
    points = tuple(sorted((log(row.size), row.share) for row in rows))
    return between(points, min(log(size), points[-1][0]))
