"""Policies: fixed task orders (GPipe, 1F1B, interleaved 1F1B, ZB-H1), or arrivals; the activations each keeps alive."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Literal

from axonn_jax.errors import UserError, nearest
from axonn_jax.schedule.tasks import Kind, PipelineShape, Task

Backwards = Literal["whole", "split", "both"]
"""Forms of a step's backward passes: one task, two tasks (input and weight gradients), or either."""


@dataclass(frozen=True)
class FixedOrder:
    """Policy under which each rank runs a list of tasks.

    An activation is born when its forward starts and dies when its backward (the weight part of a split one) has
    finished.
    """

    order: Callable[[PipelineShape, int], list[Task]]
    """Returns every task of a rank in the order in which they run."""
    live: Callable[[PipelineShape, int], int]
    """Returns the greatest number of activations, as (stage, microbatch) pairs, that a rank keeps alive."""
    late: Callable[[PipelineShape, int], int] | None = None
    """Returns the greatest number of activations that wait for their weight gradient alone; None: all that live."""
    one_stage: str = ""
    """Refusal of virtual stages; empty: a rank may have any number of stages."""

    @cached_property
    def splits(self) -> bool:
        """True if gradients of weights are tasks of their own."""
        return any(task.kind is Kind.BACKWARD_WEIGHT for task in self.order(PipelineShape(1, 1), 0))

    def check(self, shape: PipelineShape) -> None:
        """Raise ``UserError`` if the policy cannot run with this many virtual stages."""
        if self.one_stage and shape.virtual_stages > 1:
            raise UserError("pipeline.virtual_stages", shape.virtual_stages, self.one_stage)

    def backwards(self, shape: PipelineShape) -> Backwards:
        """Return the form of the backwards."""
        del shape
        return "split" if self.splits else "whole"

    def joins(self, shape: PipelineShape) -> bool:
        """Return True if the last stage runs every forward and its backward (or input gradient) as one program.

        It is so where a rank has one stage, and every forward of the last one is followed by its backward.
        """
        last = self.order(shape, shape.rank_of(shape.last)) if shape.virtual_stages == 1 else ()
        pairs = [(task, after) for task, after in pairwise(last) if task.kind is Kind.FORWARD]
        return bool(pairs) and all(task.microbatch == after.microbatch for task, after in pairs)

    def waiting(self, shape: PipelineShape, rank: int) -> int:
        """Return the greatest number of `live` activations that wait for their weight gradient alone."""
        live = self.live(shape, rank) if self.splits else 0
        return live if self.late is None else min(live, self.late(shape, rank))

    def depth(self, shape: PipelineShape) -> int:
        """Return the number of microbatches in flight on the first rank.

        Of a rank's stages the deepest is left first: on average a microbatch keeps (V + 1) / 2 activations.
        """
        return min(shape.microbatches, -(-2 * self.live(shape, 0) // (shape.virtual_stages + 1)))


@dataclass(frozen=True)
class ByArrival:
    """Policy under which the arrival of inputs decides; `message_driven` has the rule.

    Raises ``UserError`` for a number in flight below 0.
    """

    in_flight: int = 0
    """Microbatches between their first forward and their last backward (see `limit`); 0: `default_in_flight`."""
    splits: bool = True
    """True if gradients of weights may be tasks of their own."""
    one_stage = ""  # any number of virtual stages

    def __post_init__(self) -> None:
        if self.in_flight < 0:
            raise UserError("pipeline.in_flight", self.in_flight, "at least 1, or 0 for the default")

    def check(self, shape: PipelineShape) -> None:
        """Accept every shape."""

    def backwards(self, shape: PipelineShape) -> Backwards:
        """Return the form of the backwards."""
        some_whole = shape.virtual_stages == 1 and shape.microbatches > shape.pipe
        return ("both" if some_whole else "split") if self.splits else "whole"

    def joins(self, shape: PipelineShape) -> bool:
        """Return True if the last stage runs every forward and its backward (or input gradient) as one program."""
        return shape.virtual_stages == 1

    def within(self, shape: PipelineShape, room: int) -> "ByArrival":
        """Return the policy with a default that has memory for `room` microbatches more than 1F1B's.

        With several virtual stages the default needs no more memory than the interleaved order.
        """
        if self.in_flight or shape.virtual_stages > 1:
            return self
        return replace(self, in_flight=min(default_in_flight(shape), shape.pipe + room))

    def live(self, shape: PipelineShape, rank: int) -> int:
        """Return the greatest number of activations, as (stage, microbatch) pairs, that a rank keeps alive.

        `min(M V, in_flight V)`; with `in_flight` left at 0, `P + P // 2` for V = 1, else zero-bubble's. Fused backwards
        with V = 1 keep no more than `limit`. With `in_flight = P` and one virtual stage no more than the best fixed
        order that competes; with several so unless `in_flight` says otherwise.
        """
        if shape.virtual_stages == 1 and not self.splits:
            return min(shape.pairs, self.limit(shape, rank))
        if self.in_flight or shape.virtual_stages == 1:
            return min(shape.pairs, self.depth(shape) * shape.virtual_stages)
        return min(shape.pairs, _peak(shape, 0))

    def waiting(self, shape: PipelineShape, rank: int) -> int:
        """Return the greatest number of `live` activations that wait for their weight gradient alone.

        All of them may: gradients may come in one after the other.
        """
        return self.live(shape, rank) if self.splits else 0

    def limit(self, shape: PipelineShape, rank: int) -> int:
        """Return the greatest number of microbatches between first forward and last backward on a rank.

        With one virtual stage `in_flight = P` is 1f1b's `P - r`; a larger one adds the difference on every rank, below
        P it caps every rank. With several it is `in_flight` on every rank. (More than two groups would fill the memory
        with first chunks whenever stage 0 has time.)
        """
        limit = self.in_flight or default_in_flight(shape)
        return limit if shape.virtual_stages > 1 else min(limit, max(limit, shape.pipe) - rank)

    def depth(self, shape: PipelineShape) -> int:
        """Return the number of microbatches in flight on the first rank."""
        return self.limit(shape, 0)


Policy = FixedOrder | ByArrival


def policy_of(name: str, in_flight: int = 0, split: bool = True) -> Policy:
    """Return the policy of a name; `in_flight` and `split` are those of `ByArrival`.

    Raises:
        UserError: the name is unknown.
    """
    if name == "message":
        return ByArrival(in_flight, split)
    if name not in FIXED:
        names = ("message", *FIXED)
        raise UserError("pipeline.policy", name, f"one of {', '.join(names)}{nearest(name, names)}")
    return FIXED[name]


def may_split(asked: bool, activations: str | None) -> bool:
    """Return True if the message-driven policy may split backwards under the activation policy of all layers.

    A gradient of weights that waited would keep all that such a policy has computed again.
    """
    return asked and activations == "none"


def default_in_flight(shape: PipelineShape) -> int:
    """Return the default number of microbatches in flight under the message-driven policy.

    With one virtual stage half as many again as 1F1B: where messages take any time at all, be it a fiftieth of a
    forward, 1F1B's P cost up to 4 % of a step (P = 8), and more than this gain little until they take half a forward.
    With several, 2 P: two groups of the interleaved order.
    """
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
    """Number of forwards before the first forward-backward pair (Megatron-LM)."""
    if shape.virtual_stages == 1:
        return shape.pipe - rank - 1
    return 2 * (shape.pipe - rank - 1) + (shape.virtual_stages - 1) * shape.pipe


def _peak(shape: PipelineShape, rank: int) -> int:
    """Number of activations alive at once in the 1F1B orders: the warm-up's and the first pair's."""
    return _warm_up(shape, rank) + 1


def _alive(shape: PipelineShape, rank: int) -> int:
    """Return the activations that the 1F1B orders keep alive, of shorter steps too."""
    return min(shape.pairs, _peak(shape, rank))


def _held_back(shape: PipelineShape, rank: int) -> int:
    """Return the weight gradients that ZB-H1 holds back on a rank: as many as it has fewer activations than rank 0, and
    one more when the next of them starts."""
    return _peak(shape, 0) - _peak(shape, rank) + 1


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


_WHY_ONE = 'pipeline.policy "1f1b" has 1; "interleaved" is the 1F1B order for more'
FIXED = {
    "gpipe": FixedOrder(_gpipe, lambda shape, rank: shape.pairs),
    "1f1b": FixedOrder(_one_f_one_b, _alive, one_stage=_WHY_ONE),
    "interleaved": FixedOrder(_one_f_one_b, _alive),
    "zero-bubble": FixedOrder(_zero_bubble, lambda shape, rank: _alive(shape, 0), late=_held_back),
}
"""Policies with a fixed order, by name."""
