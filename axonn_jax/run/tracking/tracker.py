"""Protocol of a tracker, and the trackers of a run, which all get the same values."""

import importlib
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple, Protocol, Self

from axonn_jax.core.errors import UserError, first_line, integer, status_of, typed_arguments

Value = float | str | Path | list[dict[str, object]]
"""Number, text, picture (path of a PNG) or table (rows of texts and numbers by column)."""


@dataclass(frozen=True)
class RunFacts:
    """Facts about a run for its trackers."""

    directory: Path
    """Run directory."""
    id: str
    """Eight letters or digits, the same after a resume in the same directory, on any grid."""
    config: Mapping[str, object] = field(default_factory=dict)
    """Settings by dotted name."""
    resumed: int = 0
    """Step after which the run resumes; 0 for a new run."""


class Tracker(Protocol):
    """Receiver of a run's values; a user's class needs no base class and takes no arguments.

    If it also has a method `saved(step, path)`, that is called for every complete checkpoint.
    """

    def start(self, run: RunFacts) -> None:
        """Begin or resume a run; called once, before all other methods."""

    def log(self, step: int, values: Mapping[str, Value]) -> None:
        """Record values of a step by name; several calls for a step have different names."""

    def finish(self, status: int) -> None:
        """End the run with its exit status; called once, after all other methods, unless the process is killed."""


class RunTracker(NamedTuple):
    """A tracker, with the setting that asks for it and the values that it already has."""

    field: str
    value: object
    tracker: Tracker
    once: bool = True
    """True if the tracker keeps what it got before a resume, so no value may be sent again; False for one that drops
    the steps after the resumed one."""
    last_steps: Mapping[str, int] = MappingProxyType({})
    """Last step of each value that the tracker got before a resume, by the value's name."""


_FAILURES = (Exception, SystemExit)
"""Exceptions of a library or a user's code that must not end a run; KeyboardInterrupt does."""


class Trackers:
    """Trackers of one run; one that fails is dropped with a warning, and the run continues.

    Args:
        entries: The trackers, which are started.
        run: The run.
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
                self.finish(2)  # otherwise services would show the trackers already started as running forever
                if isinstance(error, UserError):
                    raise
                raise UserError(entry.field, entry.value, f"a tracker that starts; {first_line(error)}") from error
            self._entries.append(entry)

    def log(self, step: int, /, **values: Value) -> None:
        """Record values of a step by name."""
        self.record(integer("step", step, 0), values)

    def record(self, step: int, values: Mapping[str, Value]) -> None:
        """Record values of a step by name; an array of one number counts as the number.

        Raises ``UserError`` for a larger array.
        """
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
        """Report a complete checkpoint to the trackers that have a method `saved`, once per step."""
        if integer("step", step, 0) > self._saved:
            self._saved = step
            self._for_all(lambda entry: getattr(entry.tracker, "saved", lambda step, path: None)(step, Path(path)))

    def finish(self, status: int = 0) -> None:
        """End the run with an exit status; a second call does nothing."""
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
    """Return an instance of the class `package.module:Class`; raise ``UserError`` if that fails."""
    maker = tracker_class(name)
    try:
        return maker()
    except _FAILURES as error:
        raise UserError("log.tracker", name, f"{_NAME_OF_CLASS}; {first_line(error)}") from error


def tracker_class(name: str) -> Callable[[], Tracker]:
    """Import the class `package.module:Class`; a configuration can run any code this way.

    Modules are also found in the current directory, as with `python -m`.

    Args:
        name: The class.

    Raises:
        UserError: There is no such class, or it lacks a method of `Tracker`.
    """
    module, _, path = name.partition(":")
    accepted = _NAME_OF_CLASS
    if not (module and path.isidentifier()):
        raise UserError("log.tracker", name, accepted)
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        cls = getattr(importlib.import_module(module), path)
    except _FAILURES as error:
        raise UserError("log.tracker", name, f"{accepted}; {first_line(error)}") from error
    # Refuse functions such as `sys:exit`, instead of calling them to see whether they return a tracker.
    if not isinstance(cls, type):
        raise UserError("log.tracker", name, f"{accepted}; it is no class")
    if missing := [method for method in ("start", "log", "finish") if not callable(getattr(cls, method, None))]:
        raise UserError("log.tracker", name, f"{accepted}; it has no {missing[0]}")
    return cls
