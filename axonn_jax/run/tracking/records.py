"""Records of a run in its directory: JSON objects, one per line, which a resumed run reads again."""

import contextlib
import io
import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from axonn_jax.core.documents import parse_json, read_bytes
from axonn_jax.core.options import typed
from axonn_jax.run.tracking.tracker import RunFacts, Value

METRICS, SAMPLES = "metrics.jsonl", "samples.jsonl"
_MOST_WAITING = 2**26  # bytes of lines to buffer while the disk is full, about 200,000 steps
_MOST = 2**31  # largest size of a log to read in bytes, about ten million steps


class JsonLines:
    """Tracker that writes one JSON object per line, each with a single write.

    A run resumed after step `RunFacts.resumed` keeps the lines up to that step; the file of another run in the same
    directory is kept under a numbered name, and so is a file with unreadable lines, with a warning. A full disk does
    not end the run: lines wait for room, and a warning at the end says what is missing.

    Args:
        name: The file's name.
        warn: Printer of a line for people.
    """

    def __init__(self, name: str = METRICS, *, warn: Callable[[str], None] = lambda text: None):
        self._name, self._warn = name, warn
        self.resumed_keys = frozenset[str]()
        """Names of the values that the file has for the resumed step."""
        self._trouble, self._waiting, self._lost = "", b"", 0
        """Reason why lines were not written in time, bytes that wait for room, and number of lines dropped."""

    def start(self, run: RunFacts) -> None:
        """Open the file to append after the resumed step."""
        self._path = path = run.directory / self._name
        if run.resumed:
            self._keep_until(run.resumed)
        elif os.path.lexists(path):
            path.rename(free_name(path))
        # Unbuffered: Python's buffer would lose what a full disk does not accept.
        self._file = path.open("ab", buffering=0)

    def _keep_until(self, step: int) -> None:
        path = self._path
        try:
            records, damage = read_records(path) if os.path.lexists(path) else ([], "")
        except (OSError, ValueError) as error:
            records, damage = [], f"it is left out: {getattr(error, 'strerror', None) or error}"
        # Rewrite into a new file and rename it, so that a crash leaves either the old file or the new one.
        rewritten = path.with_name(f".{path.name}.part")
        self.resumed_keys = frozenset(key for record in records if record["step"] == step for key in record)
        retained = [json.dumps(record) + "\n" for record in records if record["step"] <= step]
        rewritten.unlink(missing_ok=True)  # never write through a link that somebody put into the directory
        rewritten.write_text("".join(retained), encoding="utf-8")
        if damage:
            aside = free_name(path)
            path.rename(aside)
            self._warn(f"warning: {path} is damaged and kept as {aside.name}; {damage}")
        elif not retained and self._name == METRICS:
            problem = "has no record" if os.path.lexists(path) else "is missing: there is no record"
            self._warn(f"note: {path} {problem} up to step {step}; the lowest held-out loss counts from here on")
        rewritten.replace(path)

    def log(self, step: int, values: Mapping[str, Value]) -> None:
        """Write a record of the numbers and texts among the values."""
        if shown := {name: value for name, value in values.items() if not isinstance(value, (Path, list))}:
            self.write({"step": step, **shown})

    def write(self, record: Mapping[str, object]) -> None:
        """Write a record; infinite numbers and NaN become null, since JSON has neither."""
        clean = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
        if len(self._waiting) > _MOST_WAITING:
            self._lost += 1
        else:
            self._waiting += json.dumps(clean).encode() + b"\n"
        self._write_waiting()

    def finish(self, status: int = 0) -> None:
        """Close the file, and warn if lines could not be written, or not in time."""
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


def free_name(path: Path) -> Path:
    """Return a path next to `path` with a number in its name that does not exist yet."""
    number = 1
    while os.path.lexists(candidate := path.with_name(f"{path.stem}.{number}{path.suffix}")):
        number += 1
    return candidate


def read_metrics(directory: Path) -> list[dict[str, Any]]:
    """Return the readable records of a run directory's metrics.jsonl, in order."""
    return read_records(directory / METRICS)[0]


@dataclass
class _Record:
    """Fields that every record must have."""

    step: int


def read_records(path: Path) -> tuple[list[dict[str, Any]], str]:
    """Read a log.

    If metrics.jsonl has a step's values twice, the last ones count; a step may have several samples.

    Args:
        path: The log.

    Returns:
        The readable records in order, and a description of the other lines, empty if there are none.

    Raises:
        OSError: The file cannot be read.
        ValueError: It is not a regular file, or too large.
    """
    records, unread, first = [], 0, ""
    for number, line in enumerate(io.BytesIO(read_bytes(path, _MOST)), 1):
        try:
            record = parse_json(line)
            if typed(_Record, record).step < 0:
                raise ValueError(f"step = {record['step']}, which is below 0")
            records.append(record)
        except ValueError as error:
            # A killed process may leave a last line that is cut off; that is not damage.
            cut_off = line.startswith(b"{") and not line.endswith(b"\n")
            if line.strip() and not cut_off:
                unread, first = unread + 1, first or f"line {number}: {error}"
    once = _once(records) if path.name == METRICS else records
    faults = [f"lines left out: {unread}, the first {first}"] if unread else []
    faults += [f"records of steps that are there again: {len(records) - len(once)}"] if len(once) < len(records) else []
    return once, "; ".join(faults)


def _once(records: list[dict[str, Any]]) -> list[dict[str, object]]:
    """Drop records all of whose values appear again in later records of the same step."""
    newer_keys, newest = dict[int, set[str]](), list[dict[str, Any]]()
    # Compare values, not only steps: an evaluation writes a record of its own for a step, with other values.
    for record in reversed(records):
        names = newer_keys.setdefault(record["step"], {"step"})
        if not record.keys() <= names:
            names.update(record)
            newest.append(record)
    return newest[::-1]
