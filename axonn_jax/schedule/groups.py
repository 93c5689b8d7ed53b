"""Which pieces of a stage share a program: layers that are alike, a few at a time; depth then costs no compile time."""

from collections.abc import Sequence
from itertools import pairwise
from math import ceil

SIZES = (4, 3)
"""Layers of a group, in which XLA fuses and overlaps across layers; a stage of at most four layers stays whole."""


def group_size(layers: int) -> int:
    """Returns the layers of a group in a stage of so many: what is compiled is one group and what is left over."""
    return layers if layers <= SIZES[0] else min(SIZES, key=lambda size: size + layers % size)


def group_count(layers: float) -> int:
    """Returns the groups that layers are in, halves of layers being one more."""
    return 1 if layers < SIZES[0] + 1 else ceil(int(layers) / group_size(int(layers))) + (layers % 1 > 0)


def group_ranges(kinds: Sequence[str], stage: range) -> list[range]:
    """Returns the pieces of a stage's groups, in order, by the kind of every piece of the model.

    Pieces of one kind are alike but for their parameters' values; those of the kind "" are like no other.
    """
    start = next((i for i in stage if kinds[i]), stage.stop)
    stop = next((i for i in range(start, stage.stop) if not kinds[i]), stage.stop)
    own = kinds[start:stop]
    period = next((n for n in range(1, len(own)) if own[n:] == own[:-n]), len(own) or 1)
    layers = len(own) // period
    if layers <= SIZES[0]:
        return [stage]
    whole = start + layers * period
    cuts = sorted({stage.start, *range(start, whole, group_size(layers) * period), whole, stop})
    rest = group_ranges(kinds, range(stop, stage.stop)) if stop < stage.stop else []
    return [*(range(*ends) for ends in pairwise(cuts)), *rest]
