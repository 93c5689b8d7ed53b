"""The one exception for a user's mistake."""

import operator
import reprlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Any


class UserError(ValueError):
    """Bad input: one line that names the field, the value given and the accepted values.

    The command line prints it without a traceback and exits with status 2.
    """

    def __init__(self, field: str, value: object, accepted: str):
        self.field, self.value, self.accepted = field, value, accepted
        super().__init__(f"{_short(field)} = {_short(_shown(value))}: {' '.join(accepted.split())}")


_MOST = 300
"""Shown characters of a field or value; a file may hold texts of any length."""
_CLOSE = 0.65
"""Least share of common letters of a word and a suggestion: mpi and mpi4py, not gpt_oss and gpt2."""

_ELSEWHERE = {"tp": "y", "dp": "data", "pp": "pipe", "ep": "expert", "fsdp": "z", "learning_rate": "lr"}
"""Names of other systems (docs/coming_from.md), and the names here."""


def _shown(value: object) -> str:
    try:
        if isinstance(value, list | dict):
            return reprlib.repr(value)
        return repr(value) if isinstance(value, str) else " ".join(str(value).split())
    except (ValueError, RecursionError):  # integers of thousands of digits, tables in tables
        return "(too large to show)"


def _short(text: str) -> str:
    return text if len(text) <= _MOST else f"{text[:_MOST]}..."


@contextmanager
def refused(field: str, value: object, accepted: str) -> Iterator[None]:
    """Make a ``UserError`` of a failure to read or write a file: what is accepted, and the reason."""
    try:
        yield
    except UserError:
        raise
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise UserError(field, str(value), f"{accepted}; {why}") from None


@contextmanager
def as_flags(table: str) -> Iterator[None]:
    """Name a field of a table of settings by its flag in errors."""
    try:
        yield
    except UserError as error:
        flag = f"--{error.field.removeprefix(f'{table}.').replace('_', '-')}"
        raise UserError(flag, error.value, error.accepted) from None


def integer(field: str, value: Any, least: int, most: int | None = None) -> int:
    """Return a number as Python's integer; raises ``UserError`` for another type, or one out of range."""
    try:
        number = operator.index(value)
    except TypeError:
        number = least - 1
    if number < least or (most is not None and number > most):
        accepted = f"an integer of at least {least}" + ("" if most is None else f" and at most {most:,}")
        raise UserError(field, value, accepted)
    return number


def first_of(names: Sequence[object], separator: str = ", ") -> str:
    """Return the first five names as one text, with the number of others."""
    more = [f"and {len(names) - 5} more"] if len(names) > 5 else []
    return separator.join([*map(str, names[:5]), *more])


def first_line(error: BaseException) -> str:
    """Return the kind of an exception and the first line of its text."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def nearest(word: str, known: Iterable[str]) -> str:
    """Return ``"; did you mean 'x'?"`` for the known word of a name in other systems, or one that begins with ``word``,
    or else is close, or nothing; of names with a dot those of the same table."""
    names, word = {name.lstrip("-"): name for name in known}, word.lstrip("-")
    own = word.rpartition(".")[2]
    table = word.removesuffix(own)
    if below := {key.removeprefix(table): name for key, name in names.items() if table and key.startswith(table)}:
        names, word = below, own
    meant = [key for key in names if key.rpartition(".")[2] == _ELSEWHERE.get(own.replace("-", "_"))]
    longer = sorted((key for key in names if len(word) > 2 and key.startswith(word)), key=len)
    close = meant[:1] or longer[:1] or get_close_matches(word, names, n=1, cutoff=_CLOSE)
    if not close:  # of a table that is left out
        ends = {key.rpartition(".")[2].replace("_", "-"): key for key in names if "." in key}
        close = [ends[end] for end in get_close_matches(word, ends, n=1, cutoff=_CLOSE)]
    return f"; did you mean {names[close[0]]!r}?" if close else ""


def nearest_or_all(word: str, known: Sequence[str]) -> str:
    """Return what `nearest` returns, or else all known words, those of the same table where a word has one."""
    table = word[: word.find(".") + 1] or "none"
    return nearest(word, known) or f", which has {', '.join([n for n in known if n.startswith(table)] or known)}"


class _NotGiven:
    def __str__(self) -> str:
        return "(not given)"


NOT_GIVEN = _NotGiven()
"""Value in the error message for a missing required field."""
