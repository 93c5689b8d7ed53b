"""Terminal output: tables, units and progress; safe from control characters, and from a closed terminal."""

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
from typing import Self, TextIO, cast

from axonn_jax.core.errors import without_credentials

# A pipe without a reader, a closed terminal, and a descriptor that is not open.
_CLOSED_ERRNOS = (errno.EPIPE, errno.EIO, errno.EBADF)


def printable(text: str) -> str:
    """Escape control characters of a text, such as escape codes and bidirectional overrides."""
    return "".join(char if char.isprintable() or char in "\n\t" else repr(char)[1:-1] for char in text)


def counted(count: int, noun: str) -> str:
    """Return a number with a regular noun, such as `2 processes`."""
    return f"{count:,} {noun}{'' if count == 1 else 'es' if noun.endswith('s') else 's'}"


def say(text: str) -> None:
    """Print text on standard error, without credentials and control characters; a closed stream is ignored."""
    with unheard():
        # A single write, so that lines of several processes do not interleave.
        encoding = getattr(sys.stderr, "encoding", None) or "utf-8"
        sys.stderr.write(
            printable(without_credentials(text)).encode(encoding, "backslashreplace").decode(encoding) + "\n"
        )
        sys.stderr.flush()


def columns() -> int:
    """Return the terminal's width in columns, between 40 and 400."""
    return max(40, min(400, shutil.get_terminal_size().columns))


def wrapped(text: str, width: int, indent: str = "") -> list[str]:
    """Wrap a text into lines without breaking words; all lines but the first get the indent."""
    return textwrap.wrap(text, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False) or [""]


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], left: Collection[int] = ()) -> list[str]:
    """Format a table.

    Args:
        heads: Headings of the columns.
        rows: Cells of each row.
        left: Indices of left-aligned columns; all others are right-aligned.

    Returns:
        The table's lines.
    """
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    lines = [
        "  ".join(cell.ljust(width) if at in left else cell.rjust(width) for at, (cell, width) in enumerate(cells))
        for cells in (list(zip(row, widths, strict=True)) for row in (heads, *rows))
    ]
    return [line.rstrip() for line in lines] if len(heads) - 1 in left else lines


def duration(seconds: float) -> str:
    """Format seconds as ``1:02:03`` or ``2:03``."""
    rounded = int(seconds + 0.5)
    hours, minutes, remainder = rounded // 3600, rounded // 60 % 60, rounded % 60
    return f"{hours}:{minutes:02d}:{remainder:02d}" if hours else f"{minutes}:{remainder:02d}"


def age(seconds: float) -> str:
    """Format seconds in a suitable unit, such as ``7 min`` or ``3 d``."""
    for limit, size, unit in ((120, 1, "s"), (7200, 60, "min"), (172_800, 3600, "h")):
        if seconds < limit:
            return f"{max(seconds, 0) / size:.0f} {unit}"
    return f"{seconds / 86_400:.0f} d"


def size(count: float) -> str:
    """Format a number of bytes in a suitable unit, such as ``1.3 GB``."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


@contextlib.contextmanager
def unheard() -> Iterator[None]:
    """Context that ignores failures to write to standard error; once it is closed, further text is discarded."""
    try:
        yield
    except OSError as error:
        # Other errors, such as a full disk, may be temporary: the text is lost, but the stream stays.
        if error.errno in _CLOSED_ERRNOS:
            with contextlib.suppress(OSError):
                _lead_nowhere(sys.stderr.fileno())
    except (ValueError, AttributeError):
        if sys.stderr is not None and not getattr(sys.stderr, "closed", False):
            raise


def unfailing() -> TextIO:
    """Return standard error for a library's console, with the stream's attributes, but writes that never fail."""
    return cast(TextIO, _Unfailing(sys.stderr))


class _Unfailing:
    def __init__(self, stream: TextIO):
        self._stream = stream

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with unheard():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with unheard():
            self._stream.flush()


def open_missing() -> None:
    """Open the closed standard streams of a command (``2>&-``) on the null device."""
    # Otherwise the next file that is opened, such as a checkpoint, would get the descriptor, and what is printed to it.
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            _lead_nowhere(number)
    if sys.stdout is None:
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(2, "w", errors="backslashreplace", closefd=False)  # noqa: SIM115


def reader_closed(stream: TextIO) -> bool:
    """Return True if a stream is a pipe without a reader (``| head``), and discard further text to it."""
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
    """Flush standard error at the end of a command; the interpreter's flush at exit could change the status."""
    try:
        sys.stderr.flush()
    except (OSError, ValueError):
        with contextlib.suppress(OSError, ValueError):
            _lead_nowhere(sys.stderr.fileno())
    reader_closed(sys.stderr)


@contextlib.contextmanager
def libraries_on_stderr() -> Iterator[None]:
    """Context in which libraries' output on stdout goes to stderr, including that of C++ code such as gloo."""
    # Replace the descriptor, since native code does not use `sys.stdout`.
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


def redraws(stream: TextIO) -> bool:
    """Return True if a stream can redraw lines: a terminal, unless it is a dumb one."""
    return bool(stream.isatty()) and os.environ.get("TERM", "").lower() not in ("dumb", "unknown")


class Ticker:
    """Progress of a command: on a terminal a live line after two seconds, elsewhere a line every ten seconds.

    Args:
        activity: The current activity.
        total: Number of units in all; 0 if unknown.
        stream: The stream; None: standard error.
        first: Seconds until the first line; 0: the default.
        every: Seconds between lines; 0: the default.
    """

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
        """Set the activity, the total number of units (0 if unknown), their name, and the number of them done."""
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
