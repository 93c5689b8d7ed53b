"""Cuts a stage into groups of pieces, each with programs of its own, which equal groups share.

What is compiled for a stage then does not grow with its depth.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from axonn_jax.models.pieces import Piece
from axonn_jax.pipeline.trace import Needs, Stretch

SIZES = (4, 3)
"""Layers of a group. In a group, XLA fuses and overlaps across layers; a stage of at most four stays whole."""


@dataclass(frozen=True)
class Group:
    """Pieces in a row that run the programs of a stretch: the stretch itself, or pieces that are like it."""

    stretch: Stretch
    needs: Needs
    names: tuple[str, ...]
    """The parameters it runs on, where the stretch has `needs.names`."""
    later: int = 0
    """Layers that it comes after the stretch."""


def group_ranges(pieces: Sequence[Piece], stage: range) -> list[range]:
    """The pieces of a stage's groups, in order: layers that are alike a few at a time, and what lies between them."""
    start = next((i for i in stage if pieces[i].alike), stage.stop)
    stop = next((i for i in range(start, stage.stop) if not pieces[i].alike), stage.stop)
    kinds = [pieces[i].alike for i in range(start, stop)]
    period = next((n for n in range(1, len(kinds)) if kinds[n:] == kinds[:-n]), len(kinds) or 1)
    layers = len(kinds) // period
    if layers <= SIZES[0]:
        return [stage]
    size = min(SIZES, key=lambda size: size + layers % size)  # what is compiled: a group, and what is left over
    whole = start + layers * period
    cuts = sorted({stage.start, *range(start, whole, size * period), whole, stop})
    rest = group_ranges(pieces, range(stop, stage.stop)) if stop < stage.stop else []
    return [*(range(*ends) for ends in pairwise(cuts)), *rest]


def like(first: Group, pieces: Sequence[Piece], own: range) -> Group:
    """The group of pieces `own` that runs the programs of a first one, whose pieces are like them."""
    there = {pieces[a].layer: pieces[b].layer for a, b in zip(first.stretch.pieces, own, strict=True)}

    def renamed(name: str) -> str:
        layer = next(layer for layer in there if name.startswith(f"{layer}."))
        return there[layer] + name.removeprefix(layer)

    before, here = (int(pieces[p.start].layer.rpartition(".")[2]) for p in (first.stretch.pieces, own))
    return replace(first, names=tuple(map(renamed, first.names)), later=here - before)
