"""The protocol of a tracker, the facts of a run that it begins with, and the trackers of a run, all told alike."""

import importlib
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, Self

from axonn_jax.errors import UserError, first_line, integer, status_of, typed_arguments

Value = float | str | Path | list[dict[str, Any]]
"""A number, a text, a picture (the path of a PNG) or a table (rows of texts and numbers by column)."""


@dataclass(frozen=True)
class RunFacts:
    """A run as its trackers know it."""

    directory: Path
    """Run directory."""
    id: str
    """Eight letters or digits, the same after a resume in the same directory, on whatever grid."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """Settings by dotted name."""
    resumed: int = 0
    """Step that the run goes on after; 0: a new run."""


class Tracker(Protocol):
    """Receiver of a run's values; a class of a user's own needs no base and no arguments.

    One that has a function `saved(step, path)` too is told of each complete checkpoint.
    """

    def start(self, run: RunFacts) -> None:
        """Begin a run, or go on with it; called once, before all else."""

    def log(self, step: int, values: Mapping[str, Value]) -> None:
        """Record values of a step, by name; several calls a step have different names."""

    def finish(self, status: int) -> None:
        """End the run, with its exit status; called once, after all else, unless the process is killed."""


class RunTracker(NamedTuple):
    """A tracker, and the setting that asks for it."""

    field: str
    value: Any
    tracker: Tracker
    once: bool = True
    """True if the tracker is told of no value of a step twice, after a resume not of steps that it has seen before;
    False for one that drops the steps after the one resumed."""
    last_steps: Mapping[str, int] = MappingProxyType({})
    """Last step that the tracker was told of before, by name of a value."""


_FAILURES = (Exception, SystemExit)
"""Exceptions of a library's or a stranger's code that must not end a run; an interrupt by a person does."""


class Trackers:
    """Trackers of one run; one that fails is told of nothing more, which a line says, and the run goes on.

    Args:
        asked: The trackers.
        run: The run; trackers are started with it.
        say: Printer of a line for people.

    Raises:
        UserError: A tracker does not start.
    """

    def __init__(self, entries: Iterable[RunTracker], run: RunFacts, say: Callable[[str], None]):
        self._entries, self._say, self._saved, self._resumed = list[RunTracker](), say, run.resumed, run.resumed
        for entry in entries:
            try:
                entry.tracker.start(run)
            except _FAILURES as error:
                self.finish(2)  # a service would show those that have started as running for ever
                if isinstance(error, UserError):
                    raise
                raise UserError(entry.field, entry.value, f"a tracker that starts; {first_line(error)}") from error
            self._entries.append(entry)

    def log(self, step: int, /, **values: Value) -> None:
        """Record values of a step, by name."""
        self.record(integer("step", step, 0), values)

    def record(self, step: int, values: Mapping[str, Value]) -> None:
        """Record values of a step, by name; an array of one number is this number."""
        for name, value in values.items():
            if (size := getattr(value, "size", 1)) != 1:
                accepted = "a number, a text, the path of a picture, or a table: a list of rows by column"
                raise UserError(name, f"an array of {size} numbers", accepted)
        values = {name: value.item() if hasattr(value, "item") else value for name, value in values.items()}

        def tell(entry: RunTracker) -> None:
            # A tracker that rewinds on resume (`once=False`) still holds everything up to the resumed step; later
            # steps were dropped there and must be sent again.
            last_steps = entry.last_steps if entry.once or step <= self._resumed else {}
            if new := {name: value for name, value in values.items() if step > last_steps.get(name, -1)}:
                entry.tracker.log(step, new)

        self._for_all(tell)

    @typed_arguments
    def saved(self, step: int, path: str | Path) -> None:
        """Tell of a complete checkpoint those who have a function for it; a second call for a step does nothing."""
        if integer("step", step, 0) > self._saved:
            self._saved = step
            self._for_all(lambda entry: getattr(entry.tracker, "saved", lambda step, path: None)(step, Path(path)))

    def finish(self, status: int = 0) -> None:
        """End the run; a second call does nothing."""
        self._for_all(lambda entry: entry.tracker.finish(status))
        self._entries = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *_: object) -> None:
        self.finish(0 if error is None else status_of(error))

    def _for_all(self, call: Callable[[RunTracker], None]) -> None:
        for entry in [*self._entries]:
            try:
                call(entry)
            except _FAILURES as error:
                self._entries.remove(entry)
                self._say(f"warning: {entry.field} = {entry.value!r}: {first_line(error)}; nothing more is sent there")


_NAME_OF_CLASS = "the name of a class with start, log and finish, as package.module:Class"


def custom_tracker(name: str) -> Tracker:
    """Make the tracker of a class named as `package.module:Class`; raise ``UserError`` where that fails."""
    maker = tracker_class(name)
    try:
        return maker()
    except _FAILURES as error:
        raise UserError("log.tracker", name, f"{_NAME_OF_CLASS}; {first_line(error)}") from error


def tracker_class(name: str) -> Callable[[], Tracker]:
    """Return the class named as `package.module:Class`, whose module is imported: a configuration can name any code.

    The current directory is searched as `python -m` would search it. Raises ``UserError`` where there is no such class:
    a function such as `sys:exit` is refused unseen, as calling it to look at the result would be too late.
    """
    module, _, path = name.partition(":")
    accepted = _NAME_OF_CLASS
    if not (module and path.isidentifier()):
        raise UserError("log.tracker", name, accepted)
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        cls: Any = getattr(importlib.import_module(module), path)
    except _FAILURES as error:
        raise UserError("log.tracker", name, f"{accepted}; {first_line(error)}") from error
    if not isinstance(cls, type):
        raise UserError("log.tracker", name, f"{accepted}; it is no class")
    if missing := [method for method in ("start", "log", "finish") if not callable(getattr(cls, method, None))]:
        raise UserError("log.tracker", name, f"{accepted}; it has no {missing[0]}")
    return cls
