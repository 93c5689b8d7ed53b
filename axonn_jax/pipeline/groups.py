"""Groups of pieces in a stage, each with programs of its own, which groups that are alike share."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from axonn_jax.models.pieces import Piece
from axonn_jax.pipeline.trace import Needs, Stretch


@dataclass(frozen=True)
class Group:
    """Pieces in a row that run the programs of a stretch: the stretch itself, or pieces that are like it."""

    stretch: Stretch
    needs: Needs
    names: tuple[str, ...]
    """The parameters it runs on, where the stretch has `needs.names`."""
    later: int = 0
    """Layers that it comes after the stretch."""


def like(first: Group, pieces: Sequence[Piece], own: range) -> Group:
    """The group of pieces `own` that runs the programs of a first one, whose pieces are like them."""
    there = {pieces[a].layer: pieces[b].layer for a, b in zip(first.stretch.pieces, own, strict=True)}

    def renamed(name: str) -> str:
        layer = next(layer for layer in there if name.startswith(f"{layer}."))
        return there[layer] + name.removeprefix(layer)

    before, here = (int(pieces[p.start].layer.rpartition(".")[2]) for p in (first.stretch.pieces, own))
    return replace(first, names=tuple(map(renamed, first.names)), later=here - before)
