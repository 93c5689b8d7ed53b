"""Message-driven dispatcher: choice among the ready tasks of a rank (AxoNN, IPDPS 22, with split backwards)."""

import heapq
from collections import deque
from collections.abc import Iterator
from itertools import islice

from axonn_jax.schedule.dispatcher import OrderedDispatcher
from axonn_jax.schedule.policies import ByArrival, Policy
from axonn_jax.schedule.tasks import Kind, Message, PipelineShape, Task

_FORWARD, _WHOLE, _INPUT, _WEIGHT = Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT

_FEW = 8
"""Missing messages that a dispatcher names at most."""
_Ready = tuple[int, int, int]


class ArrivalDispatcher(OrderedDispatcher):
    """Dispatcher that chooses among the ready tasks of one rank; the same calls in the same order, the same choices.

    Arrivals decide; there is no fixed order. Among the ready:

    1. Forwards and backwards take turns where both are ready; otherwise the one that is ready runs. AxoNN's first stage
       injects after each backward in the same way. Were backwards always first, the ranks behind one with a queue of
       them would run dry: up to 7 % longer without jitter.
    2. Weight gradients run when nothing else is ready, oldest first, and before a forward that needs their memory.
       Where the memory is full already, nothing could be held back for long: with V = 1 the backward then runs in one
       task, which costs less than its two parts (5 to 7 % less on a CPU). The last `pipe` microbatches are always
       split, since their weight gradients fill the end of the step. In virtual time that is never longer without
       jitter even where the parts cost no more; with V > 1 it was up to 3 % longer, so there all are split.
    3. Microbatches go by groups of `pipe`. In a group, forwards go chunk by chunk from the shallowest, backwards from
       the deepest. Without jitter this is the interleaved order.

    Three limits hold forwards back. A rank holds at most `ByArrival.live` activations. A microbatch enters a rank only
    while fewer than `ByArrival.limit` are between their first forward and the start of their last backward there.
    AxoNN has that limit on stage 0 only; but a rank that ran ahead of 1F1B's depth would often be in the middle of a
    forward when a backward comes, up to 10 % longer where messages take constant time. With V > 1, a forward of any
    but the oldest microbatch (the first with forwards left to run here) leaves room for all V activations of that one:
    those in flight of younger ones never exceed `live - V`.

    Known weakness: with V = 1, `in_flight = P` and messages that all take the same noticeable time, ZB-H1 is up to 6 %
    shorter, since its order keeps weight gradients back where a backward is about to come, and a rank that goes by
    arrivals cannot know. Half as many again in flight, the default, make up for it.

    It cannot deadlock. A backward is held back by nothing, a weight gradient neither.

    V = 1: in-flight limits are at most the memory bounds, so a forward whose input is there waits for weight gradients,
    which run, or because its rank has reached its in-flight limit. On the deepest rank where that happens, nothing
    deeper is held back, so a backward comes and makes room.

    V > 1: take the first microbatch m whose last backward has not started. Those before it have started all their
    forwards and backwards on every rank. Either m has not entered: then nothing is in flight, and it may. Or its next
    task has its message there or on the way. If that is a forward, m is the oldest microbatch of that rank; if the
    memory is full, either a weight gradient waits, which runs and frees some, or all that is alive is in flight: at
    most V - 1 activations of m and live - V of younger ones, which is less than live. So it starts.
    """

    def __init__(self, shape: PipelineShape, rank: int, policy: ByArrival):
        super().__init__(shape, rank)
        self._split, self._microbatches = policy.splits, shape.microbatches
        self._chunks, self._deepest = shape.virtual_stages, shape.last
        self._bound, self._limit = policy.live(shape, rank), policy.limit(shape, rank)
        # Ready tasks as (group, stage, microbatch), backwards with minus the stage, the next one first.
        self._forwards: list[_Ready] = []
        self._backwards: list[_Ready] = []
        self._weights: deque[tuple[int, int]] = deque()
        # By chunk and microbatch: whether a forward has its input; backwards that wait for theirs.
        self._received = [bytearray(shape.microbatches) for _ in range(self._chunks)]
        self._backwards_due: set[_Ready] = set()
        self._forward_was_last = False
        self._held = 0  # activations alive on the device once everything started has run
        self._inside = 0  # microbatches that started their first forward here, and not their last backward
        # By microbatch: forwards started here, and those of them whose backward has not started.
        self._forwards_started = [0] * shape.microbatches
        self._in_flight = [0] * shape.microbatches
        self._oldest = 0  # the first microbatch with forwards left to run here
        self._younger = 0  # activations in flight of the microbatches after it
        if rank == 0:
            self._forward_ready(0, 0)

    def append(self, task: Task) -> None:
        """Raise ``ValueError``: this dispatcher takes no order from outside."""
        raise ValueError(f"rank {self.rank}: {task} from outside, but this rank chooses by itself")

    def arrived(self, message: Message) -> None:
        """Record that an input has arrived.

        Raises ``ValueError`` for a message that came before, is for nobody here, or is a gradient before its forward.
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
        """Return the task to start now, counted as started; None if there is none to start."""
        task = self._choose()
        return None if task is None else self._start(task)

    def waiting_for(self) -> list[Message]:
        """Return the first few messages any of which would let this rank start a task, most urgent first.

        A rank asks whenever it has nothing to do, and shows one.
        """
        return list(islice(self._missing(), _FEW))

    def _forward_ready(self, stage: int, microbatch: int) -> None:
        received = self._received[stage // self._pipe]
        if received[microbatch]:
            raise ValueError(f"the input of stage {stage}, microbatch {microbatch}, arrived twice")
        received[microbatch] = True
        heapq.heappush(self._forwards, (microbatch // self._pipe, stage, microbatch))

    def _choose(self) -> Task | None:
        """Return the task to start now; a forward on the last stage makes its backward ready at once."""
        if self._backwards and self._forward_was_last:
            return self._start_backward()
        if self._forwards and (forward := self._next_forward()) is not None:
            if self._held < self._bound:
                return self._start_forward(forward)
            if self._weights:
                return self._start_weight()
        if self._backwards:
            return self._start_backward()
        return self._start_weight() if self._weights else None

    def _missing(self) -> Iterator[Message]:
        """Yield the messages any of which would let this rank start a task, most urgent first, found one by one."""
        room = self._held < self._bound
        if self._backwards or self._weights or (room and self._forwards and self._next_forward() is not None):
            return
        yield from (Message("backward", -stage, microbatch) for _, stage, microbatch in sorted(self._backwards_due))
        inside, young = self._inside < self._limit, self._allows_young()
        if not room or (self._chunks == 1 and not inside):
            return
        # Of all microbatches before the oldest every forward has started. With room for that one alone no other counts.
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
        """Return True if forwards of other than the oldest microbatch leave room for that one."""
        return self._chunks == 1 or self._younger + self._chunks < self._bound

    def _next_forward(self) -> int | None:
        """Return the index in the heap of the first ready forward that may start, given memory for it."""
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
        self._held += 1
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
            heapq.heappush(self._backwards, (group, -stage, microbatch))
        else:
            self._backwards_due.add((group, -stage, microbatch))
        return Task(_FORWARD, stage, microbatch)

    def _next_oldest(self) -> None:
        """Go on to the first microbatch with forwards left to run here."""
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
        if self._split and (late or self._chunks > 1 or self._held < self._bound):
            self._weights.append((stage, microbatch))
            return Task(_INPUT, stage, microbatch)
        self._held -= 1
        return Task(_WHOLE, stage, microbatch)

    def _start_weight(self) -> Task:
        self._held -= 1
        return Task(_WEIGHT, *self._weights.popleft())


def dispatcher_of(shape: PipelineShape, rank: int, policy: Policy) -> OrderedDispatcher:
    """Return the dispatcher that chooses the tasks of one rank by a policy.

    Raises:
        UserError: the policy cannot run with this shape.
    """
    policy.check(shape)
    if isinstance(policy, ByArrival):
        return ArrivalDispatcher(shape, rank, policy)
    return OrderedDispatcher(shape, rank, policy.order(shape, rank))
