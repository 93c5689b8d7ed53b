"""Fixed task orders (GPipe, 1F1B, interleaved 1F1B, ZB-H1), and the activations each policy keeps alive."""

from collections import deque
from typing import Literal, get_args

from axonn_jax.errors import UserError, nearest
from axonn_jax.options import PipelinePolicy
from axonn_jax.schedule.tasks import Kind, PipelineShape, Task

POLICIES: tuple[PipelinePolicy, ...] = get_args(PipelinePolicy)
"""Names of all policies."""


Backwards = Literal["whole", "split", "both"]
"""Forms of a step's backward passes: one task, two tasks (input and weight gradients), or either."""


def backwards(policy: PipelinePolicy, shape: PipelineShape, split: bool = True) -> Backwards:
    """Return the form of a policy's backwards; `split` allows the message-driven policy to split them."""
    if policy == "message" and split:
        some_whole = shape.virtual_stages == 1 and shape.microbatches > shape.pipe
        return "both" if some_whole else "split"
    return "split" if policy == "zero-bubble" else "whole"


def may_split(asked: bool, activations: str | None) -> bool:
    """Return True if the message-driven policy may split backwards under the activation policy of all layers.

    A gradient of weights that waited would keep all that such a policy has computed again.
    """
    return asked and activations == "none"


def joins(policy: PipelinePolicy, shape: PipelineShape) -> bool:
    """Return True if the last stage runs every forward and its backward (or input gradient) in a row, as one program.

    It is so where a rank has one stage, for all policies but GPipe.
    """
    return policy != "gpipe" and shape.virtual_stages == 1


def check_policy(policy: str, shape: PipelineShape) -> None:
    """Raise ``UserError`` for an unknown policy, or one that cannot run with this many virtual stages."""
    if policy not in POLICIES:
        raise UserError("pipeline.policy", policy, f"one of {', '.join(POLICIES)}{nearest(policy, POLICIES)}")
    if policy == "1f1b" and shape.virtual_stages != 1:
        raise UserError(
            "pipeline.virtual_stages",
            shape.virtual_stages,
            'pipeline.policy "1f1b" has 1; "interleaved" is the 1F1B order for more',
        )


def fixed_order(policy: PipelinePolicy, shape: PipelineShape, rank: int) -> list[Task]:
    """Return every task of a rank in the order in which a fixed policy runs them.

    Sources: GPipe (Huang et al. 2019); 1F1B (Narayanan et al. 2021, PipeDream-Flush); interleaved 1F1B (Narayanan
    et al. 2021, Megatron-LM); ZB-H1 (Qi et al. 2024, Zero Bubble Pipeline Parallelism).

    Raises:
        UserError: the policy is unknown, or is `1f1b` and there are several virtual stages.
        ValueError: the policy is `message`, which has no fixed order.
    """
    check_policy(policy, shape)
    if policy == "message":
        raise ValueError("the message-driven policy has no fixed order")
    if policy == "gpipe":
        everything = shape.microbatches * shape.virtual_stages
        return _in_pairs(shape, rank, group=shape.microbatches, warm_up=everything)
    # With one virtual stage groups make no difference, and of one microbatch none has to be left out.
    group = shape.pipe if shape.virtual_stages > 1 else 1
    order = _in_pairs(shape, rank, group=group, warm_up=_warm_up(shape, rank))
    return _split(order, spare=_peak(shape, 0) - _peak(shape, rank)) if policy == "zero-bubble" else order


def live_bound(policy: PipelinePolicy, shape: PipelineShape, rank: int, in_flight: int = 0, split: bool = True) -> int:
    """Return the greatest number of activations, as (stage, microbatch) pairs, that a rank keeps alive.

    An activation is born when its forward starts and dies when its backward (the weight part of a split one) has
    finished. With P ranks, M microbatches, V virtual stages and rank r:

    * gpipe: `M V`;
    * 1f1b: `min(M, P - r)`;
    * interleaved: 1f1b's for V = 1, else `min(M V, 2 (P - r - 1) + (V - 1) P + 1)`;
    * zero-bubble: rank 0's under interleaved, on every rank (for V = 1: `min(M, P)`);
    * message: `min(M V, in_flight V)`; with `in_flight` left at 0, `P + P // 2` for V = 1, else zero-bubble's. Fused
      backwards with V = 1 keep no more than `in_flight_limit`.

    With `in_flight = P` and one virtual stage, message-driven keeps no more alive than the best fixed order it competes
    with; with several it does so unless `in_flight` says otherwise.
    """
    check_policy(policy, shape)
    everything = shape.microbatches * shape.virtual_stages
    if policy == "gpipe":
        return everything
    if policy in ("1f1b", "interleaved"):
        return min(everything, _peak(shape, rank))
    if policy == "zero-bubble":
        return min(everything, _peak(shape, 0))
    if not split and shape.virtual_stages == 1:
        return min(everything, in_flight_limit(shape, rank, in_flight))
    if in_flight or shape.virtual_stages == 1:
        return min(everything, (in_flight or default_in_flight(shape)) * shape.virtual_stages)
    return min(everything, _peak(shape, 0))


def default_in_flight(shape: PipelineShape) -> int:
    """Return the default number of microbatches in flight under the message-driven policy.

    With one virtual stage half as many again as 1F1B: where messages take any time at all, be it a fiftieth of a
    forward, 1F1B's P cost up to 4 % of a step (P = 8), and more than this gain little until they take half a forward.
    With several, 2 P: two groups of the interleaved order.
    """
    return shape.pipe + shape.pipe // 2 if shape.virtual_stages == 1 else 2 * shape.pipe


def waiting_bound(
    policy: PipelinePolicy, shape: PipelineShape, rank: int, in_flight: int = 0, split: bool = True
) -> int:
    """Return the greatest number of `live_bound`'s activations that wait for their weight gradient alone.

    ZB-H1 holds back as many as rank r has fewer activations than rank 0, and has one more when the next of them starts.
    Under `message` all of them may wait: gradients may come in one after the other.
    """
    if backwards(policy, shape, split) == "whole":
        return 0
    live = live_bound(policy, shape, rank, in_flight, split)
    return live if policy == "message" else min(live, _peak(shape, 0) - _peak(shape, rank) + 1)


def in_flight_limit(shape: PipelineShape, rank: int, in_flight: int = 0) -> int:
    """Return the greatest number of microbatches between first forward and last backward on a rank.

    This is the message-driven policy's. With one virtual stage `in_flight = P` is 1f1b's `P - r`; a larger one adds the
    difference on every rank, below P it caps every rank. With several it is `in_flight` on every rank. (More than two
    groups would fill the memory with first chunks whenever stage 0 has time.) 0 is `default_in_flight`.
    """
    limit = in_flight or default_in_flight(shape)
    return limit if shape.virtual_stages > 1 else min(limit, max(limit, shape.pipe) - rank)


def _warm_up(shape: PipelineShape, rank: int) -> int:
    """Number of forwards before the first forward-backward pair (Megatron-LM)."""
    if shape.virtual_stages == 1:
        return shape.pipe - rank - 1
    return 2 * (shape.pipe - rank - 1) + (shape.virtual_stages - 1) * shape.pipe


def _peak(shape: PipelineShape, rank: int) -> int:
    """Number of activations alive at once in the 1F1B orders: the warm-up's and the first pair's."""
    return _warm_up(shape, rank) + 1


def _in_pairs(shape: PipelineShape, rank: int, *, group: int, warm_up: int) -> list[Task]:
    """Return `warm_up` forwards, then forwards and backwards in turn, then the remaining backwards.

    Microbatches pass the virtual stages in groups. The order is made for the next multiple of `group` microbatches, and
    the tasks of those that do not exist are left out. Leaving out microbatches keeps an order feasible: a task depends
    on tasks of its own microbatch only, so the rest keeps its dependencies and their order.
    """
    pipe, chunks = shape.pipe, shape.virtual_stages
    total = -(-shape.microbatches // group) * group * chunks
    forwards, backwards = [], []
    for number in range(total):
        before, index = divmod(number, group * chunks)
        chunk, microbatch = index // group, before * group + index % group
        forwards.append(Task(Kind.FORWARD, chunk * pipe + rank, microbatch))
        backwards.append(Task(Kind.BACKWARD, (chunks - 1 - chunk) * pipe + rank, microbatch))
    warm_up = min(total, warm_up)
    order = forwards[:warm_up]
    for forward, backward in zip(forwards[warm_up:], backwards, strict=False):
        order += (forward, backward)
    order += backwards[total - warm_up :]
    return [task for task in order if task.microbatch < shape.microbatches]


def _split(order: list[Task], spare: int) -> list[Task]:
    """Split backwards; weight gradients lag behind by up to `spare` activations, and fill the end (ZB-H1)."""
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
