"""Pipelined step of any length: beginning and end are simulated, the steady stretch is extrapolated."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace

from axonn_jax.pipe.schedule.policies import Policy
from axonn_jax.pipe.schedule.tasks import Kind, Message, PipelineShape, Task
from axonn_jax.planning.simulate.simulator import Simulation, simulate

_ALWAYS_FULL = 6_000
"""Tasks of a step that is simulated whole in any case."""
_MOST = 2_500_000
"""Tasks of a simulation that is not made longer to be sure of its period: some twenty seconds."""
_SURE = 0.005
"""Share of a step by which its length may be off if it went on to grow as it did in the simulation."""


@dataclass(frozen=True)
class StageTimes:
    """Seconds of the tasks of every virtual stage, and of a message."""

    pipe_shape: PipelineShape
    tasks: dict[tuple[Kind, int], float]
    message: float

    def task(self, task: Task) -> float:
        """Seconds of a task."""
        return self.tasks[task.kind, task.stage]

    def carried(self, message: Message) -> float:
        """Return the seconds of a message; all messages take equally long."""
        del message
        return self.message

    def slowed(self, ranks: Mapping[int, float]) -> "StageTimes":
        """Return the times where some ranks take longer by a factor."""
        pipe = self.pipe_shape.pipe
        slower = {at: seconds * ranks.get(at[1] % pipe, 1.0) for at, seconds in self.tasks.items()}
        return replace(self, tasks=slower)

    def work(self, rank: int, policy: Policy) -> float:
        """Return the minimum seconds of work that a microbatch is for a rank."""
        total = 0.0
        for stage in self.pipe_shape.stages_of(rank):
            forward, *parts, fused = (self.tasks[kind, stage] for kind in _KINDS)
            backward = {"whole": fused, "split": sum(parts), "both": min(sum(parts), fused)}
            total += forward + backward[policy.backwards(self.pipe_shape)]
        return total

    def flight_time(self, split: bool) -> float:
        """Return the minimum seconds from a microbatch's first forward to the start of its last backward."""
        back = Kind.BACKWARD_INPUT if split else Kind.BACKWARD
        round_trip = sum(
            self.tasks[Kind.FORWARD, stage] + self.tasks[back, stage] for stage in range(self.pipe_shape.stages)
        )
        return round_trip - self.tasks[back, 0] + 2 * (self.pipe_shape.stages - 1) * self.message


_KINDS = (Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT, Kind.BACKWARD)


def pipelined(
    times: StageTimes,
    policy: Policy,
    *,
    shown: Collection[int] | None = (),
    progress: Callable[[int], None] | None = None,
) -> Simulation:
    """Simulate a step without its update, extrapolating most of the steady phase of a long one.

    In the steady phase every microbatch takes the same time. This period is measured between the busiest rank's
    forwards once the pipeline is full. It is at least that rank's work, and at least a microbatch's flight time divided
    by the microbatches in flight. Ranks may settle late if they wait for messages or catch up with postponed tasks, so
    the simulated length is doubled until each further microbatch adds that period to the step.
    `tests/planning/test_steady.py` bounds the error against full simulations.

    Raises:
        UserError: the policy cannot run with this shape of the pipeline.
    """
    pipe_shape, pipe = times.pipe_shape, times.pipe_shape.pipe
    work = [times.work(rank, policy) for rank in range(pipe)]
    busiest = max(range(pipe), key=work.__getitem__)

    def run(microbatches: int) -> Simulation:
        return simulate(
            replace(pipe_shape, microbatches=microbatches),
            policy,
            task_time=times.task,
            message_time=times.carried,
            shown=None if shown is None else {*shown, busiest},
            progress=progress,
        )

    full, unit = policy.depth(pipe_shape), pipe_shape.group
    least = max(work[busiest], times.flight_time(policy.splits) / full)
    tasks, shorter = 3 * pipe_shape.stages, None
    simulated = full + full // 4 + 24
    if tasks * simulated >= _MOST:
        simulated = full + full // 8
    while 3 * simulated < pipe_shape.microbatches and tasks * pipe_shape.microbatches > _ALWAYS_FULL:
        # Virtual stages take microbatches in groups; skipping whole groups keeps the size of the last one.
        skipped_microbatches = (pipe_shape.microbatches - simulated) // unit * unit
        done = run(pipe_shape.microbatches - skipped_microbatches)
        period, since = _period(done, busiest, full)
        period = max(period, least)
        # A rank without idle time has a backlog, so a further microbatch only adds the rank's local work.
        rank_work = [seconds / done.pipe_shape.microbatches for seconds in done.busy]
        rates = [
            period if late > since else per_microbatch
            for late, per_microbatch in zip(done.waited, rank_work, strict=True)
        ]
        makespan = max(end + skipped_microbatches * rate for end, rate in zip(done.ends, rates, strict=True))
        # A simulation of this size is not doubled again, even if its period has not been confirmed.
        sure = tasks * simulated >= _MOST
        # Confirm the period by the growth of the makespan since the previous simulation, half as long.
        if shorter is not None:
            further = done.pipe_shape.microbatches - shorter.pipe_shape.microbatches
            off = abs(done.makespan - shorter.makespan - further * period) / further
            sure |= skipped_microbatches * off < _SURE * makespan
        if sure:
            ranks = zip(done.busy, rank_work, rates, strict=True)
            busy = [
                seconds + skipped_microbatches * min(per_microbatch, rate) for seconds, per_microbatch, rate in ranks
            ]
            return replace(done, skipped_microbatches=skipped_microbatches, makespan=makespan, busy=busy)
        simulated, shorter = 2 * simulated, done
    return run(pipe_shape.microbatches)


def _period(done: Simulation, rank: int, full: int) -> tuple[float, float]:
    """Return the late-phase seconds between microbatches' first forwards on a rank, and the start of that phase."""
    pipe, last = done.pipe_shape.pipe, done.pipe_shape.microbatches - 1
    starts = [0.0] * (last + 1)
    for span in done.spans:
        if span.rank == rank and span.task.kind is Kind.FORWARD and span.task.stage < pipe:
            starts[span.task.microbatch] = span.start
    unit = done.pipe_shape.group
    last -= unit
    count = max(unit, (last - full) // 2 // unit * unit)
    since = starts[last - count]
    return (starts[last] - since) / count, since
