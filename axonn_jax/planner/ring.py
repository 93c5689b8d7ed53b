"""What a device sends for a collective: the ring formulas that predictions and compiled programs share."""

from collections.abc import Iterable
from fractions import Fraction
from typing import Literal, Protocol, get_args

Kind = Literal["all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter"]
KINDS: tuple[Kind, ...] = get_args(Kind)

Totals = dict[tuple[str, str], Fraction]
"""Bytes a device by (kind, axes joined by `*`)."""


class Communication(Protocol):
    """A collective, predicted or compiled."""

    @property
    def kind(self) -> Kind:
        """What it does."""

    @property
    def over(self) -> str:
        """The mesh axes it runs over, joined by `*`."""

    @property
    def bytes(self) -> Fraction:
        """What a device sends for it in a step."""


def ring_bytes(kind: Kind, whole: int, group: int) -> Fraction:
    """Bytes a device sends for a collective of `group` devices, `whole` the bytes of the whole buffer.

    All-gather, reduce-scatter and all-to-all (G-1)/G n, all-reduce 2 (G-1)/G n, and a permutation n: the ring
    algorithms (Thakur et al. 2005). A fraction, so that sums compare exactly.
    """
    if kind == "collective-permute":
        return Fraction(whole)
    return Fraction((2 if kind == "all-reduce" else 1) * (group - 1) * whole, group)


def totals(found: Iterable[Communication]) -> Totals:
    """Bytes a device in a step by (kind, axes); ``ValueError`` where a compiled loop's trip count is unknown."""
    sums: Totals = {}
    for one in found:
        key = (one.kind, one.over)
        sums[key] = sums.get(key, Fraction(0)) + one.bytes
    return dict(sorted(sums.items()))
