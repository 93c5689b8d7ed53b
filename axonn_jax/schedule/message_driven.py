"""The message-driven rule: which of the ready tasks a rank starts (AxoNN, IPDPS 22, with split backwards)."""

import heapq
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterator

from axonn_jax.errors import UserError
from axonn_jax.schedule.policies import in_flight_limit, live_bound
from axonn_jax.schedule.tasks import Kind, Layout, Message, Task


class MessageDriven:
    """The ready tasks of one rank, and the choice among them.

    Whatever has arrived decides; there is no fixed order. Among the ready:

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

    Three limits hold forwards back. A rank holds at most `live_bound` activations. A microbatch enters a rank only
    while fewer than `in_flight_limit` are between their first forward and the start of their last backward there.
    AxoNN has that limit on stage 0 only; but a rank that ran ahead of 1F1B's depth would often be in the middle of a
    forward when a backward comes, up to 10 % longer where messages take constant time. With V > 1, a forward of any
    but the oldest microbatch (the first with forwards left to run here) leaves room for all V activations of that one:
    those in flight of younger ones never exceed `live_bound - V`.

    Known weakness: with V = 1, `in_flight = P` and messages that all take the same noticeable time, ZB-H1 is up to 6 %
    shorter, since its order keeps weight gradients back where a backward is about to come, and a rank that goes by what
    has arrived cannot know. Half as many again in flight, the default, make up for it.

    It cannot deadlock. A backward is held back by nothing, a weight gradient neither.

    V = 1: in-flight limits are at most the memory bounds, so a forward whose input is there waits for weight gradients,
    which run, or because its rank has reached its in-flight limit. On the deepest rank where that happens, nothing
    deeper is held back, so a backward comes and makes room.

    V > 1: take the first microbatch m whose last backward has not started. Those before it have started all their
    forwards and backwards on every rank. Either m has not entered: then nothing is in flight, and it may. Or its next
    task has its message there or on the way. If that is a forward, m is the oldest microbatch of that rank; if the
    memory is full, either a weight gradient waits, which runs and frees some, or all that is alive is in flight: at
    most V - 1 activations of m and live_bound - V of younger ones, which is less than live_bound. So it starts.
    """

    def __init__(self, layout: Layout, rank: int, in_flight: int, split: bool):
        if in_flight < 0:
            raise UserError("pipeline.in_flight", in_flight, "at least 1, or 0 for the default")
        self._layout, self._rank, self._split = layout, rank, split
        self._bound = live_bound("message", layout, rank, in_flight, split)
        self._limit = in_flight_limit(layout, rank, in_flight)
        # Ready tasks as (group, place of the chunk in it, microbatch, stage), the next one first.
        self._forwards: list[tuple[int, int, int, int]] = []
        self._backwards: list[tuple[int, int, int, int]] = []
        self._weights: deque[tuple[int, int]] = deque()
        # The same of tasks whose input has not come: all forwards, and the backwards of those that have started.
        self._forwards_due = sorted(
            (microbatch // layout.pipe, stage, microbatch, stage)
            for stage in layout.stages_of(rank)
            for microbatch in range(layout.microbatches if stage else 0)
        )
        self._backwards_due: list[tuple[int, int, int, int]] = []
        self._forward_was_last = False
        self._held = 0  # activations alive on the device once everything started has run
        self._entered = self._left = 0  # microbatches that started their first forward here, and their last backward
        # By microbatch: forwards started here, and those of them whose backward has not started.
        self._forwards_started = [0] * layout.microbatches
        self._in_flight = [0] * layout.microbatches
        self._oldest = 0  # the first microbatch with forwards left to run here
        self._younger = 0  # activations in flight of the microbatches after it
        if rank == 0:
            self.forward_ready(0, 0)

    def forward_ready(self, stage: int, microbatch: int) -> None:
        """Takes note that a forward has its input."""
        entry = (microbatch // self._layout.pipe, stage, microbatch, stage)
        heapq.heappush(self._forwards, entry)
        if stage != 0:
            del self._forwards_due[bisect_left(self._forwards_due, entry)]

    def backward_ready(self, stage: int, microbatch: int) -> None:
        """Takes note that a backward has its input. Raises ``ValueError`` before its forward has started."""
        entry = (microbatch // self._layout.pipe, -stage, microbatch, stage)
        if stage != self._layout.last:
            place = bisect_left(self._backwards_due, entry)
            if self._backwards_due[place : place + 1] != [entry]:
                raise ValueError(
                    f"a gradient for stage {stage}, microbatch {microbatch}, whose forward has not started"
                )
            del self._backwards_due[place]
        heapq.heappush(self._backwards, entry)

    def choose(self) -> Task | None:
        """Returns the task to start now, and counts it as started; None if there is none to start.

        A forward on the last stage makes its backward ready at once.
        """
        forward = self._next_forward()
        if forward is not None and self._held >= self._bound:
            if self._weights and not (self._backwards and self._forward_was_last):
                return self._start_weight()
            forward = None
        if forward is not None and not (self._backwards and self._forward_was_last):
            return self._start_forward(forward)
        if self._backwards:
            return self._start_backward()
        return self._start_weight() if self._weights else None

    def missing(self) -> Iterator[Message]:
        """Yields the messages any of which would let this rank start a task, most urgent first, found one by one."""
        room = self._held < self._bound
        if self._backwards or self._weights or (room and self._next_forward() is not None):
            return
        yield from (Message("backward", stage, microbatch) for _, _, microbatch, stage in self._backwards_due)
        if not room or (self._layout.virtual_stages == 1 and not self._may_start(self._rank, self._oldest)):
            return
        due = self._forwards_due
        if not self._allows_young():  # the oldest one's come first, but for those of others in its group
            group = self._oldest // self._layout.pipe
            due = due[bisect_left(due, (group,)) : bisect_left(due, (group + 1,))]
        for _, _, microbatch, stage in due:
            if self._may_start(stage, microbatch):
                yield Message("forward", stage, microbatch)

    def _may_start(self, stage: int, microbatch: int) -> bool:
        """Whether a forward is within the limits, given memory for one more activation."""
        if stage < self._layout.pipe and self._entered - self._left >= self._limit:
            return False
        return microbatch == self._oldest or self._allows_young()

    def _allows_young(self) -> bool:
        """Whether forwards of other than the oldest microbatch leave room for that one."""
        chunks = self._layout.virtual_stages
        return chunks == 1 or self._younger + chunks < self._bound

    def _next_forward(self) -> int | None:
        """The place in the heap of the first ready forward that may start, given memory for it."""
        if self._forwards and self._may_start(*self._forwards[0][:1:-1]):
            return 0
        places = [place for place, entry in enumerate(self._forwards) if self._may_start(*entry[:1:-1])]
        return min(places, key=self._forwards.__getitem__) if places else None

    def _start_forward(self, place: int) -> Task:
        _, _, microbatch, stage = self._forwards[place]
        if place == 0:
            heapq.heappop(self._forwards)
        else:
            del self._forwards[place]
            heapq.heapify(self._forwards)
        self._forward_was_last = True
        self._held += 1
        self._in_flight[microbatch] += 1
        self._forwards_started[microbatch] += 1
        self._younger += microbatch > self._oldest
        while self._forwards_started[self._oldest] == self._layout.virtual_stages:
            self._oldest += 1
            if self._oldest == self._layout.microbatches:
                break
            self._younger -= self._in_flight[self._oldest]
        self._entered += stage < self._layout.pipe
        if stage == 0 and microbatch + 1 < self._layout.microbatches:
            self.forward_ready(0, microbatch + 1)
        if stage == self._layout.last:
            self.backward_ready(stage, microbatch)
        else:
            insort(self._backwards_due, (microbatch // self._layout.pipe, -stage, microbatch, stage))
        return Task(Kind.FORWARD, stage, microbatch)

    def _start_backward(self) -> Task:
        _, _, microbatch, stage = heapq.heappop(self._backwards)
        self._forward_was_last = False
        self._in_flight[microbatch] -= 1
        self._younger -= microbatch > self._oldest
        self._left += stage < self._layout.pipe
        late = microbatch >= self._layout.microbatches - self._layout.pipe
        if self._split and (late or self._layout.virtual_stages > 1 or self._held < self._bound):
            self._weights.append((stage, microbatch))
            return Task(Kind.BACKWARD_INPUT, stage, microbatch)
        self._held -= 1
        return Task(Kind.BACKWARD, stage, microbatch)

    def _start_weight(self) -> Task:
        self._held -= 1
        return Task(Kind.BACKWARD_WEIGHT, *self._weights.popleft())
