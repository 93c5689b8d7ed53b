"""A pipeline in lines for people: what each stage holds, and what its schedule is like."""

from collections.abc import Sequence

from axonn_jax.models.pieces import Piece
from axonn_jax.schedule.policies import Policy
from axonn_jax.schedule.tasks import Layout


def described(
    pieces: Sequence[Piece], ranges: Sequence[range], layout: Layout, policy: Policy, channel: str
) -> list[str]:
    """The pieces and parameters of every stage, by `ranges` of `pieces`, and what the schedule is like."""
    lines = [
        f"stage {stage} (place {layout.rank_of(stage)}): {pieces[r[0]].name} to {pieces[r[-1]].name}, "
        f"{sum(piece.params for piece in pieces[r.start : r.stop]):,} parameters"
        for stage, r in enumerate(ranges)
    ]
    lines.append(f"{layout.microbatches} microbatches a step, policy {policy}, channel {channel}")
    if layout.microbatches < layout.pipe:
        idle = 1 - layout.microbatches / layout.pipe
        lines.append(
            f"train.microbatches = {layout.microbatches} is fewer than grid.pipe = {layout.pipe}: at least "
            f"{idle:.0%} of the places are idle at any time; {4 * layout.pipe} or more would keep them busy"
        )
    return lines
