"""A pipelined step in virtual time, run by the dispatchers that run the real one."""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from axonn_jax.schedule.dispatcher import Dispatcher, Follower
from axonn_jax.schedule.policies import Policy
from axonn_jax.schedule.tasks import Layout, Message, Task, sends

_TOLD = 4096
"""Tasks between two calls of `told`."""


@dataclass(frozen=True, slots=True)
class Span:
    """One task on the time line of its rank; times in the unit of the task times."""

    task: Task
    """What ran."""
    rank: int
    """Where it ran."""
    start: float
    """When it began."""
    end: float
    """When it was done."""


@dataclass(frozen=True)
class Simulation:
    """What came out of a simulated step; times in the unit of the task times."""

    layout: Layout
    """What was simulated."""
    spans: list[Span] = field(repr=False)
    """Every task, in the order of their ends."""
    makespan: float
    """From the first start to the last end."""
    busy: list[float]
    """By rank, the time in which it computed."""
    peak_live: list[int]
    """By rank, the most activations alive at once, in (stage, microbatch) pairs."""

    @property
    def no_bubble(self) -> float:
        """The makespan of a pipeline that never waits: the work of the busiest rank."""
        return max(self.busy)

    @property
    def idle_fraction(self) -> float:
        """Share of all ranks' time in which they did not compute."""
        return 1.0 - sum(self.busy) / (self.makespan * self.layout.pipe) if self.makespan > 0 else 0.0


def simulate(
    layout: Layout,
    policy: Policy,
    *,
    task_time: Callable[[Task], float],
    message_time: Callable[[Message], float],
    in_flight: int = 0,
    split: bool = True,
    told: Callable[[int], None] | None = None,
) -> Simulation:
    """Runs one step under a policy in virtual time; `task_time` and `message_time` are asked once for each.

    `told` is called with the number of tasks done every few thousand of them.

    A rank runs one task at a time, and chooses it when the one before has ended; a message is on its way for its time
    and takes none of its sender's. What happens at one instant is told to all ranks before any of them chooses.

    Raises:
        UserError: the policy cannot run with this layout.
        RuntimeError: the ranks wait for each other; the message has the state of every rank.
    """
    ranks = [Dispatcher(layout, rank, policy, in_flight, split) for rank in range(layout.pipe)]
    return drive(ranks, task_time=task_time, message_time=message_time, told=told)


def drive(
    ranks: Sequence[Follower],
    *,
    task_time: Callable[[Task], float],
    message_time: Callable[[Message], float],
    told: Callable[[int], None] | None = None,
) -> Simulation:
    """Runs one step of the given dispatchers or followers, one a rank, as `simulate` does."""
    layout = ranks[0].layout
    spans: list[Span] = []
    busy, peak, idle = [0.0] * layout.pipe, [0] * layout.pipe, [True] * layout.pipe
    # (time, serial number, rank, what ended or arrived there); the number keeps ties in the order of their causes.
    events: list[tuple[float, int, int, Span | Message]] = []
    now, serial = 0.0, 0
    concerned = set(range(layout.pipe))
    while True:
        for rank in sorted(concerned):
            task = ranks[rank].next() if idle[rank] else None
            if task is None:
                continue
            idle[rank] = False
            duration = task_time(task)
            busy[rank] += duration
            peak[rank] = max(peak[rank], ranks[rank].live)
            serial += 1
            heapq.heappush(events, (now + duration, serial, rank, Span(task, rank, now, now + duration)))
        if not events:
            break
        now = events[0][0]
        concerned.clear()
        while events and events[0][0] == now:
            _, _, rank, event = heapq.heappop(events)
            concerned.add(rank)
            if isinstance(event, Message):
                ranks[rank].arrived(event)
                continue
            spans.append(event)
            if told is not None and len(spans) % _TOLD == 0:
                told(len(spans))
            ranks[rank].finished(event.task)
            idle[rank] = True
            message = sends(event.task, layout)
            if message is not None:
                serial += 1
                arrival = (now + message_time(message), serial, layout.rank_of(message.stage), message)
                heapq.heappush(events, arrival)
    if not all(rank.done for rank in ranks):
        raise RuntimeError("the ranks wait for each other: " + "; ".join(map(_state, ranks)))
    return Simulation(layout, spans, now, busy, peak)


def _state(rank: Follower) -> str:
    state = f"rank {rank.rank}: {rank.started} tasks started, {rank.live} activations alive"
    if rank.done:
        return f"{state}, done"
    waiting = rank.waiting_for()
    first = f"waits for {waiting[0]}" if waiting else f"blocked at {rank.blocked}" if rank.blocked else "told no more"
    return f"{state}, {first}" + (" or another" if len(waiting) > 1 else "")
