"""Fixed task orders (GPipe, 1F1B, interleaved 1F1B, ZB-H1), and how many activations each policy keeps alive."""

from collections import deque
from collections.abc import Iterator
from typing import Literal, get_args

from axonn_jax.errors import UserError, nearest
from axonn_jax.schedule.tasks import Kind, Layout, Task

Policy = Literal["message", "gpipe", "1f1b", "interleaved", "zero-bubble"]
"""How a rank chooses its next task: by what has arrived (`message`), or in a fixed order."""

POLICIES: tuple[Policy, ...] = get_args(Policy)
"""All policies."""


Backwards = Literal["whole", "split", "both"]
"""How the backward passes of a step run: in one task, in two (input and weight gradients), or in either way."""


def backwards(policy: Policy, layout: Layout, split: bool = True) -> Backwards:
    """Returns which tasks a policy makes of backwards; `split` is what the message-driven policy was told."""
    if policy == "message" and split:
        some_whole = layout.virtual_stages == 1 and layout.microbatches > layout.pipe
        return "both" if some_whole else "split"
    return "split" if policy == "zero-bubble" else "whole"


def may_split(asked: bool, activations: str | None) -> bool:
    """Returns whether the message-driven policy may split backwards, given the activation policy of all layers.

    A gradient of weights that waited would keep all that such a policy has computed again.
    """
    return asked and activations == "none"


def joins(policy: Policy, layout: Layout) -> bool:
    """Returns whether the last stage runs every forward and its backward (or input gradient) in a row, as one program.

    It is so where a rank has one stage, for all policies but GPipe.
    """
    return policy != "gpipe" and layout.virtual_stages == 1


def check_policy(policy: str, layout: Layout) -> None:
    """Raises ``UserError`` for an unknown policy, or one that cannot run with this many virtual stages."""
    if policy not in POLICIES:
        raise UserError("pipeline.policy", policy, f"one of {', '.join(POLICIES)}{nearest(policy, POLICIES)}")
    if policy == "1f1b" and layout.virtual_stages != 1:
        raise UserError(
            "pipeline.virtual_stages",
            layout.virtual_stages,
            'pipeline.policy "1f1b" has 1; "interleaved" is the 1F1B order for more',
        )


def fixed_order(policy: Policy, layout: Layout, rank: int) -> list[Task]:
    """Returns every task of a rank in the order in which a fixed policy runs them.

    Sources: GPipe (Huang et al. 2019); 1F1B (Narayanan et al. 2021, PipeDream-Flush); interleaved 1F1B (Narayanan
    et al. 2021, Megatron-LM); ZB-H1 (Qi et al. 2024, Zero Bubble Pipeline Parallelism).

    Raises:
        UserError: the policy is unknown, or is `1f1b` and there are several virtual stages.
        ValueError: the policy is `message`, which has no fixed order.
    """
    check_policy(policy, layout)
    if policy == "message":
        raise ValueError("the message-driven policy has no fixed order")
    if policy == "gpipe":
        return _gpipe(layout, rank)
    order = list(_one_forward_one_backward(layout, rank))
    return _split(order, spare=_peak(layout, 0) - _peak(layout, rank)) if policy == "zero-bubble" else order


def live_bound(policy: Policy, layout: Layout, rank: int, in_flight: int = 0, split: bool = True) -> int:
    """Returns the most activations, counted in (stage, microbatch) pairs, that a rank ever keeps alive.

    An activation is born when its forward starts and dies when its backward (the weight part of a split one) has
    finished. With P ranks, M microbatches, V virtual stages and rank r:

    * gpipe: `M V`;
    * 1f1b: `min(M, P - r)`;
    * interleaved: 1f1b's for V = 1, else `min(M V, 2 (P - r - 1) + (V - 1) P + 1)`;
    * zero-bubble: on every rank what rank 0 has under interleaved (for V = 1: `min(M, P)`);
    * message: `min(M V, in_flight V)`; with `in_flight` left at 0, `P + P // 2` for V = 1, else zero-bubble's. Fused
      backwards with V = 1 keep no more than `in_flight_limit`.

    With `in_flight = P` and one virtual stage, message-driven keeps no more alive than the best fixed order it competes
    with; with several it does so unless told otherwise.
    """
    check_policy(policy, layout)
    everything = layout.microbatches * layout.virtual_stages
    if policy == "gpipe":
        return everything
    if policy in ("1f1b", "interleaved"):
        return min(everything, _peak(layout, rank))
    if policy == "zero-bubble":
        return min(everything, _peak(layout, 0))
    if not split and layout.virtual_stages == 1:
        return min(everything, in_flight_limit(layout, rank, in_flight))
    if in_flight or layout.virtual_stages == 1:
        return min(everything, (in_flight or default_in_flight(layout)) * layout.virtual_stages)
    return min(everything, _peak(layout, 0))


def default_in_flight(layout: Layout) -> int:
    """Returns how many microbatches the message-driven policy has in flight where nobody says.

    With one virtual stage half as many again as 1F1B: where messages take any time at all, be it a fiftieth of a
    forward, 1F1B's P cost up to 4 % of a step (P = 8), and more than this gain little until they take half a forward.
    With several, 2 P: two groups of the interleaved order.
    """
    return layout.pipe + layout.pipe // 2 if layout.virtual_stages == 1 else 2 * layout.pipe


def in_flight_limit(layout: Layout, rank: int, in_flight: int = 0) -> int:
    """Returns how many microbatches may be between their first forward and their last backward on a rank.

    This is the message-driven policy's. With one virtual stage `in_flight = P` is 1f1b's `P - r`; what is above P adds
    the difference on every rank, below P it caps every rank. With several it is `in_flight` on every rank. (More than
    two groups would fill the memory with first chunks whenever stage 0 has time.) 0 is `default_in_flight`.
    """
    limit = in_flight or default_in_flight(layout)
    return limit if layout.virtual_stages > 1 else min(limit, max(limit, layout.pipe) - rank)


def _warm_up(layout: Layout, rank: int) -> int:
    """Forwards before the first forward-backward pair (Megatron-LM)."""
    if layout.virtual_stages == 1:
        return layout.pipe - rank - 1
    return 2 * (layout.pipe - rank - 1) + (layout.virtual_stages - 1) * layout.pipe


def _peak(layout: Layout, rank: int) -> int:
    """Activations alive at once in the 1F1B orders: the warm-up's, and the forward of the first pair."""
    return _warm_up(layout, rank) + 1


def _gpipe(layout: Layout, rank: int) -> list[Task]:
    """All forwards chunk by chunk, then all backwards from the deepest chunk up."""
    chunks, numbers = layout.stages_of(rank), range(layout.microbatches)
    forwards = [Task(Kind.FORWARD, stage, m) for stage in chunks for m in numbers]
    return forwards + [Task(Kind.BACKWARD, stage, m) for stage in reversed(chunks) for m in numbers]


def _one_forward_one_backward(layout: Layout, rank: int) -> Iterator[Task]:
    """The 1F1B order; with several virtual stages, microbatches pass them in groups of `pipe`.

    With several the order is made for the next multiple of `pipe` microbatches, and the tasks of those that do not
    exist are left out. Leaving out microbatches keeps an order feasible: a task depends on tasks of its own
    microbatch only, so what is left has the same dependencies and meets them in the same order.
    """
    pipe, chunks = layout.pipe, layout.virtual_stages
    padded = layout.microbatches if chunks == 1 else -(-layout.microbatches // pipe) * pipe
    total = padded * chunks
    forwards, backwards = [], []
    for number in range(total):
        group, place = divmod(number, pipe * chunks)
        chunk, microbatch = place // pipe, group * pipe + place % pipe
        forwards.append(Task(Kind.FORWARD, chunk * pipe + rank, microbatch))
        backwards.append(Task(Kind.BACKWARD, (chunks - 1 - chunk) * pipe + rank, microbatch))
    warm_up = min(total, _warm_up(layout, rank))
    order = forwards[:warm_up]
    for forward, backward in zip(forwards[warm_up:], backwards, strict=False):
        order += (forward, backward)
    order += backwards[total - warm_up :]
    return (task for task in order if task.microbatch < layout.microbatches)


def _split(order: list[Task], spare: int) -> list[Task]:
    """Splits backwards; weight gradients lag behind by up to `spare` activations, and fill the end (ZB-H1)."""
    late: deque[Task] = deque()
    result: list[Task] = []
    for task in order:
        if task.kind is Kind.FORWARD:
            result.append(task)
            continue
        result.append(Task(Kind.BACKWARD_INPUT, task.stage, task.microbatch))
        late.append(Task(Kind.BACKWARD_WEIGHT, task.stage, task.microbatch))
        if len(late) > spare:
            result.append(late.popleft())
    return result + list(late)
