"""Trackers that write files of a run directory, metrics.jsonl and TensorBoard's events; facts of a run that goes on."""

import contextlib
import io
import json
import math
import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from axonn_jax.documents import parse_json, read_bytes, read_json, replace_whole
from axonn_jax.errors import UserError, integer, refused, status_of, typed_arguments
from axonn_jax.grid import Grid
from axonn_jax.options import typed
from axonn_jax.terminal import say
from axonn_jax.tracking.tracker import RunFacts, RunTracker, Tracker, Trackers, Value

METRICS, SAMPLES = "metrics.jsonl", "samples.jsonl"
FACTS = "tracked.json"
"""File of a run directory: the run's id for trackers, and the last step that each was told of, by name of a value."""
_MOST_WAITING = 2**26  # bytes of lines kept for a disk that has no room: those of some 200,000 steps
_MOST = 2**31  # bytes read of a log: that of ten million steps


class JsonLines:
    """Tracker that writes one JSON object a line, each line whole on disk at once.

    A run resumed after step `RunFacts.resumed` keeps the lines up to this step; otherwise an earlier run's file in the
    same directory is kept under a numbered name, as is a file with unreadable lines, with a call of `warn`. A disk that
    cannot take lines does not end the run: a line says so in the end.

    Args:
        name: The file's name.
        warn: Printer of a line for people.
    """

    def __init__(self, name: str = METRICS, *, warn: Callable[[str], None] = lambda text: None):
        self._name, self._warn = name, warn
        self.known = frozenset[str]()
        """Names of the values that are known of the step resumed."""
        self._trouble, self._waiting, self._lost = "", b"", 0
        """Reason for which lines were not written in time, bytes that wait for room, and lines beyond those."""

    def start(self, run: RunFacts) -> None:
        """Open the file, behind the step that the run goes on after."""
        self._path = path = run.directory / self._name
        if run.resumed:
            self._go_on_after(run.resumed)
        elif os.path.lexists(path):
            path.rename(_free_name(path))
        # Without a buffer of Python's: one that is full forgets what a full disk does not take.
        self._file = path.open("ab", buffering=0)

    def _go_on_after(self, step: int) -> None:
        path = self._path
        try:
            records, damage = _read(path) if os.path.lexists(path) else ([], "")
        except (OSError, ValueError) as error:
            records, damage = [], f"it is left out: {getattr(error, 'strerror', None) or error}"
        rewritten = path.with_name(f".{path.name}.part")
        self.known = frozenset(key for record in records if record["step"] == step for key in record)
        kept = [json.dumps(record) + "\n" for record in records if record["step"] <= step]
        rewritten.unlink(missing_ok=True)  # a link that came with the directory is not followed
        rewritten.write_text("".join(kept), encoding="utf-8")
        if damage:
            aside = _free_name(path)
            path.rename(aside)
            self._warn(f"warning: {path} is damaged and kept as {aside.name}; {damage}")
        elif not kept and self._name == METRICS:
            what = "has no record" if os.path.lexists(path) else "is missing: there is no record"
            self._warn(f"note: {path} {what} up to step {step}; the lowest held-out loss counts from here on")
        rewritten.replace(path)

    def log(self, step: int, values: Mapping[str, Value]) -> None:
        """Write one record of numbers and texts."""
        if shown := {name: value for name, value in values.items() if not isinstance(value, (Path, list))}:
            self.write({"step": step, **shown})

    def write(self, record: Mapping[str, Any]) -> None:
        """Write one record; infinite numbers and NaN become null, as JSON has neither."""
        clean = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
        if len(self._waiting) > _MOST_WAITING:
            self._lost += 1
        else:
            self._waiting += json.dumps(clean).encode() + b"\n"
        self._write_waiting()

    def finish(self, status: int = 0) -> None:
        """Close the file, and say where lines could not be written, or not in time."""
        self._write_waiting()
        with contextlib.suppress(OSError):
            self._file.close()
        missing = self._lost + self._waiting.count(b"\n")
        if self._trouble:
            which = f"{missing} lines of {self._path} are missing" if missing else f"lines of {self._path} came late"
            self._warn(f"warning: {which}: {self._trouble}")

    def _write_waiting(self) -> None:
        try:
            while self._waiting:
                self._waiting = self._waiting[self._file.write(self._waiting) :]
        except OSError as error:
            self._trouble = self._trouble or f"{error.strerror or error}"


class TensorBoard:
    """Tracker that writes TensorBoard's events into `tensorboard/`.

    TensorBoard drops the steps after the one resumed; another run's events are set aside.
    """

    def start(self, run: RunFacts) -> None:
        """Open the events behind the step that the run goes on after."""
        # tensorboardX's own SummaryWriter is not used: its thread dies on a full disk without a word, and then its
        # queue fills and the run stands still. Here an event is on disk when `log` returns, or `log` raises.
        from tensorboardX.event_file_writer import EventsWriter  # the config's check has looked for it
        from tensorboardX.proto.event_pb2 import Event, SessionLog

        folder, resumed = run.directory / "tensorboard", run.resumed
        if not resumed and os.path.lexists(folder):
            folder.rename(_free_name(folder))
        folder.mkdir(exist_ok=True)
        suffix = f".{resumed}" if resumed else ""  # two files of one second need two names
        self._events: Any = EventsWriter(str(folder / "events"), suffix)
        if resumed:
            start = SessionLog(status=SessionLog.START)
            self._events.write_event(Event(step=resumed + 1, session_log=start, wall_time=time.time()))
        self._events.flush()

    def log(self, step: int, values: Mapping[str, Value]) -> None:
        """Write an event a value; a table is a text, row by row."""
        from tensorboardX import summary
        from tensorboardX.proto.event_pb2 import Event

        for name, value in values.items():
            if isinstance(value, Path):
                from matplotlib.image import imread

                shown = summary.image(name, imread(value), dataformats="HWC")
            elif isinstance(value, list):
                rows = [" | ".join(f"{key}: {part}" for key, part in row.items()) for row in value]
                shown = summary.text(name, "\n\n".join(rows))
            elif isinstance(value, str):
                shown = summary.text(name, value)
            else:
                shown = summary.scalar(name, value)
            self._events.write_event(Event(step=step, summary=shown, wall_time=time.time()))
        self._events.flush()

    def finish(self, status: int) -> None:
        """Close the events."""
        self._events.close()


def started(
    asked: Sequence[RunTracker], directory: Path, config: Mapping[str, Any], resumed: int, say: Callable[[str], None]
) -> Trackers:
    """Return a run's trackers, started, and told of the values up to `resumed` that they were not told of.

    Args:
        asked: The trackers.
        directory: Run directory, which keeps the run's id and what each tracker was told of.
        config: Settings by dotted name.
        resumed: Step that the run goes on after; 0: a new run, with a new id.
        say: Printer of a line for people.
    """
    kept, seen, lines = _Facts(secrets.token_hex(4)), dict[str, int](), list[dict[str, Any]]()
    if resumed:
        try:
            kept = typed(_Facts, read_json(directory / FACTS, 1 << 20))
        except FileNotFoundError:  # of before there were trackers
            pass
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or error
            say(f"warning: {directory / FACTS} is damaged: {why}; trackers are told of a new run, with id {kept.id}")
    for name in (METRICS, SAMPLES) if resumed else ():  # before lines of steps after `resumed` are dropped
        with contextlib.suppress(OSError, ValueError):
            for record in _read(directory / name)[0]:
                lines += [record] if name == METRICS and record["step"] <= resumed else []
                keys = ["samples"] if name == SAMPLES else record
                seen |= {key: max(record["step"], seen.get(key, 0)) for key in keys}
    told = {**kept.told}
    for name in kept.asked:
        own = {**told.get(name, {})}
        told[name] = {key: max(own.get(key, 0), seen.get(key, 0)) for key in own | seen}
    _keep(directory, _Facts(kept.id, told))  # one that does not start is told of all when it does
    names = [f"{each.field} = {each.value}" for each in asked]
    told |= {name: seen for name, each in zip(names, asked, strict=True) if isinstance(each.tracker, JsonLines)}
    given = [each._replace(told=told.get(name, {})) for name, each in zip(names, asked, strict=True)]
    trackers = Trackers(given, RunFacts(directory, kept.id, config, resumed), say)
    try:
        for line in lines:
            step = line.pop("step")
            trackers.record(step, {key: math.nan if value is None else value for key, value in line.items()})
        _keep(directory, _Facts(kept.id, told, tuple(names)))
    except BaseException as error:
        trackers.finish(status_of(error))
        raise
    return trackers


@dataclass
class _Facts:
    """Content of `FACTS`."""

    id: str
    told: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    asked: tuple[str, ...] = ()
    """Trackers that are told of all values from here on."""


def _keep(directory: Path, facts: _Facts) -> None:
    try:
        replace_whole(directory / FACTS, (json.dumps(asdict(facts)) + "\n").encode())
    except OSError as error:
        accepted = f"a directory that {FACTS} can be written in; {error.strerror}"
        raise UserError("log.dir", str(directory), accepted) from None


@typed_arguments
def tracked(
    grid: Grid,
    directory: str | Path,
    *trackers: Tracker,
    config: Mapping[str, Any] = MappingProxyType({}),
    resumed: int = 0,
) -> Trackers:
    """Return trackers for a training loop of your own, a context whose `log(step, loss=...)` tells all of them.

    Only the run's first process tells. metrics.jsonl in the run directory is one of them; trackers get no value of a
    step twice after a resume in the same directory, and the same run id.

    Args:
        grid: The grid, as `init` returns it.
        directory: Run directory, which is made.
        trackers: `tracking.services.WandbTracker`, `MlflowTracker`, `TensorBoard`, or your own (`tracker.Tracker`).
        config: Settings by name, for trackers to show.
        resumed: Step that the run goes on after, as `Trainer.load` returns it; 0: a new run.

    Raises:
        UserError: A tracker does not start, or the directory cannot be written.
    """
    integer("resumed", resumed, 0)
    if grid.rank:
        return Trackers([], RunFacts(Path(directory), ""), say)
    with refused("directory", directory, "a directory that can be written"):
        Path(directory).mkdir(parents=True, exist_ok=True)
    asked = [RunTracker("log.dir", str(directory), JsonLines(warn=say), once=False)]
    asked += [RunTracker("tracker", type(one).__name__, one, once=not isinstance(one, TensorBoard)) for one in trackers]
    return started(asked, Path(directory), config, resumed, say)


def _free_name(path: Path) -> Path:
    number = 1
    while os.path.lexists(candidate := path.with_name(f"{path.stem}.{number}{path.suffix}")):
        number += 1
    return candidate


def read_metrics(directory: Path) -> list[dict[str, Any]]:
    """Return the readable records of a run directory, in order."""
    return _read(directory / METRICS)[0]


@dataclass
class _Record:
    """Fields of every record."""

    step: int


def _read(path: Path) -> tuple[list[dict[str, Any]], str]:
    """Return the readable records of a log, and a description of the other lines, empty if there are none.

    A last line cut off in the middle is no fault: a killed process may leave one. Of the metrics of a step that are
    there twice the last count; samples of a step are several.
    """
    records, unread, first = [], 0, ""
    for number, line in enumerate(io.BytesIO(read_bytes(path, _MOST)), 1):
        try:
            record = parse_json(line)
            if typed(_Record, record).step < 0:
                raise ValueError(f"step = {record['step']}, which is below 0")
            records.append(record)
        except ValueError as error:
            cut_off = line.startswith(b"{") and not line.endswith(b"\n")
            if line.strip() and not cut_off:
                unread, first = unread + 1, first or f"line {number}: {error}"
    once = _once(records) if path.name == METRICS else records
    faults = [f"lines left out: {unread}, the first {first}"] if unread else []
    faults += [f"records of steps that are there again: {len(records) - len(once)}"] if len(once) < len(records) else []
    return once, "; ".join(faults)


def _once(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the records but those of whose step and values there are later ones."""
    later, kept = dict[int, set[str]](), list[dict[str, Any]]()
    for record in reversed(records):  # an evaluation's record of a step has other values than the step's
        names = later.setdefault(record["step"], {"step"})
        if not record.keys() <= names:
            names.update(record)
            kept.append(record)
    return kept[::-1]
