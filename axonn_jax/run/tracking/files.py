"""Trackers in a run directory: TensorBoard's events, and the record of what every tracker has got."""

import contextlib
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

from axonn_jax.core.documents import read_json, write_atomically
from axonn_jax.core.errors import UserError, integer, refused, status_of, typed_arguments
from axonn_jax.core.grid import Grid
from axonn_jax.core.options import typed
from axonn_jax.core.terminal import say
from axonn_jax.run.tracking.records import METRICS, SAMPLES, JsonLines, free_name, read_records
from axonn_jax.run.tracking.tracker import RunFacts, RunTracker, Tracker, Trackers, Value

FACTS = "tracked.json"
"""File of a run directory with the run's id for trackers, and the last step of every value that they have got."""


class TensorBoard:
    """Tracker that writes TensorBoard's events into `tensorboard/`.

    After a resume TensorBoard drops the later steps; another run's events are moved aside.
    """

    def start(self, run: RunFacts) -> None:
        """Open a new file of events."""
        # Not tensorboardX's SummaryWriter: on a full disk its thread dies silently, its queue fills, and the run hangs.
        # Here an event is on disk when `log` returns, or `log` raises.
        from tensorboardX.event_file_writer import EventsWriter  # `validate.check` reports a missing library
        from tensorboardX.proto.event_pb2 import Event, SessionLog

        folder, resumed = run.directory / "tensorboard", run.resumed
        if not resumed and os.path.lexists(folder):
            folder.rename(free_name(folder))
        folder.mkdir(exist_ok=True)
        suffix = f".{resumed}" if resumed else ""  # tensorboardX names files by the second, in which a run may resume
        self._events = EventsWriter(str(folder / "events"), suffix)
        if resumed:
            # A session start makes TensorBoard discard events of this and later steps.
            start = SessionLog(status=SessionLog.START)
            self._events.write_event(Event(step=resumed + 1, session_log=start, wall_time=time.time()))
        self._events.flush()

    def log(self, step: int, values: Mapping[str, Value]) -> None:
        """Write an event per value; a table becomes text, row by row."""
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
        """Close the file of events."""
        self._events.close()


def start_trackers(
    entries: Sequence[RunTracker],
    directory: Path,
    config: Mapping[str, object],
    resumed: int,
    say: Callable[[str], None],
) -> Trackers:
    """Start a run's trackers, and send them the values up to the resumed step that they have not got.

    Args:
        entries: The trackers.
        directory: Run directory, which records the run's id and what every tracker has got (`FACTS`).
        config: Settings by dotted name.
        resumed: Step after which the run resumes; 0 for a new run, which gets a new id.
        say: Printer of a line for people.

    Raises:
        UserError: A tracker does not start, or `FACTS` cannot be written.
    """
    facts, seen, lines = _Facts(secrets.token_hex(4)), dict[str, int](), list[dict[str, Any]]()
    if resumed:
        try:
            facts = typed(_Facts, read_json(directory / FACTS, 1 << 20))
        except FileNotFoundError:  # from a version without trackers
            pass
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or error
            say(f"warning: {directory / FACTS} is damaged: {why}; trackers are told of a new run, with id {facts.id}")
    # Read the logs now: starting `JsonLines` drops the lines after the resumed step, but services have seen them.
    for name in (METRICS, SAMPLES) if resumed else ():
        with contextlib.suppress(OSError, ValueError):
            for record in read_records(directory / name)[0]:
                lines += [record] if name == METRICS and record["step"] <= resumed else []
                keys = ["samples"] if name == SAMPLES else record
                seen |= {key: max(record["step"], seen.get(key, 0)) for key in keys}
    last_steps = {**facts.told}
    for name in facts.asked:
        steps = {**last_steps.get(name, {})}
        last_steps[name] = {key: max(steps.get(key, 0), seen.get(key, 0)) for key in steps | seen}
    # Written without trackers first: one that fails to start now gets all values when it does start.
    _write_facts(directory, _Facts(facts.id, last_steps))
    names = [f"{entry.field} = {entry.value}" for entry in entries]
    last_steps |= {
        name: seen for name, entry in zip(names, entries, strict=True) if isinstance(entry.tracker, JsonLines)
    }
    updated = [entry._replace(last_steps=last_steps.get(name, {})) for name, entry in zip(names, entries, strict=True)]
    trackers = Trackers(updated, RunFacts(directory, facts.id, config, resumed), say)
    try:
        for line in lines:
            step = line.pop("step")
            trackers.record(step, {key: math.nan if value is None else value for key, value in line.items()})
        _write_facts(directory, _Facts(facts.id, last_steps, tuple(names)))
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
    """Trackers that get all values from here on."""


def _write_facts(directory: Path, facts: _Facts) -> None:
    try:
        write_atomically(directory / FACTS, (json.dumps(asdict(facts)) + "\n").encode())
    except OSError as error:
        accepted = f"a directory that {FACTS} can be written in; {error.strerror}"
        raise UserError("log.dir", str(directory), accepted) from None


@typed_arguments
def tracked(
    grid: Grid,
    directory: str | Path,
    *trackers: Tracker,
    config: Mapping[str, object] = MappingProxyType({}),
    resumed: int = 0,
) -> Trackers:
    """Start trackers for a custom training loop: a context whose `log(step, loss=...)` sends values to all of them.

    Only rank 0 logs. metrics.jsonl in the run directory is always one of the trackers. After a resume in the same
    directory trackers see the same run id, and get no value of a step twice.

    Args:
        grid: The grid, as `init` returns it.
        directory: Run directory, which is created.
        trackers: `tracking.services.WandbTracker`, `MlflowTracker`, `TensorBoard`, or any `tracker.Tracker`.
        config: Settings by name, for trackers to show.
        resumed: Step after which the run resumes, as `Trainer.load` returns it; 0 for a new run.

    Raises:
        UserError: A tracker does not start, or the directory cannot be written.
    """
    integer("resumed", resumed, 0)
    if grid.rank:
        return Trackers([], RunFacts(Path(directory), ""), say)
    with refused("directory", directory, "a directory that can be written"):
        Path(directory).mkdir(parents=True, exist_ok=True)
    entries = [RunTracker("log.dir", str(directory), JsonLines(warn=say), once=False)]
    entries += [
        RunTracker("tracker", type(tracker).__name__, tracker, once=not isinstance(tracker, TensorBoard))
        for tracker in trackers
    ]
    return start_trackers(entries, Path(directory), config, resumed, say)
