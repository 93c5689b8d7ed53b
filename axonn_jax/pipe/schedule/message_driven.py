"""Message-driven dispatcher, which picks among the ready tasks of a rank (AxoNN, IPDPS 22, with split backwards)."""

import heapq
from collections import deque
from collections.abc import Iterator
from itertools import islice

from axonn_jax.pipe.schedule.dispatcher import OrderedDispatcher
from axonn_jax.pipe.schedule.policies import ByArrival, Policy
from axonn_jax.pipe.schedule.tasks import Kind, Message, PipelineShape, Task

_FORWARD, _BACKWARD, _INPUT, _WEIGHT = Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT

_MAX_REPORTED = 8
"""Largest number of missing messages that a dispatcher names."""
_Ready = tuple[int, int, int]


class ArrivalDispatcher(OrderedDispatcher):
    """Dispatcher that picks among the ready tasks of one rank.

    There is no fixed order: arrivals decide. It is deterministic in the sequence of calls. P is `pipe`, V is
    `virtual_stages`. Among the ready tasks:

    1. Forwards and backwards alternate while both are ready; otherwise whichever is ready runs. AxoNN's first stage
       injects after each backward in the same way. If backwards always came first, ranks downstream of a queue of them
       would run dry: up to 7 % longer without jitter.
    2. Weight gradients run when nothing else is ready, oldest first, and before a forward that needs their memory.
       Once the memory is full they could not be deferred for long: with V = 1 the backward then runs as one task,
       which costs less than its two parts (5 to 7 % less on a CPU). The last P microbatches are always split, since
       their weight gradients fill the end of the step. In virtual time that is never longer without jitter, even if
       the parts cost no more; with V > 1 it was up to 3 % longer, so there all are split.
    3. Microbatches run in groups of P. Within a group, forwards run chunk by chunk from the shallowest, backwards from
       the deepest. Without jitter this is the interleaved order.

    Three limits delay forwards. A rank holds at most `ByArrival.live` activations. A microbatch enters a rank only
    while fewer than `ByArrival.limit` are between their first forward and the start of their last backward there.
    AxoNN has that limit on stage 0 only, but a rank that runs ahead of 1F1B's depth is often in the middle of a
    forward when a backward arrives: up to 10 % longer if messages take constant time. With V > 1, a forward of any but
    the oldest microbatch (the first with forwards yet to run here) leaves room for all V activations of the oldest:
    activations in flight of younger ones never exceed `live - V`.

    Known weakness: with V = 1, `in_flight = P` and messages that all take the same noticeable time, ZB-H1 is up to 6 %
    shorter. Its order defers weight gradients when a backward is about to arrive, which a rank that goes by arrivals
    cannot know. The default, half as many microbatches again in flight, makes up for it.

    It cannot deadlock. Nothing delays a backward or a weight gradient.

    V = 1: in-flight limits are at most the memory bounds. A forward whose input has arrived therefore waits either for
    weight gradients, which run, or because its rank has reached its in-flight limit. On the deepest rank where that
    happens, nothing deeper is delayed, so a backward arrives and makes room.

    V > 1: take the first microbatch m whose last backward has not started. Earlier ones have started all their
    forwards and backwards on every rank. If m has not entered, nothing is in flight and it may enter. Otherwise the
    message of its next task has arrived or is on its way. If that task is a forward, m is the oldest microbatch of
    that rank. If the memory is full, either a weight gradient waits, which runs and frees some, or all live activations
    are in flight: at most V - 1 of m and live - V of younger ones, which is less than live. So the task starts.
    """

    def __init__(self, shape: PipelineShape, rank: int, policy: ByArrival):
        super().__init__(shape, rank)
        self._split, self._microbatches = policy.splits, shape.microbatches
        self._chunks, self._deepest = shape.virtual_stages, shape.last
        self._bound, self._limit = policy.live(shape, rank), policy.limit(shape, rank)
        # Heaps of ready tasks as (group, stage, microbatch). Backwards negate the stage, so that the deepest is first.
        self._forwards: list[_Ready] = []
        self._backwards: list[_Ready] = []
        self._weights: deque[tuple[int, int]] = deque()
        # By chunk and microbatch: whether a forward's input has arrived. Backwards that wait for their gradient.
        self._received = [bytearray(shape.microbatches) for _ in range(self._chunks)]
        self._backwards_due: set[_Ready] = set()
        self._forward_was_last = False
        self._alive = 0  # live activations on the device once everything started has run
        self._inside = 0  # microbatches between the starts of their first forward and last backward here
        # By microbatch: forwards started here, and how many of their backwards have not started.
        self._forwards_started = [0] * shape.microbatches
        self._in_flight = [0] * shape.microbatches
        self._oldest = 0  # the first microbatch with forwards yet to run here
        self._younger = 0  # activations in flight of the microbatches after the oldest
        if rank == 0:
            self._forward_ready(0, 0)

    def append(self, task: Task) -> None:
        """Raise ``ValueError``: this dispatcher picks its tasks itself."""
        raise ValueError(f"rank {self.rank}: {task} from outside, but this rank chooses by itself")

    def arrived(self, message: Message) -> None:
        """Record that an input has arrived.

        Raises:
            ValueError: The message arrived before, no stage of this rank receives it, or it is a gradient whose forward
                has not started.
        """
        self._check_message(message)
        direction, stage, microbatch = message
        if direction == "forward":
            self._forward_ready(stage, microbatch)
            return
        entry = (microbatch // self._pipe, -stage, microbatch)
        if entry not in self._backwards_due:
            raise ValueError(
                f"a gradient for stage {stage}, microbatch {microbatch}, whose forward has not started, "
                "or which came before"
            )
        self._backwards_due.remove(entry)
        heapq.heappush(self._backwards, entry)

    def next(self) -> Task | None:
        """Return the task to start now and count it as started; None if no task can start."""
        task = self._choose()
        return None if task is None else self._start(task)

    def waiting_for(self) -> list[Message]:
        """Return the first few messages any of which would let this rank start a task, most urgent first."""
        # Called whenever the rank is idle, for a caller that shows one of them: do not enumerate all.
        return list(islice(self._missing(), _MAX_REPORTED))

    def _forward_ready(self, stage: int, microbatch: int) -> None:
        received = self._received[stage // self._pipe]
        if received[microbatch]:
            raise ValueError(f"the input of stage {stage}, microbatch {microbatch}, arrived twice")
        received[microbatch] = True
        heapq.heappush(self._forwards, (microbatch // self._pipe, stage, microbatch))

    def _choose(self) -> Task | None:
        if self._backwards and self._forward_was_last:
            return self._start_backward()
        if self._forwards and (forward := self._next_forward()) is not None:
            if self._alive < self._bound:
                return self._start_forward(forward)
            # The memory is full: a deferred weight gradient frees an activation for the forward.
            if self._weights:
                return self._start_weight()
        if self._backwards:
            return self._start_backward()
        return self._start_weight() if self._weights else None

    def _missing(self) -> Iterator[Message]:
        """Yield the messages any of which would let this rank start a task, most urgent first."""
        room = self._alive < self._bound
        if self._backwards or self._weights or (room and self._forwards and self._next_forward() is not None):
            return
        yield from (Message("backward", -stage, microbatch) for _, stage, microbatch in sorted(self._backwards_due))
        inside, young = self._inside < self._limit, self._allows_young()
        if not room or (self._chunks == 1 and not inside):
            return
        # Microbatches before the oldest have started all their forwards. With room for the oldest
        # only, messages for others would not let a task start.
        groups = range(self._oldest // self._pipe, -(-self._microbatches // self._pipe))
        for group in groups if young else groups[:1]:
            end = min((group + 1) * self._pipe, self._microbatches)
            for chunk, received in enumerate(self._received):
                stage = chunk * self._pipe + self.rank
                if stage == 0 or (chunk == 0 and not inside):
                    continue
                microbatch = received.find(0, group * self._pipe, end)
                while microbatch >= 0:
                    if young or microbatch == self._oldest:
                        yield Message("forward", stage, microbatch)
                    microbatch = received.find(0, microbatch + 1, end)

    def _allows_young(self) -> bool:
        """Return True if a forward of a younger microbatch would leave room for the oldest one."""
        return self._chunks == 1 or self._younger + self._chunks < self._bound

    def _next_forward(self) -> int | None:
        """Return the index in the heap of the first ready forward that may start if memory allows."""
        inside, young = self._inside < self._limit, self._allows_young()
        if inside and young:
            return 0
        if self._chunks == 1:
            return None
        allowed = [
            index
            for index, (_, stage, microbatch) in enumerate(self._forwards)
            if (inside or stage >= self._pipe) and (young or microbatch == self._oldest)
        ]
        return min(allowed, key=self._forwards.__getitem__) if allowed else None

    def _start_forward(self, index: int) -> Task:
        if index == 0:
            group, stage, microbatch = heapq.heappop(self._forwards)
        else:
            group, stage, microbatch = self._forwards.pop(index)
            heapq.heapify(self._forwards)
        self._forward_was_last = True
        self._alive += 1
        self._in_flight[microbatch] += 1
        self._forwards_started[microbatch] += 1
        if microbatch > self._oldest:
            self._younger += 1
        elif self._forwards_started[microbatch] == self._chunks:
            self._next_oldest()
        if stage < self._pipe:
            self._inside += 1
            if stage == 0 and microbatch + 1 < self._microbatches:
                self._forward_ready(0, microbatch + 1)
        if stage == self._deepest:
            # The loss needs no message: the backward is ready as soon as its forward has started.
            heapq.heappush(self._backwards, (group, -stage, microbatch))
        else:
            self._backwards_due.add((group, -stage, microbatch))
        return Task(_FORWARD, stage, microbatch)

    def _next_oldest(self) -> None:
        """Advance to the first microbatch with forwards yet to run here."""
        while self._forwards_started[self._oldest] == self._chunks:
            self._oldest += 1
            if self._oldest == self._microbatches:
                break
            self._younger -= self._in_flight[self._oldest]

    def _start_backward(self) -> Task:
        _, stage, microbatch = heapq.heappop(self._backwards)
        stage = -stage
        self._forward_was_last = False
        self._in_flight[microbatch] -= 1
        if microbatch > self._oldest:
            self._younger -= 1
        if stage < self._pipe:
            self._inside -= 1
        late = microbatch >= self._microbatches - self._pipe
        if self._split and (late or self._chunks > 1 or self._alive < self._bound):
            self._weights.append((stage, microbatch))
            return Task(_INPUT, stage, microbatch)
        self._alive -= 1
        return Task(_BACKWARD, stage, microbatch)

    def _start_weight(self) -> Task:
        self._alive -= 1
        return Task(_WEIGHT, *self._weights.popleft())


def dispatcher_of(shape: PipelineShape, rank: int, policy: Policy) -> OrderedDispatcher:
    """Return the dispatcher of one rank under a policy.

    Raises:
        UserError: The policy cannot run with this shape.
    """
    policy.check(shape)
    if isinstance(policy, ByArrival):
        return ArrivalDispatcher(shape, rank, policy)
    return OrderedDispatcher(shape, rank, policy.order(shape, rank))
