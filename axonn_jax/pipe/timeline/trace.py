"""Trace files of timelines, in Chrome's trace event format, which Perfetto opens."""

import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from axonn_jax.core.documents import parse_json, read_bytes, write_atomically
from axonn_jax.core.errors import UserError
from axonn_jax.pipe.timeline.spans import KINDS, Kind, Span, merge

TIMELINE = "timeline.json"

MOST_RANKS = 1024
"""Largest number of pipe ranks in a timeline to read, so that its picture can still be opened."""
_MOST_BYTES, _MOST_SPANS, _MOST_LINE = 300_000_000, 500_000, 1000
_SLICE = b'\n{"ph": "X"'
_EVENT = re.compile(_SLICE + rb"[^\n]*")
_LONGEST_S = 1e9


_MESSAGES: dict[Kind, tuple[tuple[str, int], ...]] = {
    "forward": (("activation", 1),),
    "backward": (("gradient", -1),),
    "input_gradient": (("gradient", -1),),
    "forward_and_backward": (("activation", 1), ("gradient", -1)),
    "forward_and_input_gradient": (("activation", 1), ("gradient", -1)),
}
"""Messages that a task of each kind sends, with the number of stages to the receiver."""
# First thread of a stage's communication in the viewer; its tasks are on threads from 0.
_COMMUNICATION_THREAD = 1000


def write_trace(path: Path, spans: Sequence[Span]) -> None:
    """Write spans in Chrome's trace event format, which Perfetto opens.

    A stage is shown as a process, its tasks and its communication as threads; arrows lead from stage to stage. Times
    count from the start of the first span.

    Args:
        path: The file, which is replaced atomically.
        spans: The spans; the oldest steps are omitted if there are more of them than `read_trace` accepts.
    """
    counts = Counter(span.step for span in spans)
    while counts.total() > _MOST_SPANS and len(counts) > 1:
        del counts[min(counts)]
    spans = [span for span in spans if span.step in counts]
    lines = ",\n".join(json.dumps(event, allow_nan=False) for event in _events(spans))
    # Someone may open the file while a run rewrites it.
    write_atomically(path, f'{{"displayTimeUnit": "ms", "traceEvents": [\n{lines}\n]}}\n'.encode())


def _events(spans: Sequence[Span]) -> Iterator[dict[str, Any]]:
    origin = min((span.start for span in spans), default=0.0)
    threads = _threads(spans)
    for rank in sorted({span.rank for span in spans}):
        yield {"ph": "M", "pid": rank, "tid": 0, "name": "process_name", "args": {"name": f"stage {rank}"}}
        yield {"ph": "M", "pid": rank, "tid": 0, "name": "process_sort_index", "args": {"sort_index": rank}}
    for rank, thread in sorted({(span.rank, thread) for span, thread in threads}):
        label = "tasks" if thread < _COMMUNICATION_THREAD else "communication"
        lane = thread % _COMMUNICATION_THREAD
        name = f"stage {rank} {label}" + (f" {lane + 1}" if lane else "")
        yield {"ph": "M", "pid": rank, "tid": thread, "name": "thread_name", "args": {"name": name}}
        yield {"ph": "M", "pid": rank, "tid": thread, "name": "thread_sort_index", "args": {"sort_index": thread}}
    slices = [(span, _slice(span, thread, origin)) for span, thread in threads]
    yield from (event for _, event in slices)
    yield from _arrows(slices)


def _threads(spans: Sequence[Span]) -> list[tuple[Span, int]]:
    # Viewers cannot show overlapping slices on the same thread, so they go to different ones.
    ends: dict[tuple[int, bool], list[float]] = {}
    threads = []
    for span in sorted(spans, key=lambda span: (span.start, span.end)):
        lanes = ends.setdefault((span.rank, span.is_task), [])
        lane = next((at for at, end in enumerate(lanes) if end <= span.start), len(lanes))
        lanes[lane : lane + 1] = [span.end]
        threads.append((span, lane + (0 if span.is_task else _COMMUNICATION_THREAD)))
    return threads


def _slice(span: Span, thread: int, origin: float) -> dict[str, Any]:
    # The format counts in microseconds. Round the ends instead of the duration, or adjacent slices could overlap.
    start, end = (round((time - origin) * 1e6, 3) for time in (span.start, span.end))
    args = {"stage": span.rank if span.stage is None else span.stage, "step": span.step}
    if span.microbatch is not None:
        args["microbatch"] = span.microbatch
    times = {"ts": start, "dur": round(end - start, 3)}
    return {"ph": "X", "pid": span.rank, "tid": thread, "name": span.name, "cat": span.kind, **times, "args": args}


def _arrows(slices: Sequence[tuple[Span, dict[str, Any]]]) -> Iterator[dict[str, Any]]:
    """Yield the arrows along a microbatch's path: activations to the next stage, gradients to the previous one."""
    at = {
        (message, span.step, span.stage, span.microbatch): event
        for span, event in slices
        if span.stage is not None
        for message, _ in _MESSAGES.get(span.kind, ())
    }
    number = 0
    ends: tuple[tuple[str, dict[str, Any], float, dict[str, str]], ...]
    handing = ((span, event, *message_kind) for span, event in slices for message_kind in _MESSAGES.get(span.kind, ()))
    for span, event, message, onwards in handing:
        if span.stage is None:
            continue
        target = at.get((message, span.step, span.stage + onwards, span.microbatch))
        # An arrow within a rank says nothing, and one that goes back in time only shows an error of the clocks.
        if target is None or target["pid"] == event["pid"] or target["ts"] < event["ts"]:
            continue
        number += 1
        ends = (("s", event, event["ts"] + event["dur"] / 2, {}), ("f", target, target["ts"], {"bp": "e"}))
        for phase, end, time, more in ends:
            position = {"pid": end["pid"], "tid": end["tid"], "ts": round(time, 3)}
            yield {"ph": phase, "id": number, "name": message, "cat": "flow", **position, **more}


def read_trace(path: Path) -> list[Span]:
    """Read the spans of a file that `write_trace` has written.

    Args:
        path: The file, which may come from a stranger: size, events and fields are bounded.

    Returns:
        The spans sorted by start, in seconds from the start of the first one.

    Raises:
        UserError: The file does not exist, is not such a trace, or is larger than that of a pipelined run.
    """
    try:
        raw = read_bytes(path, _MOST_BYTES)
        if not raw.startswith(b'{"displayTimeUnit"') or not raw.endswith(b"\n]}\n"):
            raise ValueError("cut off, or written by something else")
        if raw.count(_SLICE) > _MOST_SPANS:
            raise ValueError(f"more than {_MOST_SPANS:,} spans")
        # Parse event by event, which bounds the length of each and skips arrows and metadata.
        spans: list[Span] = []
        for line in _EVENT.finditer(raw):
            if line.end() - line.start() > _MOST_LINE:
                raise ValueError(f"an event of over {_MOST_LINE:,} characters")
            spans.append(_span(parse_json(line[0].strip(b"\n,"))))
        return merge([spans])
    except FileNotFoundError:
        accepted = "an existing file; a pipelined run (grid.pipe above 1) leaves it where it ends"
        raise UserError(TIMELINE, str(path), accepted) from None
    except OSError as error:
        raise UserError(TIMELINE, str(path), f"a file that can be read ({error.strerror})") from None
    except ValueError as error:
        raise UserError(TIMELINE, str(path), f"a whole trace as a pipelined run leaves it; {error}") from None


def _span(event: Any) -> Span:
    try:
        rank, name, kind, step = event["pid"], event["name"], event["cat"], event["args"]["step"]
        # Round as in `_slice`, so that the end of a slice is again the start of the next one.
        start, end = (round(time, 3) / 1e6 for time in (event["ts"], event["ts"] + event["dur"]))
    except (KeyError, TypeError, OverflowError):
        raise ValueError("an event without a task's fields") from None
    if not (type(rank) is int and 0 <= rank < MOST_RANKS):
        raise ValueError(f"a pid that is none of at most {MOST_RANKS:,} stages")
    is_task = type(name) is str and type(kind) is str and kind in KINDS
    if not (is_task and 0 <= start <= end <= _LONGEST_S and type(step) is int and 0 <= step < 2**31):
        raise ValueError("an event of no task's kind, time or step")
    return Span(rank, name, kind, start, end, step)
