"""Bytes that a place along the pipe holds between its tasks, beside its model's state: what its programs hand over."""

from axonn_jax.pipeline.rank import Rank
from axonn_jax.pipeline.stage import Stage, local_bytes
from axonn_jax.pipeline.trace import TOKENS
from axonn_jax.schedule.held import Pair, most_arrived, most_held
from axonn_jax.schedule.policies import Policy
from axonn_jax.schedule.tasks import Layout


def held_pair(stage: Stage) -> Pair:
    """Returns the bytes that a microbatch keeps on each device of a stage between its tasks.

    Before the backward a gradient that has come for it counts too.
    """
    dy = 0 if stage.y is None else local_bytes(stage.y)
    split = next((name for name in ("I", "FI") if name in stage.programs), None)
    return Pair(0 if stage.joins else stage.held("F") + dy, stage.held(split) if split else 0)


def most_between_tasks(rank: Rank, layout: Layout, policy: Policy, in_flight: int = 0, split: bool = True) -> int:
    """Returns the most bytes on each device of a place when a task starts, beside weights, their sums and optimizer.

    Those are what microbatches in flight keep (`most_held`), messages that have come, one that goes, and the step's
    tokens; `split` and `in_flight` are what the dispatcher was told.
    """
    stages = [rank.stages[number] for number in sorted(rank.stages)]
    pairs = [held_pair(stage) for stage in stages]
    arriving = max(0 if stage.stretch.x is None else local_bytes(stage.stretch.x) for stage in stages)
    going = max(max(0 if s is None else local_bytes(s) for s in (stage.y, stage.stretch.x)) for stage in stages)
    reading = next((stage.stretch for stage in stages if stage.first or stage.last), None)
    tokens = 0 if reading is None else reading.work.microbatches * local_bytes(reading.inputs()[TOKENS])
    held = most_held(policy, layout, rank.place, pairs, in_flight, split)
    return int(held) + most_arrived(policy, layout, rank.place, in_flight, split) * arriving + going + tokens
