"""Spans of a pipelined step, measured or simulated: recording, one clock for all ranks, idle shares."""

import math
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, get_args

from axonn_jax.schedule.tasks import Kind as TaskKind

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
"""The kind of span that a program's tasks are: one, or two in a row."""

_CLOCK_ROUNDS = 8
_TASK = re.compile(r"(\d{1,9})\.(\d{1,9})$")


@dataclass(frozen=True, slots=True)
class Span:
    """Something a rank did from `start` to `end`, in seconds of a monotonic clock.

    `rank` is the pipe rank, `name` the task's: "F3.12" is the forward of microbatch 12 in stage 3, which
    with virtual stages is another number than the rank. The name of communication ends like that of its task.
    """

    rank: int
    name: str
    kind: Kind
    start: float
    end: float
    step: int

    @property
    def stage(self) -> int | None:
        """Number of the stage in the name, None without one."""
        return int(match[1]) if (match := _TASK.search(self.name)) else None

    @property
    def microbatch(self) -> int | None:
        """Number of the microbatch in the name, None without one."""
        return int(match[2]) if (match := _TASK.search(self.name)) else None

    @property
    def is_task(self) -> bool:
        """True if the span is work of the device, not communication."""
        return self.kind != "communication"


class Recorder:
    """Spans of the last `steps` steps; several threads may add without a lock."""

    def __init__(self, steps: int = 4):
        if steps < 1:
            raise ValueError(f"a recorder keeps at least 1 step, not {steps}")
        self._limit = steps
        self._steps: dict[int, list[tuple[int, str, Kind, float, float, int]]] = {}

    def add(self, rank: int, name: str, kind: Kind, start: float, end: float, step: int) -> None:
        """Record a span, times in seconds; a span of a step that was dropped already is dropped too."""
        spans = self._steps.get(step)
        if spans is None:
            # Each line is one operation on the dictionary, so a thread that comes between two of them does no harm.
            spans = self._steps.setdefault(step, [])
            for old in sorted(self._steps)[: -self._limit]:
                self._steps.pop(old, None)
        spans.append((rank, name, kind, start, end, step))

    def spans(self, step: int | None = None) -> list[Span]:
        """Return the spans of a step, or of all steps kept, in the order in which they were added."""
        steps = sorted(self._steps.items()) if step is None else [(step, self._steps.get(step, []))]
        return [Span(*fields) for _, spans in steps for fields in tuple(spans)]


def estimate_offset(samples: Sequence[tuple[float, float, float]]) -> float:
    """Return how many seconds the remote clock is ahead of the local one, wrong by half the least round trip at most.

    A sample is (local time of sending, remote time of answering, local time of receiving). The quickest exchange had
    the least room for an asymmetric delay, so it alone counts, as in NTP.

    Raises:
        ValueError: there is no sample, or one was received before it was sent.
    """
    if not samples or any(received < sent for sent, _, received in samples):
        raise ValueError("a clock offset needs samples (sent, remote, received) with sent <= received")
    sent, remote, received = min(samples, key=lambda sample: sample[2] - sample[0])
    return remote - (sent + received) / 2


def shift(spans: Iterable[Span], offset: float) -> list[Span]:
    """Return the spans `offset` seconds later: with `estimate_offset`'s result, on the remote clock."""
    return [replace(span, start=span.start + offset, end=span.end + offset) for span in spans]


def merge(spans_by_rank: Iterable[Iterable[Span]]) -> list[Span]:
    """Return the spans of all ranks, which must be on one clock, in one list by their start."""
    return sorted((span for spans in spans_by_rank for span in spans), key=lambda span: (span.start, span.end))


def collect(recorder: Recorder, pipe: "MPI.Comm | None") -> list[Span]:
    """Return the spans of all pipe ranks on rank 0's clock, there; elsewhere an empty list.

    Collective over `pipe` (None: one process, which has them all): a few messages of 8 bytes with every rank to
    compare clocks, then its spans, about 100 bytes each.
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
    """Return the steps that have spans, in order."""
    return sorted({span.step for span in spans})


def ranks_of(spans: Iterable[Span]) -> int:
    """Return the number of pipe ranks, of which the last has at least one span."""
    return max((span.rank for span in spans), default=-1) + 1


_LAST: frozenset[Kind] = frozenset({"backward", "weight_gradient", "forward_and_backward", "optimizer"})
"""Kinds of a microbatch's last task on a rank, and of a step's. A step has as many of them however backward passes are
split."""


def last_whole_step(spans: Iterable[Span]) -> int | None:
    """Return the last step that ended as often as any: a run that is stopped leaves its last step unfinished."""
    ends: dict[int, int] = {}
    for span in spans:
        ends[span.step] = ends.get(span.step, 0) + (span.kind in _LAST)
    most = max(ends.values(), default=0)
    return max((step for step, count in ends.items() if count == most), default=None)


@dataclass(frozen=True, slots=True)
class Usage:
    """Use of a rank's time in one step, as shares of the time from the first task to the end of the last.

    `idle` is the share without a task, `shares` has that of every kind, `exposed` that of communication that no task
    hid, which is part of it.
    """

    rank: int
    idle: float
    shares: Mapping[Kind, float]
    exposed: float


def window(spans: Iterable[Span]) -> tuple[float, float]:
    """Return when the first task started and the last one ended, in seconds; (0, 0) without tasks."""
    tasks = [span for span in spans if span.is_task]
    return min((span.start for span in tasks), default=0.0), max((span.end for span in tasks), default=0.0)


def usage(spans: Sequence[Span], ranks: int) -> list[Usage]:
    """Return the use of each rank's time in one step, for `ranks` ranks; a rank without tasks was idle throughout.

    Raises:
        ValueError: the spans are of more than one step, whose pause between would count as idle.
    """
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
    """Return the seconds in which at least one of the parts, from and to, lasts."""
    total, until = 0.0, -math.inf
    for start, end in sorted(parts):
        if end > until:
            total += end - max(start, until)
            until = end
    return total
