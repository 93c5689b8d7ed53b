"""Bytes that a rank holds between its tasks at most, given what every (stage, microbatch) pair keeps."""

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from axonn_jax.schedule.policies import Policy, fixed_order, in_flight_limit, joins, live_bound, waiting_bound
from axonn_jax.schedule.tasks import Kind, Layout


class Pair(NamedTuple):
    """Bytes that one stage keeps of one microbatch."""

    forward: float
    """From its forward to its backward, or to its input gradient."""
    waiting: float
    """From its input gradient to its weight gradient."""


def most_held(
    policy: Policy, layout: Layout, rank: int, pairs: Sequence[Pair], in_flight: int = 0, split: bool = True
) -> float:
    """Returns the most bytes that a rank's pairs keep when a task starts, `pairs` by chunk from the shallowest.

    In a fixed order that is what it comes to. Under `message` it is the worst that messages' timing can bring about:
    any `live_bound` activations that can be alive together, all of them waiting for their weight gradient if that is
    more. Of a microbatch those are always its first chunks, since deeper ones start later and are done earlier.
    """
    if policy != "message":
        return _most_in_order(policy, layout, rank, pairs)
    live = live_bound(policy, layout, rank, in_flight, split)
    late = waiting_bound(policy, layout, rank, in_flight, split) > 0
    prefixes = [0.0, *accumulate(max(pair) if late else pair.forward for pair in pairs)]
    most = [0.0] * (live + 1)  # by room for activations, of the microbatches so far
    for _ in range(min(layout.microbatches, live)):
        most = [max(most[room - n] + prefixes[n] for n in range(min(room, len(pairs)) + 1)) for room in range(live + 1)]
    return most[live]


def most_arrived(policy: Policy, layout: Layout, rank: int, in_flight: int = 0, split: bool = True) -> int:
    """Returns how many messages may have come for forwards that have not started, while the rank holds its most.

    What has come here is in flight on the rank before, as is all that is in flight here. Rank 0 has messages of one
    chunk and one group of `pipe` microbatches at a time. Under `message` every microbatch in flight may have one.
    """
    live, several = live_bound(policy, layout, rank, in_flight, split), layout.virtual_stages > 1
    if rank == 0 and not several:
        return 0
    started = live - waiting_bound(policy, layout, rank, in_flight, split)
    if policy == "message":
        before = min(layout.microbatches, in_flight_limit(layout, max(0, rank - 1), in_flight))
        return before if several or rank == layout.pipe - 1 else max(0, before - started)
    if rank == 0:
        return layout.microbatches if policy == "gpipe" else min(layout.microbatches, layout.pipe)
    joined = rank == layout.pipe - 1 and joins(policy, layout)
    before = live_bound("gpipe" if policy == "gpipe" else "interleaved", layout, rank - 1)
    return max(0, before - (0 if joined else started))


def _most_in_order(policy: Policy, layout: Layout, rank: int, pairs: Sequence[Pair]) -> float:
    held = most = 0.0
    for task in fixed_order(policy, layout, rank):
        pair = pairs[task.stage // layout.pipe]
        if task.kind is Kind.FORWARD:
            held += pair.forward
        elif task.kind is Kind.BACKWARD:
            held -= pair.forward
        elif task.kind is Kind.BACKWARD_INPUT:
            held += pair.waiting - pair.forward
        else:
            held -= pair.waiting
        most = max(most, held)
    return most
