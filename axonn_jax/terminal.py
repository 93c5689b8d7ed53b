"""Lines for people: tables, units, signs of life. Strangers' text steers no terminal, and a closed one ends nothing."""

import contextlib
import errno
import os
import select
import shutil
import sys
import textwrap
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from types import TracebackType
from typing import Any, Self, TextIO, cast

from axonn_jax.errors import without_credentials

# A pipe without a reader, a closed terminal, and a descriptor that is not open.
_CLOSED_ERRNOS = (errno.EPIPE, errno.EIO, errno.EBADF)


def printable(text: str) -> str:
    """Return the text with control characters (escapes, overrides of direction) spelled out."""
    return "".join(char if char.isprintable() or char in "\n\t" else repr(char)[1:-1] for char in text)


def counted(count: int, noun: str) -> str:
    """Return a number with its noun, as `2 processes`; of regular nouns."""
    return f"{count:,} {noun}{'' if count == 1 else 'es' if noun.endswith('s') else 's'}"


def say(text: str) -> None:
    """Print lines on standard error in one write, without passwords; without a reader work goes on."""
    with unheard():
        encoding = getattr(sys.stderr, "encoding", None) or "utf-8"
        sys.stderr.write(
            printable(without_credentials(text)).encode(encoding, "backslashreplace").decode(encoding) + "\n"
        )
        sys.stderr.flush()


def columns() -> int:
    """Return the width of help texts: the terminal's columns, from 40 to 400."""
    return max(40, min(400, shutil.get_terminal_size().columns))


def wrapped(text: str, width: int, indent: str = "") -> list[str]:
    """Return the lines of a text, those behind the first with an indent; no word is broken."""
    return textwrap.wrap(text, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False) or [""]


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], left: Collection[int] = ()) -> list[str]:
    """Return the lines of a table, each column as wide as the widest cell; the columns `left` begin at the same
    place."""
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    lines = [
        "  ".join(cell.ljust(width) if at in left else cell.rjust(width) for at, (cell, width) in enumerate(cells))
        for cells in (list(zip(row, widths, strict=True)) for row in (heads, *rows))
    ]
    return [line.rstrip() for line in lines] if len(heads) - 1 in left else lines


def duration(seconds: float) -> str:
    """``1:02:03`` or ``2:03``."""
    rounded = int(seconds + 0.5)
    hours, minutes, remainder = rounded // 3600, rounded // 60 % 60, rounded % 60
    return f"{hours}:{minutes:02d}:{remainder:02d}" if hours else f"{minutes}:{remainder:02d}"


def age(seconds: float) -> str:
    """Return a time in a fitting unit, such as ``7 min`` or ``3 d``."""
    for limit, size, unit in ((120, 1, "s"), (7200, 60, "min"), (172_800, 3600, "h")):
        if seconds < limit:
            return f"{max(seconds, 0) / size:.0f} {unit}"
    return f"{seconds / 86_400:.0f} d"


def size(count: float) -> str:
    """Return an amount of bytes in a fitting unit, such as ``1.3 GB``."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


@contextlib.contextmanager
def unheard() -> Iterator[None]:
    """Ignore failures to write to standard error; without a reader further text goes nowhere."""
    try:
        yield
    except OSError as error:
        if error.errno in _CLOSED_ERRNOS:
            with contextlib.suppress(OSError):
                _lead_nowhere(sys.stderr.fileno())
    except (ValueError, AttributeError):
        if sys.stderr is not None and not getattr(sys.stderr, "closed", False):
            raise


def unfailing() -> TextIO:
    """Return standard error for a library's console: a terminal only on one; failed writes raise nothing."""
    return cast(TextIO, _Unfailing(sys.stderr))


class _Unfailing:
    def __init__(self, stream: Any):
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with unheard():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with unheard():
            self._stream.flush()


def open_missing() -> None:
    """Open missing standard streams of a command (``2>&-``) on the null device.

    Else the next opened file, a checkpoint say, would take the number and the lines of such a stream.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            _lead_nowhere(number)
    if sys.stdout is None:
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(2, "w", errors="backslashreplace", closefd=False)  # noqa: SIM115


def reader_is_gone(stream: TextIO) -> bool:
    """True if a stream is a pipe without a reader (``| head``); if so, further text goes nowhere."""
    try:
        number = stream.fileno()
    except (OSError, ValueError):  # not a file, or closed
        return False
    poll = select.poll()
    poll.register(number, select.POLLOUT)
    if not any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0)):
        return False
    _lead_nowhere(number)
    return True


def last_flush() -> None:
    """Flush standard error at the end of a command: the interpreter's own flush could change the status."""
    try:
        sys.stderr.flush()
    except (OSError, ValueError):
        with contextlib.suppress(OSError, ValueError):
            _lead_nowhere(sys.stderr.fileno())
    reader_is_gone(sys.stderr)


@contextlib.contextmanager
def libraries_on_stderr() -> Iterator[None]:
    """Send the prints of libraries below Python, such as gloo, from stdout to stderr meanwhile."""
    sys.stdout.flush()
    real = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(real, 1)
        os.close(real)


def _lead_nowhere(number: int) -> None:
    null = os.open(os.devnull, os.O_RDWR)
    if null != number:
        os.dup2(null, number)
        os.close(null)
    os.set_inheritable(number, True)


def redraws(stream: Any) -> bool:
    """Return True if lines on a stream can be drawn again: on a terminal, unless a dumb one."""
    return bool(stream.isatty()) and os.environ.get("TERM", "").lower() not in ("dumb", "unknown")


class Ticker:
    """Progress of a command: on a terminal a live line after two seconds, elsewhere a line every ten."""

    def __init__(
        self, activity: str, total: int = 0, *, stream: TextIO | None = None, first: float = 0.0, every: float = 0.0
    ):
        self._stream = unfailing() if stream is None else stream
        self._live = redraws(self._stream)
        self._first, self._every = first or (2.0 if self._live else 10.0), every or (0.5 if self._live else 10.0)
        self._over, self._thread = threading.Event(), threading.Thread(target=self._watch, daemon=True)
        self._start, self._shown = time.monotonic(), False
        self.now(activity, total)

    def now(self, activity: str, total: int = 0, unit: str = "tasks", done: int = 0) -> None:
        """Set the activity, the units in all if known, and the units done."""
        self._activity, self._total, self._done, self._unit = activity, total, done, unit

    def done(self, count: int) -> None:
        """Set the number of units done."""
        self._done = count

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()
        if self._live and self._shown:
            print("\r\x1b[K", end="", file=self._stream, flush=True)

    def _watch(self) -> None:
        wait = self._first
        while not self._over.wait(wait):
            line = f"{self._activity}, {duration(time.monotonic() - self._start)}"
            if self._total:
                line += f": {self._done:,} of {self._total:,} {self._unit}"
            ends = {"end": ""} if self._live else {"end": "\n"}
            print(("\r\x1b[K" if self._live else "") + line, **ends, file=self._stream, flush=True)
            wait, self._shown = self._every, True
