"""Policies of the task order: GPipe, 1F1B, interleaved 1F1B, ZB-H1 or by arrival, and their live activations."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Literal

from axonn_jax.core.errors import UserError, nearest
from axonn_jax.pipe.schedule.tasks import Kind, PipelineShape, Task

Backwards = Literal["whole", "split", "both"]
"""Variants of a step's backward passes: one task, two tasks (input and weight gradients), or both variants."""


@dataclass(frozen=True)
class FixedOrder:
    """Policy under which each rank runs its tasks in a fixed order.

    An activation lives from the start of its forward to the end of its backward, or of a split one's weight gradient.
    """

    order: Callable[[PipelineShape, int], list[Task]]
    """Returns all tasks of a rank in their order."""
    live: Callable[[PipelineShape, int], int]
    """Returns the peak number of live activations, as (stage, microbatch) pairs, of a rank."""
    late: Callable[[PipelineShape, int], int] | None = None
    """Returns the peak number of activations that wait only for their weight gradient; None if all live ones may."""
    one_stage: str = ""
    """What the policy accepts instead of several virtual stages, for error messages; empty if it accepts any number."""

    @cached_property
    def splits(self) -> bool:
        """True if weight gradients are separate tasks."""
        return any(task.kind is Kind.BACKWARD_WEIGHT for task in self.order(PipelineShape(1, 1), 0))

    def check(self, shape: PipelineShape) -> None:
        """Raise ``UserError`` if the policy cannot run with this many virtual stages."""
        if self.one_stage and shape.virtual_stages > 1:
            raise UserError("pipeline.virtual_stages", shape.virtual_stages, self.one_stage)

    def backwards(self, shape: PipelineShape) -> Backwards:
        """Return the variants of the backward passes."""
        del shape
        return "split" if self.splits else "whole"

    def joins(self, shape: PipelineShape) -> bool:
        """Return True if the last stage runs every forward and its backward (or input gradient) as one program.

        That requires one stage per rank, and an order in which its backward follows every forward immediately.
        """
        last = self.order(shape, shape.rank_of(shape.last)) if shape.virtual_stages == 1 else ()
        pairs = [(task, successor) for task, successor in pairwise(last) if task.kind is Kind.FORWARD]
        return bool(pairs) and all(task.microbatch == successor.microbatch for task, successor in pairs)

    def waiting(self, shape: PipelineShape, rank: int) -> int:
        """Return the peak number of `live` activations that wait only for their weight gradient."""
        live = self.live(shape, rank) if self.splits else 0
        return live if self.late is None else min(live, self.late(shape, rank))

    def depth(self, shape: PipelineShape) -> int:
        """Return the number of microbatches in flight on the first rank."""
        # Backwards leave a rank's deepest stage first: on average a microbatch in flight keeps (V + 1) / 2 activations.
        return min(shape.microbatches, -(-2 * self.live(shape, 0) // (shape.virtual_stages + 1)))


@dataclass(frozen=True)
class ByArrival:
    """Policy under which the arrival of inputs decides, by the rules of `message_driven`.

    Raises:
        UserError: `in_flight` is negative.
    """

    in_flight: int = 0
    """Microbatches between their first forward and last backward (see `limit`); 0 for `default_in_flight`."""
    splits: bool = True
    """True if weight gradients may be separate tasks."""
    one_stage = ""  # any number of virtual stages

    def __post_init__(self) -> None:
        if self.in_flight < 0:
            raise UserError("pipeline.in_flight", self.in_flight, "at least 1, or 0 for the default")

    def check(self, shape: PipelineShape) -> None:
        """Do nothing: the policy accepts every shape."""

    def backwards(self, shape: PipelineShape) -> Backwards:
        """Return the variants of the backward passes."""
        # `message_driven` always splits the last P microbatches, so only further ones can run in one task.
        may_fuse = shape.virtual_stages == 1 and shape.microbatches > shape.pipe
        return ("both" if may_fuse else "split") if self.splits else "whole"

    def joins(self, shape: PipelineShape) -> bool:
        """Return True if the last stage runs every forward and its backward (or input gradient) as one program."""
        return shape.virtual_stages == 1

    def within(self, shape: PipelineShape, room: int) -> "ByArrival":
        """Return the policy with its default limited to what memory allows.

        Args:
            shape: Sizes of the pipeline.
            room: Number of microbatches beyond those of 1F1B that fit into memory.
        """
        # With several virtual stages the default needs no more memory than the interleaved order.
        if self.in_flight or shape.virtual_stages > 1:
            return self
        return replace(self, in_flight=min(default_in_flight(shape), shape.pipe + room))

    def live(self, shape: PipelineShape, rank: int) -> int:
        """Return the peak number of live activations, as (stage, microbatch) pairs, of a rank.

        It is `min(M V, in_flight V)`. With `in_flight = 0` it is `P + P // 2` for V = 1, else that of zero-bubble.
        Fused backwards with V = 1 keep at most `limit`. One virtual stage with `in_flight = P`, or several with the
        default, keep no more than the best competing fixed order.
        """
        if shape.virtual_stages == 1 and not self.splits:
            return min(shape.pairs, self.limit(shape, rank))
        if self.in_flight or shape.virtual_stages == 1:
            return min(shape.pairs, self.depth(shape) * shape.virtual_stages)
        return min(shape.pairs, _peak(shape, 0))

    def waiting(self, shape: PipelineShape, rank: int) -> int:
        """Return the peak number of `live` activations that wait only for their weight gradient."""
        # All of them may: nothing prevents gradients from arriving in a row.
        return self.live(shape, rank) if self.splits else 0

    def limit(self, shape: PipelineShape, rank: int) -> int:
        """Return the peak number of microbatches between first forward and last backward on a rank.

        With one virtual stage `in_flight = P` means 1F1B's `P - r` on rank r. A larger value adds the difference on
        every rank; a smaller one caps every rank. With several virtual stages it is `in_flight` on every rank.
        """
        limit = self.in_flight or default_in_flight(shape)
        return limit if shape.virtual_stages > 1 else min(limit, max(limit, shape.pipe) - rank)

    def depth(self, shape: PipelineShape) -> int:
        """Return the number of microbatches in flight on the first rank."""
        return self.limit(shape, 0)


Policy = FixedOrder | ByArrival


def policy_of(name: str, in_flight: int = 0, split: bool = True) -> Policy:
    """Return a policy by its name.

    Args:
        name: "message" or a name in `FIXED`.
        in_flight: Microbatches in flight under "message".
        split: True if "message" may split backwards.

    Raises:
        UserError: The name is unknown.
    """
    if name == "message":
        return ByArrival(in_flight, split)
    if name not in FIXED:
        names = ("message", *FIXED)
        raise UserError("pipeline.policy", name, f"one of {', '.join(names)}{nearest(name, names)}")
    return FIXED[name]


def may_split(split: bool, activations: str | None) -> bool:
    """Return True if the message-driven policy may split backwards.

    Args:
        split: The user's setting.
        activations: Activation policy of all layers.
    """
    # A deferred weight gradient would hold on to everything that another policy has recomputed.
    return split and activations == "none"


def default_in_flight(shape: PipelineShape) -> int:
    """Return the default number of microbatches in flight under the message-driven policy."""
    # One virtual stage: half as many again as 1F1B. If messages take any time at all, be it a fiftieth of a forward,
    # 1F1B's P costs up to 4 % of a step (P = 8); more than this gains little until they take half a forward.
    # Several: two groups of the interleaved order. More would fill the memory with first chunks whenever stage 0 has
    # time.
    return shape.pipe + shape.pipe // 2 if shape.virtual_stages == 1 else 2 * shape.pipe


def _gpipe(shape: PipelineShape, rank: int) -> list[Task]:
    """Return all forwards, then all backwards (Huang et al. 2019)."""
    return _in_pairs(shape, rank, group=shape.microbatches, warm_up=shape.pairs)


def _one_f_one_b(shape: PipelineShape, rank: int) -> list[Task]:
    """Return 1F1B (PipeDream-Flush), interleaved for several virtual stages (Megatron-LM; Narayanan et al. 2021)."""
    return _in_pairs(shape, rank, group=shape.group, warm_up=_warm_up(shape, rank))


def _zero_bubble(shape: PipelineShape, rank: int) -> list[Task]:
    """Return ZB-H1 (Qi et al. 2024, Zero Bubble Pipeline Parallelism)."""
    return _split(_one_f_one_b(shape, rank), spare=_peak(shape, 0) - _peak(shape, rank))


def _warm_up(shape: PipelineShape, rank: int) -> int:
    """Return the number of forwards before the first forward-backward pair (Megatron-LM)."""
    if shape.virtual_stages == 1:
        return shape.pipe - rank - 1
    return 2 * (shape.pipe - rank - 1) + (shape.virtual_stages - 1) * shape.pipe


def _peak(shape: PipelineShape, rank: int) -> int:
    return _warm_up(shape, rank) + 1  # the warm-up's activations and the first pair's


def _alive(shape: PipelineShape, rank: int) -> int:
    return min(shape.pairs, _peak(shape, rank))  # a short step never reaches the peak


def _deferred(shape: PipelineShape, rank: int) -> int:
    """Return the peak number of weight gradients that ZB-H1 defers on a rank."""
    # A rank may defer as many as it has fewer activations than rank 0, and one more while the next of them starts.
    return _peak(shape, 0) - _peak(shape, rank) + 1


def _in_pairs(shape: PipelineShape, rank: int, *, group: int, warm_up: int) -> list[Task]:
    """Return `warm_up` forwards, then alternating forwards and backwards, then the remaining backwards.

    Microbatches pass the virtual stages in groups.
    """
    pipe, chunks = shape.pipe, shape.virtual_stages
    # Build the order for a multiple of `group` microbatches and drop the tasks of those that do not exist. The order
    # stays feasible, since a task depends only on tasks of the same microbatch.
    total = -(-shape.microbatches // group) * group * chunks
    forwards, backwards = [], []
    for number in range(total):
        full_groups, index = divmod(number, group * chunks)
        chunk, microbatch = index // group, full_groups * group + index % group
        forwards.append(Task(Kind.FORWARD, chunk * pipe + rank, microbatch))
        backwards.append(Task(Kind.BACKWARD, (chunks - 1 - chunk) * pipe + rank, microbatch))
    warm_up = min(total, warm_up)
    order = forwards[:warm_up]
    for forward, backward in zip(forwards[warm_up:], backwards, strict=False):
        order += (forward, backward)
    order += backwards[total - warm_up :]
    return [task for task in order if task.microbatch < shape.microbatches]


def _split(order: list[Task], spare: int) -> list[Task]:
    """Split backwards; weight gradients lag by up to `spare` activations and fill the end of the step (ZB-H1)."""
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


_SINGLE_STAGE = 'pipeline.policy "1f1b" has 1; "interleaved" is the 1F1B order for more'
FIXED = {
    "gpipe": FixedOrder(_gpipe, lambda shape, rank: shape.pairs),
    "1f1b": FixedOrder(_one_f_one_b, _alive, one_stage=_SINGLE_STAGE),
    "interleaved": FixedOrder(_one_f_one_b, _alive),
    "zero-bubble": FixedOrder(_zero_bubble, lambda shape, rank: _alive(shape, 0), late=_deferred),
}
"""Policies with a fixed order, by name."""
