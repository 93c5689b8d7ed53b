"""Replay of a measured step in virtual time, with the measured task times under the dispatchers that ran it."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from axonn_jax.core.errors import UserError
from axonn_jax.core.options import PipelinePolicy
from axonn_jax.pipe.schedule.policies import policy_of
from axonn_jax.pipe.schedule.tasks import Kind, PipelineShape, Task, needs
from axonn_jax.planning.simulate.simulator import TaskRun, simulate


@dataclass(frozen=True)
class Replay:
    """Seconds of a measured step and of its simulation under a policy."""

    policy: PipelinePolicy
    measured_s: float
    """From the first task's start to the last one's end."""
    simulated_s: float
    gap_s: float
    """Between two tasks of a rank where nothing had to be waited for (median); added to every task."""
    message_s: float
    """From a task's end to the start of the task on another rank that waited for it (median)."""


_PASSES = {Kind.FORWARD: 1, Kind.BACKWARD: 2, Kind.BACKWARD_INPUT: 1, Kind.BACKWARD_WEIGHT: 1}
"""Matmuls of a kind of task, over those of a forward pass."""


def task_runs(name: str, rank: int, start: float, end: float) -> list[TaskRun]:
    """Return the tasks of a measured span, such as `F3.12`; raise ``ValueError`` for other names.

    Two tasks that a stage runs in one program (`FI3.12`) share one span, which is divided in proportion to their
    matmuls.
    """
    if (match := re.fullmatch(r"([FBIW]|FB|FI)([0-9]{1,9})\.([0-9]{1,9})", name)) is None:
        raise ValueError(f"a task called {name!r}")
    kinds = [Kind(letter) for letter in match[1]]
    unit, at, runs = (end - start) / sum(_PASSES[kind] for kind in kinds), start, list[TaskRun]()
    for kind in kinds:
        runs.append(TaskRun(Task(kind, int(match[2]), int(match[3])), rank, at, at + unit * _PASSES[kind]))
        at = runs[-1].end
    return runs


def replay(measured: Iterable[TaskRun], name: PipelinePolicy) -> Replay:
    """Simulate a step with its measured task times, gaps and message times under the policy `name`.

    The policy may differ from the one that ran. A fused backward takes the time of its measured parts; a missing task
    takes the median of its kind in its stage.

    Raises:
        UserError: the policy cannot run so: it needs the parts of backwards that were measured in one.
        ValueError: there are no tasks, or not every stage has all of them.
    """
    spans = {run.task: run for run in measured}
    pipe_shape, split = _pipe_shape(spans), any(task.kind is Kind.BACKWARD_WEIGHT for task in spans)
    if (policy := policy_of(name, split=split)).splits and not split:
        raise UserError("--replay", name, "a policy for backwards in one, as they were measured")
    previous_runs = _previous_runs(spans)
    waits, gaps = [], []
    # A task starts late either because of its message or because of its rank's previous task, whichever ended last;
    # the first kind measures message times, the second the gaps between tasks.
    for task, run in spans.items():
        message, previous = needs(task, pipe_shape), previous_runs.get(task)
        sent = _sender(message.direction, task, spans) if message is not None else None
        crossed = sent is not None and sent.rank != run.rank
        if sent is not None and crossed and (previous is None or previous.end < sent.end):
            waits.append(max(0.0, run.start - sent.end))
        elif previous is not None:
            gaps.append(max(0.0, run.start - previous.end))
    gap, message_s = median(gaps or [0.0]), median(waits or [0.0])
    usual = _medians(spans)
    first = min(run.start for run in spans.values())
    last = max(run.end for run in spans.values())
    if last <= first:
        raise ValueError("tasks that take no time")
    done = simulate(
        pipe_shape,
        policy,
        task_time=lambda task: _seconds(task, spans, usual) + gap,
        # Every task already includes a gap, so subtract it here to avoid counting it twice.
        message_time=lambda _: max(0.0, message_s - gap),
    )
    return Replay(name, last - first, done.makespan, gap, message_s)


def _seconds(task: Task, spans: dict[Task, TaskRun], usual: dict[tuple[Kind, int], float]) -> float:
    if task in spans:
        return spans[task].end - spans[task].start
    if task.kind is Kind.BACKWARD:
        parts = (Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
        return sum(_seconds(Task(kind, task.stage, task.microbatch), spans, usual) for kind in parts)
    return usual[task.kind, task.stage]


def _medians(spans: dict[Task, TaskRun]) -> dict[tuple[Kind, int], float]:
    """Return the median seconds of each kind of task in each stage."""
    by_kind: dict[tuple[Kind, int], list[float]] = {}
    for task, run in spans.items():
        by_kind.setdefault((task.kind, task.stage), []).append(run.end - run.start)
    return {kind: median(seconds) for kind, seconds in by_kind.items()}


def _pipe_shape(spans: dict[Task, TaskRun]) -> PipelineShape:
    if not spans:
        raise ValueError("a step without tasks")
    stages = max(task.stage for task in spans) + 1
    pipe = max(run.rank for run in spans.values()) + 1
    microbatches = max(task.microbatch for task in spans) + 1
    forwards = sum(task.kind is Kind.FORWARD for task in spans)
    if stages % pipe or forwards != stages * microbatches:
        raise ValueError(f"{forwards} forwards of {stages} stages on {pipe} ranks and {microbatches} microbatches")
    return PipelineShape(pipe, microbatches, stages // pipe)


def _previous_runs(spans: dict[Task, TaskRun]) -> dict[Task, TaskRun]:
    """Return the run that preceded each task on the same rank."""
    by_rank: dict[int, list[TaskRun]] = {}
    for run in sorted(spans.values(), key=lambda run: run.start):
        by_rank.setdefault(run.rank, []).append(run)
    return {following.task: run for row in by_rank.values() for run, following in pairwise(row)}


def _sender(direction: str, task: Task, spans: dict[Task, TaskRun]) -> TaskRun | None:
    """Return the run whose message the task needs."""
    if direction == "forward":
        return spans.get(Task(Kind.FORWARD, task.stage - 1, task.microbatch))
    fused = spans.get(Task(Kind.BACKWARD, task.stage + 1, task.microbatch))
    return fused or spans.get(Task(Kind.BACKWARD_INPUT, task.stage + 1, task.microbatch))
