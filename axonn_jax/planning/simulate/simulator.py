"""A pipelined step in virtual time, run by the dispatchers that run the real one."""

import heapq
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

from axonn_jax.pipe.schedule.dispatcher import OrderedDispatcher
from axonn_jax.pipe.schedule.message_driven import dispatcher_of
from axonn_jax.pipe.schedule.policies import Policy
from axonn_jax.pipe.schedule.tasks import Kind, Message, PipelineShape, Task, sends
from axonn_jax.pipe.timeline.spans import KIND_OF, Span

_PROGRESS_TASKS = 4096
"""Tasks between two calls of `progress`."""


class TaskRun(NamedTuple):
    """A task of a rank, simulated or measured; times in one unit, on one clock."""

    task: Task
    """Task that ran."""
    rank: int
    """Rank on which the task ran."""
    start: float
    """Time of the start."""
    end: float
    """Time of the end."""


@dataclass(frozen=True)
class Simulation:
    """Result of a simulated step, after a failure with the tasks that ended; times in the unit of the task times."""

    pipe_shape: PipelineShape
    """Simulated pipeline."""
    spans: list[TaskRun] = field(repr=False)
    """Tasks of the ranks asked for, in the order of their ends."""
    makespan: float
    """Time from the first start to the last end."""
    busy: list[float]
    """Time in which each rank computed."""
    peak_live: list[int]
    """Largest number of activations alive at once, in (stage, microbatch) pairs, by rank."""
    ends: list[float] = field(default_factory=list)
    """End of each rank's last task."""
    waited: list[float] = field(default_factory=list)
    """Last time at which each rank was idle before its last forward; 0 for a rank that was always busy."""
    tasks: int = 0
    """Number of tasks that have ended."""
    skipped_microbatches: int = 0
    """Microbatches of a steady stretch that were not simulated; `makespan` and `busy` have them."""
    finished: bool = True
    """False if a failure stopped the step; `makespan` is then the end of the last task."""

    def timeline(self) -> list[Span]:
        """Return the tasks that have ended as spans of step 0, as measured ones are drawn and written."""
        runs = (run for run in self.spans if run.end < inf)
        return [Span(run.rank, str(run.task), KIND_OF[(run.task.kind,)], run.start, run.end, 0) for run in runs]

    @property
    def idle_fraction(self) -> float:
        """Share of all ranks' time in which they did not compute."""
        return 1.0 - sum(self.busy) / (self.makespan * self.pipe_shape.pipe) if self.makespan > 0 else 0.0


def simulate(
    pipe_shape: PipelineShape,
    policy: Policy,
    *,
    task_time: Callable[[Task], float],
    message_time: Callable[[Message], float],
    shown: Collection[int] | None = None,
    progress: Callable[[int], None] | None = None,
    ranks: Sequence[OrderedDispatcher] = (),
) -> Simulation:
    """Run one step under a policy in virtual time; `task_time` and `message_time` are asked once for each.

    A rank runs one task at a time, and chooses it when the one before has ended; a message takes its time on the way
    and none of its sender's. All events of one instant reach the ranks before any of them chooses. `shown` are the
    ranks whose spans are kept (default: all); `progress` is called at times with the number of ended tasks; `ranks` are
    dispatchers or followers other than the policy's.

    Raises:
        UserError: the policy cannot run with this shape of the pipeline.
        RuntimeError: the ranks wait for each other; the message has the state of every rank.
    """
    pipe = pipe_shape.pipe
    ranks = ranks or [dispatcher_of(pipe_shape, rank, policy) for rank in range(pipe)]
    spans, keeps = list[TaskRun](), [shown is None or rank in shown for rank in range(pipe)]
    busy, peak, since = [0.0] * pipe, [0] * pipe, [-1.0] * pipe  # start of the running task; -1: the rank is idle
    ends, gaps, waited = [0.0] * pipe, [0.0] * pipe, [0.0] * pipe
    # (time, serial, rank, task that ended or message that arrived). The serial number breaks ties in causal order and
    # makes the simulation deterministic.
    events: list[tuple[float, int, int, Task | Message]] = []
    now, serial, ended = 0.0, 0, 0
    concerned = set(range(pipe))
    while True:
        # A set of integers has no guaranteed order, and the order of ranks decides serial numbers. Most events concern
        # a single rank, for which sorting would be wasted.
        for rank in sorted(concerned) if len(concerned) > 1 else concerned:
            task = ranks[rank].next() if since[rank] < 0 else None
            if task is None:
                continue
            since[rank] = now
            duration = task_time(task)
            busy[rank] += duration
            if now > ends[rank]:
                gaps[rank] = now
            if task.kind is Kind.FORWARD:
                waited[rank] = gaps[rank]
                peak[rank] = max(peak[rank], ranks[rank].live)
            serial += 1
            heapq.heappush(events, (now + duration, serial, rank, task))
        if not events:
            break
        now = events[0][0]
        concerned.clear()
        # Deliver all events of this instant before any rank chooses its next task.
        while events and events[0][0] == now:
            _, _, rank, event = heapq.heappop(events)
            concerned.add(rank)
            if isinstance(event, Message):
                ranks[rank].arrived(event)
                continue
            if keeps[rank]:
                spans.append(TaskRun(event, rank, since[rank], now))
            ranks[rank].finished(event)
            since[rank], ends[rank] = -1.0, now
            ended += 1
            if progress is not None and ended % _PROGRESS_TASKS == 0:
                progress(ended)
            message = sends(event, pipe_shape)
            if message is not None:
                serial += 1
                heapq.heappush(events, (now + message_time(message), serial, message.stage % pipe, message))
    # No event is pending, so unfinished ranks wait for each other and never continue.
    if not all(rank.done for rank in ranks):
        raise RuntimeError("the ranks wait for each other: " + "; ".join(map(_state, ranks)))
    return Simulation(pipe_shape, spans, now, busy, peak, ends, waited, ended)


def _state(rank: OrderedDispatcher) -> str:
    state = f"rank {rank.rank}: {rank.started} tasks started, {rank.live} activations alive"
    if rank.done:
        return f"{state}, done"
    waiting = rank.waiting_for()
    first = f"waits for {waiting[0]}" if waiting else f"blocked at {rank.blocked}" if rank.blocked else "told no more"
    return f"{state}, {first}" + (" or another" if len(waiting) > 1 else "")
