"""Lines for people on standard error: what strangers wrote cannot steer the terminal, and a closed one ends nothing."""

import contextlib
import errno
import os
import sys
from collections.abc import Iterator

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
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
