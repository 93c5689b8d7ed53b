"""The measured timeline of a pipelined run: recording, one clock for all ranks, idle shares, the trace file."""

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

from axonn_jax.documents import parse_json, read_bytes, replace_whole
from axonn_jax.errors import UserError

TIMELINE = "timeline.json"

MOST_RANKS = 1024
"""Places along the pipe of a timeline that is read: a picture with a row for each stays one that can be opened."""
_MOST_BYTES, _MOST_SPANS, _MOST_LINE = 300_000_000, 500_000, 1000
_SLICE = b'\n{"ph": "X"'
_EVENT = re.compile(_SLICE + rb"[^\n]*")
_LONGEST_S = 1e9

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

_WAYS: dict[Kind, tuple[tuple[str, int], ...]] = {
    "forward": (("activation", 1),),
    "backward": (("gradient", -1),),
    "input_gradient": (("gradient", -1),),
    "forward_and_backward": (("activation", 1), ("gradient", -1)),
    "forward_and_input_gradient": (("activation", 1), ("gradient", -1)),
}
"""What a task hands on, and to the stage how far away."""
_TASK = re.compile(r"(\d{1,9})\.(\d{1,9})$")
# The thread of a stage on which its communication is shown; its tasks are on threads from 0.
_COMMUNICATION_THREAD = 1000


@dataclass(frozen=True, slots=True)
class Span:
    """Something a rank did from `start` to `end`, in seconds of a monotonic clock.

    `rank` is the place along the pipe, `name` the task's: "F3.12" is the forward of microbatch 12 in stage 3, which
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
        """The stage in the name, if it has one."""
        return int(found[1]) if (found := _TASK.search(self.name)) else None

    @property
    def microbatch(self) -> int | None:
        """The microbatch in the name, if it has one."""
        return int(found[2]) if (found := _TASK.search(self.name)) else None

    @property
    def is_task(self) -> bool:
        """Whether this is work of the device, which communication is not."""
        return self.kind != "communication"


class Recorder:
    """Keeps what happened in the last `steps` steps; several threads may add without a lock."""

    def __init__(self, steps: int = 4):
        if steps < 1:
            raise ValueError(f"a recorder keeps at least 1 step, not {steps}")
        self._limit = steps
        self._steps: dict[int, list[tuple[int, str, Kind, float, float, int]]] = {}

    def add(self, rank: int, name: str, kind: Kind, start: float, end: float, step: int) -> None:
        """Records a span, times in seconds; a span of a step that was dropped already is dropped too."""
        spans = self._steps.get(step)
        if spans is None:
            spans = self._first_of(step)
        spans.append((rank, name, kind, start, end, step))

    def _first_of(self, step: int) -> list[tuple[int, str, Kind, float, float, int]]:
        # Each line is one operation on the dictionary, so a thread that comes between two of them does no harm.
        spans = self._steps.setdefault(step, [])
        for old in sorted(self._steps)[: -self._limit]:
            self._steps.pop(old, None)
        return spans

    def spans(self, step: int | None = None) -> list[Span]:
        """The spans of a step, or of all steps kept, in the order in which they were added."""
        kept = sorted(self._steps.items()) if step is None else [(step, self._steps.get(step, []))]
        return [Span(*fields) for _, spans in kept for fields in tuple(spans)]


def estimate_offset(samples: Sequence[tuple[float, float, float]]) -> float:
    """How many seconds the remote clock is ahead of the local one, wrong by half the least round trip at most.

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
    """The spans `offset` seconds later: with `estimate_offset`'s result, on the remote clock."""
    return [replace(span, start=span.start + offset, end=span.end + offset) for span in spans]


def merge(spans_by_rank: Iterable[Iterable[Span]]) -> list[Span]:
    """The spans of all ranks, which must be on one clock, in one list by their start."""
    return sorted((span for spans in spans_by_rank for span in spans), key=lambda span: (span.start, span.end))


def steps_of(spans: Iterable[Span]) -> list[int]:
    """The steps that have spans, in order."""
    return sorted({span.step for span in spans})


def ranks_of(spans: Iterable[Span]) -> int:
    """The number of places along the pipe, of which the last has at least one span."""
    return max((span.rank for span in spans), default=-1) + 1


def last_whole_step(spans: Iterable[Span]) -> int | None:
    """The last step with as many tasks as any: a run that is stopped leaves its last step unfinished."""
    tasks: dict[int, int] = {}
    for span in spans:
        tasks[span.step] = tasks.get(span.step, 0) + span.is_task
    most = max(tasks.values(), default=0)
    return max((step for step, count in tasks.items() if count == most), default=None)


@dataclass(frozen=True, slots=True)
class Usage:
    """What became of a rank's time in one step, as shares of the time from the first task to the end of the last.

    `idle` is the share without a task, `shares` has that of every kind, `exposed` that of communication that no task
    hid, which is part of it.
    """

    rank: int
    idle: float
    shares: Mapping[Kind, float]
    exposed: float


def window(spans: Iterable[Span]) -> tuple[float, float]:
    """When the first task started and the last one ended, in seconds; (0, 0) without tasks."""
    tasks = [span for span in spans if span.is_task]
    return min((span.start for span in tasks), default=0.0), max((span.end for span in tasks), default=0.0)


def usage(spans: Sequence[Span], ranks: int) -> list[Usage]:
    """What became of the time of each of `ranks` ranks in one step; a rank without tasks was idle throughout.

    Raises:
        ValueError: the spans are of more than one step, whose pause between would count as idle.
    """
    if len(steps_of(spans)) > 1:
        raise ValueError(f"spans of one step, not of {steps_of(spans)}")
    start, end = window(spans)
    whole = end - start
    if whole <= 0:
        return [Usage(rank, 0.0, dict.fromkeys(KINDS, 0.0), 0.0) for rank in range(ranks)]
    by_rank: dict[int, list[Span]] = {}
    for span in spans:
        by_rank.setdefault(span.rank, []).append(replace(span, start=max(span.start, start), end=min(span.end, end)))
    found = []
    for rank in range(ranks):
        mine = by_rank.get(rank, [])
        busy = _covered(span for span in mine if span.is_task)
        shares = {kind: _covered(span for span in mine if span.kind == kind) / whole for kind in KINDS}
        found.append(Usage(rank, 1 - busy / whole, shares, max(_covered(mine) - busy, 0.0) / whole))
    return found


def idle_share(spans: Sequence[Span], ranks: int) -> float:
    """The idle share of the device time of `ranks` ranks between one step's first task and the end of its last."""
    return sum(one.idle for one in usage(spans, ranks)) / ranks if ranks else 0.0


def _covered(spans: Iterable[Span]) -> float:
    """Seconds in which at least one of the spans lasts."""
    total, until = 0.0, -math.inf
    for start, end in sorted((span.start, span.end) for span in spans):
        if end > until:
            total += end - max(start, until)
            until = end
    return total


def write_trace(path: Path, spans: Sequence[Span]) -> None:
    """Writes the spans in Chrome's trace event format, which Perfetto opens; times count from the first span's start.

    A process is a stage, its threads are its tasks and its communication; arrows lead from stage to stage. The oldest
    steps are left out where there are more spans than `read_trace` reads.
    """
    spans = _newest(spans)
    lines = ",\n".join(json.dumps(event, allow_nan=False) for event in _events(spans))
    # A viewer may look while a run writes: the file is there whole, or as it was.
    replace_whole(path, f'{{"displayTimeUnit": "ms", "traceEvents": [\n{lines}\n]}}\n'.encode())


def _newest(spans: Sequence[Span]) -> Sequence[Span]:
    left = Counter(span.step for span in spans)
    while left.total() > _MOST_SPANS and len(left) > 1:
        del left[min(left)]
    return [span for span in spans if span.step in left]


def _events(spans: Sequence[Span]) -> Iterator[dict[str, Any]]:
    origin = min((span.start for span in spans), default=0.0)
    threads = _threads(spans)
    for rank in sorted({span.rank for span in spans}):
        yield {"ph": "M", "pid": rank, "tid": 0, "name": "process_name", "args": {"name": f"stage {rank}"}}
        yield {"ph": "M", "pid": rank, "tid": 0, "name": "process_sort_index", "args": {"sort_index": rank}}
    for rank, thread in sorted({(span.rank, thread) for span, thread in threads}):
        what = "tasks" if thread < _COMMUNICATION_THREAD else "communication"
        lane = thread % _COMMUNICATION_THREAD
        name = f"stage {rank} {what}" + (f" {lane + 1}" if lane else "")
        yield {"ph": "M", "pid": rank, "tid": thread, "name": "thread_name", "args": {"name": name}}
        yield {"ph": "M", "pid": rank, "tid": thread, "name": "thread_sort_index", "args": {"sort_index": thread}}
    slices = [(span, _slice(span, thread, origin)) for span, thread in threads]
    yield from (event for _, event in slices)
    yield from _arrows(slices)


def _threads(spans: Sequence[Span]) -> list[tuple[Span, int]]:
    """Each span's thread: what overlaps in one thread is not shown, so what overlaps goes to a further one."""
    ends: dict[tuple[int, bool], list[float]] = {}
    placed = []
    for span in sorted(spans, key=lambda span: (span.start, span.end)):
        lanes = ends.setdefault((span.rank, span.is_task), [])
        lane = next((at for at, end in enumerate(lanes) if end <= span.start), len(lanes))
        lanes[lane : lane + 1] = [span.end]
        placed.append((span, lane + (0 if span.is_task else _COMMUNICATION_THREAD)))
    return placed


def _slice(span: Span, thread: int, origin: float) -> dict[str, Any]:
    # The format counts in microseconds; rounded ends, not durations, keep neighbours from overlapping.
    start, end = (round((time - origin) * 1e6, 3) for time in (span.start, span.end))
    args = {"stage": span.rank if span.stage is None else span.stage, "step": span.step}
    if span.microbatch is not None:
        args["microbatch"] = span.microbatch
    times = {"ts": start, "dur": round(end - start, 3)}
    return {"ph": "X", "pid": span.rank, "tid": thread, "name": span.name, "cat": span.kind, **times, "args": args}


def _arrows(slices: Sequence[tuple[Span, dict[str, Any]]]) -> Iterator[dict[str, Any]]:
    """Arrows along a microbatch's way: forward to the next stage, the gradient of the input to the one before."""
    at = {
        (what, span.step, span.stage, span.microbatch): event
        for span, event in slices
        if span.stage is not None
        for what, _ in _WAYS.get(span.kind, ())
    }
    number = 0
    ends: tuple[tuple[str, dict[str, Any], float, dict[str, str]], ...]
    handing = ((span, event, *way) for span, event in slices for way in _WAYS.get(span.kind, ()))
    for span, event, what, onwards in handing:
        if span.stage is None:
            continue
        target = at.get((what, span.step, span.stage + onwards, span.microbatch))
        # An arrow within a stage says nothing, and one back in time means clocks that are off by more than a task.
        if target is None or target["pid"] == event["pid"] or target["ts"] < event["ts"]:
            continue
        number += 1
        ends = (("s", event, event["ts"] + event["dur"] / 2, {}), ("f", target, target["ts"], {"bp": "e"}))
        for phase, end, time, more in ends:
            place = {"pid": end["pid"], "tid": end["tid"], "ts": round(time, 3)}
            yield {"ph": phase, "id": number, "name": what, "cat": "flow", **place, **more}


def read_trace(path: Path) -> list[Span]:
    """The spans of a file that `write_trace` wrote, by their start; seconds from the first one's.

    Raises:
        UserError: there is no such file, it is not such a trace, or one beyond what a pipelined run leaves.
    """
    try:
        raw = read_bytes(path, _MOST_BYTES)
        if not raw.startswith(b'{"displayTimeUnit"') or not raw.endswith(b"\n]}\n"):
            raise ValueError("cut off, or written by something else")
        if raw.count(_SLICE) > _MOST_SPANS:
            raise ValueError(f"more than {_MOST_SPANS:,} spans")
        spans: list[Span] = []
        for line in _EVENT.finditer(raw):
            if line.end() - line.start() > _MOST_LINE:
                raise ValueError(f"an event of over {_MOST_LINE:,} characters")
            spans.append(_span(parse_json(line[0].strip(b"\n,"))))
        return merge([spans])
    except FileNotFoundError:
        raise UserError(TIMELINE, str(path), "a file; only a pipelined run (grid.pipe above 1) leaves one") from None
    except OSError as error:
        raise UserError(TIMELINE, str(path), f"a file that can be read ({error.strerror})") from None
    except ValueError as error:
        raise UserError(TIMELINE, str(path), f"a whole trace as a pipelined run leaves it; {error}") from None


def _span(event: Any) -> Span:
    try:
        rank, name, kind, step = event["pid"], event["name"], event["cat"], event["args"]["step"]
        start, end = (round(time, 3) / 1e6 for time in (event["ts"], event["ts"] + event["dur"]))  # as it is written
    except (KeyError, TypeError, OverflowError):
        raise ValueError("an event without a task's fields") from None
    if not (type(rank) is int and 0 <= rank < MOST_RANKS):
        raise ValueError(f"a pid that is none of at most {MOST_RANKS:,} stages")
    known = type(name) is str and type(kind) is str and kind in KINDS
    if not (known and 0 <= start <= end <= _LONGEST_S and type(step) is int and 0 <= step < 2**31):
        raise ValueError("an event of no task's kind, time or step")
    return Span(rank, name, kind, start, end, step)
