"""Bytes that a place along the pipe holds between its tasks, beside its model's state: what its programs hand over."""

from axonn_jax.pipeline.chain import local_bytes
from axonn_jax.pipeline.rank import Rank
from axonn_jax.pipeline.stage import Stage
from axonn_jax.schedule.held import Pair, most_arrived, most_held
from axonn_jax.schedule.policies import Policy
from axonn_jax.schedule.tasks import Layout


def held_pair(stage: Stage) -> Pair:
    """Returns the bytes that a microbatch keeps on each device of a stage between its tasks.

    Before the backward a gradient that has come for it counts too.
    """
    dy = 0 if stage.y is None else local_bytes(stage.y)
    split = next((name for name in ("I", "FI") if name in stage.programs[-1]), None)
    return Pair(0 if stage.joins else stage.held("F") + dy, stage.held(split) if split else 0)


def most_between_tasks(rank: Rank, layout: Layout, policy: Policy, in_flight: int = 0, split: bool = True) -> int:
    """Returns the most bytes on each device of a place when a task starts, beside weights, their sums and optimizer.

    Those are what microbatches in flight keep (`most_held`), messages that have come, one that goes, and the step's
    tokens; `split` and `in_flight` are what the dispatcher was told.
    """
    stages = [rank.stages[number] for number in sorted(rank.stages)]
    pairs = [held_pair(stage) for stage in stages]
    arriving = max(0 if stage.x is None else local_bytes(stage.x) for stage in stages)
    going = max(max(0 if form is None else local_bytes(form) for form in (stage.y, stage.x)) for stage in stages)
    tokens = max(0 if s.tokens is None else s.work.microbatches * local_bytes(s.tokens) for s in stages)
    held = most_held(policy, layout, rank.place, pairs, in_flight, split)
    return int(held) + most_arrived(policy, layout, rank.place, in_flight, split) * arriving + going + tokens
