"""Lines for people on standard error: what strangers wrote cannot steer the terminal, and a closed one ends nothing."""

import contextlib
import errno
import io
import os
import select
import sys
from collections.abc import Iterator
from typing import Any, TextIO, cast

_GONE = (errno.EPIPE, errno.EIO, errno.EBADF)  # a pipe without a reader, a terminal that was closed, no file at all


def printable(text: str) -> str:
    """The text with characters that a terminal would obey (escapes, overrides of direction) spelled out."""
    return "".join(char if char.isprintable() or char in "\n\t" else repr(char)[1:-1] for char in text)


def say(text: str) -> None:
    """Prints lines on standard error in one write; where nobody reads them any more, work goes on without."""
    with unheard():
        encoding = getattr(sys.stderr, "encoding", None) or "utf-8"
        sys.stderr.write(printable(text).encode(encoding, "backslashreplace").decode(encoding) + "\n")
        sys.stderr.flush()


@contextlib.contextmanager
def unheard() -> Iterator[None]:
    """Lets writes to standard error fail; once its reader is gone, what is written to it goes nowhere."""
    try:
        yield
    except OSError as error:
        if error.errno in _GONE:
            with contextlib.suppress(OSError):
                _lead_nowhere(sys.stderr.fileno())
    except (ValueError, AttributeError):
        if sys.stderr is not None and not getattr(sys.stderr, "closed", False):
            raise


def unfailing() -> TextIO:
    """Standard error for a library's console: a terminal if it is one, but a write that fails raises nothing."""
    return cast(TextIO, _Unfailing(sys.stderr))


class _Unfailing(io.TextIOBase):
    def __init__(self, stream: Any):
        self._stream = stream

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._stream.encoding or "utf-8"

    def isatty(self) -> bool:
        return bool(self._stream.isatty())

    def fileno(self) -> int:
        return int(self._stream.fileno())

    def write(self, text: str) -> int:
        with unheard():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with unheard():
            self._stream.flush()


def open_missing() -> None:
    """Opens those of a command's standard streams that it was started without (``2>&-``), on the null device.

    Else the next file to be opened, a checkpoint say, would take the number and the lines of such a stream.
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
    """Whether a stream is a pipe that nobody reads any more (``| head``); if so, what is still written goes nowhere."""
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
    """Flushes standard error at the end of a command, so that the interpreter's own flush cannot change its status."""
    try:
        sys.stderr.flush()
    except (OSError, ValueError):
        with contextlib.suppress(OSError, ValueError):
            _lead_nowhere(sys.stderr.fileno())
    reader_is_gone(sys.stderr)


def _lead_nowhere(number: int) -> None:
    null = os.open(os.devnull, os.O_RDWR)
    if null != number:
        os.dup2(null, number)
        os.close(null)
    os.set_inheritable(number, True)
