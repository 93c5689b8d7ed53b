"""Spans of a pipelined step, measured or simulated: recording, a common clock for all ranks, idle shares."""

import math
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, get_args

from axonn_jax.pipe.schedule.tasks import Kind as TaskKind

if TYPE_CHECKING:
    from mpi4py import MPI

Kind = Literal[
    "forward",
    "backward",
    "input_gradient",
    "weight_gradient",
    "forward_and_backward",
    "forward_and_input_gradient",
    "communication",
    "optimizer",
]
KINDS: tuple[Kind, ...] = get_args(Kind)

KIND_OF: dict[tuple[TaskKind, ...], Kind] = {
    (TaskKind.FORWARD,): "forward",
    (TaskKind.BACKWARD,): "backward",
    (TaskKind.BACKWARD_INPUT,): "input_gradient",
    (TaskKind.BACKWARD_WEIGHT,): "weight_gradient",
    (TaskKind.FORWARD, TaskKind.BACKWARD): "forward_and_backward",
    (TaskKind.FORWARD, TaskKind.BACKWARD_INPUT): "forward_and_input_gradient",
}
"""Kind of the span of a program, by its task or its two consecutive tasks."""

_CLOCK_ROUNDS = 8  # exchanges to compare two clocks, of which the quickest counts
_TASK = re.compile(r"(\d{1,9})\.(\d{1,9})$")


@dataclass(frozen=True, slots=True)
class Span:
    """Activity of a rank from `start` to `end`, in seconds of a monotonic clock.

    `rank` is the pipe rank and `name` that of the task: "F3.12" is the forward of microbatch 12 in stage 3, a number
    that differs from the rank with virtual stages. The name of communication ends with the numbers of its task.
    """

    rank: int
    name: str
    kind: Kind
    start: float
    end: float
    step: int

    @property
    def stage(self) -> int | None:
        """Number of the stage in the name; None if there is none."""
        return int(match[1]) if (match := _TASK.search(self.name)) else None

    @property
    def microbatch(self) -> int | None:
        """Number of the microbatch in the name; None if there is none."""
        return int(match[2]) if (match := _TASK.search(self.name)) else None

    @property
    def is_task(self) -> bool:
        """True if the span is computation, not communication."""
        return self.kind != "communication"


class Recorder:
    """Recorder of the spans of the last steps; several threads may add spans without a lock.

    Args:
        steps: Number of steps to keep.

    Raises:
        ValueError: `steps` is below 1.
    """

    def __init__(self, steps: int = 4):
        if steps < 1:
            raise ValueError(f"a recorder keeps at least 1 step, not {steps}")
        self._limit = steps
        self._steps: dict[int, list[tuple[int, str, Kind, float, float, int]]] = {}

    def add(self, rank: int, name: str, kind: Kind, start: float, end: float, step: int) -> None:
        """Record a span.

        Args:
            rank: Pipe rank.
            name: Name of the task.
            kind: Kind of the task.
            start: Start in seconds of the monotonic clock.
            end: End in seconds.
            step: Step; a span of a step that has been dropped is dropped, too.
        """
        spans = self._steps.get(step)
        if spans is None:
            # Without a lock: each line is a single operation on the dictionary, so threads may interleave between them.
            spans = self._steps.setdefault(step, [])
            for old in sorted(self._steps)[: -self._limit]:
                self._steps.pop(old, None)
        spans.append((rank, name, kind, start, end, step))

    def spans(self, step: int | None = None) -> list[Span]:
        """Return the spans of a step, or of all recorded steps, in the order in which they were added."""
        steps = sorted(self._steps.items()) if step is None else [(step, self._steps.get(step, []))]
        return [Span(*fields) for _, spans in steps for fields in tuple(spans)]


def estimate_offset(samples: Sequence[tuple[float, float, float]]) -> float:
    """Estimate how many seconds the remote clock is ahead of the local one.

    Args:
        samples: Exchanges as (local time of sending, remote time of answering, local time of receiving) in seconds.

    Returns:
        The offset in seconds, with an error of at most half of the shortest round trip.

    Raises:
        ValueError: There is no sample, or one was received before it was sent.
    """
    if not samples or any(received < sent for sent, _, received in samples):
        raise ValueError("a clock offset needs samples (sent, remote, received) with sent <= received")
    # As in NTP, only the quickest exchange counts: it left the least room for an asymmetric delay.
    sent, remote, received = min(samples, key=lambda sample: sample[2] - sample[0])
    return remote - (sent + received) / 2


def shift(spans: Iterable[Span], offset: float) -> list[Span]:
    """Return the spans shifted by `offset` seconds; the result of `estimate_offset` moves them to the remote clock."""
    return [replace(span, start=span.start + offset, end=span.end + offset) for span in spans]


def merge(spans_by_rank: Iterable[Iterable[Span]]) -> list[Span]:
    """Return the spans of all ranks, which must use the same clock, in one list sorted by start."""
    return sorted((span for spans in spans_by_rank for span in spans), key=lambda span: (span.start, span.end))


def collect(recorder: Recorder, pipe: "MPI.Comm | None") -> list[Span]:
    """Collect the spans of all pipe ranks on pipe rank 0.

    Collective over `pipe`: a few messages of 8 bytes with every rank to compare clocks, then its spans, about 100 bytes
    each.

    Args:
        recorder: This process's spans.
        pipe: Communicator of the pipe's ranks; None for one process, which has all spans.

    Returns:
        All spans on rank 0's clock, sorted by start, on rank 0; an empty list on all other ranks.
    """
    local = recorder.spans()
    if pipe is None:
        return merge([local])
    if pipe.Get_rank() > 0:
        for _ in range(_CLOCK_ROUNDS):
            pipe.recv(source=0)
            pipe.send(time.monotonic(), 0)
        pipe.send(local, 0)
        return []
    by_rank = [local]
    for rank in range(1, pipe.Get_size()):
        samples = []
        for _ in range(_CLOCK_ROUNDS):
            sent = time.monotonic()
            pipe.send(None, rank)
            remote = pipe.recv(source=rank)
            samples.append((sent, remote, time.monotonic()))
        spans: list[Span] = pipe.recv(source=rank)
        by_rank.append(shift(spans, -estimate_offset(samples)))
    return merge(by_rank)


def steps_of(spans: Iterable[Span]) -> list[int]:
    """Return the steps that have spans, in ascending order."""
    return sorted({span.step for span in spans})


def ranks_of(spans: Iterable[Span]) -> int:
    """Return the number of pipe ranks, assuming that the last one has a span."""
    return max((span.rank for span in spans), default=-1) + 1


_LAST: frozenset[Kind] = frozenset({"backward", "weight_gradient", "forward_and_backward", "optimizer"})
"""Kinds of the last task of a microbatch on a rank, and of a step. Every complete step has the same number of them,
however backward passes are split."""


def last_complete_step(spans: Iterable[Span]) -> int | None:
    """Return the last complete step, or None without one."""
    # A stopped run leaves its last step unfinished: count the final tasks, of which complete steps have the most.
    ends: dict[int, int] = {}
    for span in spans:
        ends[span.step] = ends.get(span.step, 0) + (span.kind in _LAST)
    most = max(ends.values(), default=0)
    return max((step for step, count in ends.items() if count == most), default=None)


@dataclass(frozen=True, slots=True)
class Usage:
    """Usage of a rank's time in a step, as shares of the time from the first task's start to the last one's end."""

    rank: int
    idle: float
    """Share of the time without a task."""
    shares: Mapping[Kind, float]
    """Share of each kind of span."""
    exposed: float
    """Share of communication that no task hides, which is part of `idle`."""


def window(spans: Iterable[Span]) -> tuple[float, float]:
    """Return the start of the first task and the end of the last one, in seconds; (0, 0) without tasks."""
    tasks = [span for span in spans if span.is_task]
    return min((span.start for span in tasks), default=0.0), max((span.end for span in tasks), default=0.0)


def usage(spans: Sequence[Span], ranks: int) -> list[Usage]:
    """Return the usage of each rank's time in a step.

    Args:
        spans: Spans of the step.
        ranks: Number of ranks; one without tasks is idle all the time.

    Raises:
        ValueError: The spans are of more than one step.
    """
    # The pause between two steps would count as idle time.
    if len(steps_of(spans)) > 1:
        raise ValueError(f"spans of one step, not of {steps_of(spans)}")
    start, end = window(spans)
    length = end - start
    if length <= 0:
        return [Usage(rank, 0.0, dict.fromkeys(KINDS, 0.0), 0.0) for rank in range(ranks)]
    parts: dict[tuple[int, Kind], list[tuple[float, float]]] = {}
    for span in spans:
        parts.setdefault((span.rank, span.kind), []).append((max(span.start, start), min(span.end, end)))
    used = []
    for rank in range(ranks):
        intervals = {kind: parts.get((rank, kind), []) for kind in KINDS}
        busy = covered(part for kind in KINDS if kind != "communication" for part in intervals[kind])
        shares = {kind: covered(intervals[kind]) / length for kind in KINDS}
        exposed = max(covered(part for kind in KINDS for part in intervals[kind]) - busy, 0.0)
        used.append(Usage(rank, 1 - busy / length, shares, exposed / length))
    return used


def covered(parts: Iterable[tuple[float, float]]) -> float:
    """Return the length of the union of intervals (start, end)."""
    total, until = 0.0, -math.inf
    for start, end in sorted(parts):
        if end > until:
            total += end - max(start, until)
            until = end
    return total
