"""Files: untrusted JSON and TOML read in bounded time and memory, atomic writes, and locks.

A checkpoint, prepared data, a timeline or a machine file may come from anywhere, and a checksum next to a file proves
nothing about the author of either.
"""

import contextlib
import errno
import fcntl
import gc
import io
import json
import math
import os
import socket
import stat
import time
import tomllib
from collections.abc import Iterable, Iterator
from io import BufferedReader
from pathlib import Path
from typing import Any, Never

from axonn_jax.core.errors import UserError

_TOML_LINE, _TOML_POINTS = 10_000, 250  # longest line, and the most dots in it
_POINTER = b"version https://git-lfs.github.com/spec/"
# Errors of file systems without locks, such as Lustre mounted without flock.
_WITHOUT_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
_OF_CONTAINER, _OF_VALUE = 200, 70  # bytes of Python's objects for a list or object with one entry, and for a text
_MOST_PARSED = 1 << 30  # bytes of parsed JSON; a tokenizer of a million tokens and two million merges takes 80 % of it
_PIECE = 1 << 20
_HOLDER_BYTES = 200  # bytes read of a lock holder's text
_SIGHT_S = 10
TOML_BYTES = 1_000_000
"""Largest size of a TOML file, in bytes."""


def open_regular(path: Path, inside: Path | None = None) -> BufferedReader:
    """Open a regular file for reading, without ever waiting for a pipe or a device.

    Args:
        path: The file.
        inside: Directory that links must not lead out of; None: links may lead anywhere.

    Raises:
        OSError: The file cannot be read.
        ValueError: It is not a regular file, or a link leads out of `inside`.
    """
    if inside is not None:
        try:
            path = path.resolve()
            leads_out = not path.is_relative_to(inside.resolve())
        except RuntimeError:  # a link to itself in Python 3.11 and 3.12; in later versions opening it fails
            leads_out = True
        if leads_out:
            raise ValueError("a link that leads elsewhere")
    # Check the open descriptor, since the path could be replaced between a check and the opening.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    raise ValueError("not a regular file")


def read_bytes(path: Path, most: int, inside: Path | None = None) -> bytes:
    """Read a regular file; raise errors like `open_regular`, and ``ValueError`` for more than `most` bytes."""
    with open_regular(path, inside) as file:
        if (size := os.fstat(file.fileno()).st_size) > most:
            raise ValueError(f"{size:,} bytes, more than the {most:,} that are read")
        return file.read(most)


def look_at(field: str, path: str, *, empty: bool = True) -> None:
    """Check that a user's path can be inspected or does not exist, so that later checks only see these two cases.

    Args:
        field: Name of the setting in errors.
        path: The path.
        empty: True if an empty text stands for no path; otherwise it would mean the current directory.

    Raises:
        UserError: The path cannot be inspected, such as one with a name that is too long.
    """
    if not (path or empty):
        raise UserError(field, path, "a path; this text is empty")
    try:
        if os.path.isdir(path) and not os.access(path, os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError as error:
        raise UserError(field, path, f"a path that can be looked at; {error.strerror}") from None


def open_for_writing(path: str, flags: int) -> int:
    """Open a file for writing, as an `opener` of `open`: follow no link, and wait for no reader of a pipe."""
    return os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)


def write_atomically(path: Path, raw: bytes) -> None:
    """Write a file atomically: even after a crash the path has either the old or the new content.

    A link at the path is replaced, not followed. Raises ``OSError`` if the file cannot be written.
    """
    part = path.with_name(f".{path.name}.part")
    part.unlink(missing_ok=True)
    try:
        with part.open("xb") as file:
            file.write(raw)
        flush(part)  # the content must be on disk before the name points to it
        part.replace(path)
        flush(path.parent)
    except OSError:
        part.unlink(missing_ok=True)
        raise


def new_figure(width: float, height: float) -> Any:
    """Return a matplotlib figure of a size in inches, with 200 pixels per inch, twice what a page shows."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained", dpi=200)


def save_picture(figure: Any, path: Path) -> None:
    """Write a matplotlib figure like `write_atomically`; raise ``ValueError`` for an unknown suffix of the path."""
    raw = io.BytesIO()
    figure.savefig(raw, format=path.suffix.removeprefix(".") or "(none)")
    write_atomically(path, raw.getvalue())


def flush(path: Path) -> None:
    """Wait until a file, or a directory's entries, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check_pointer(raw: bytes) -> None:
    """Raise ``ValueError`` for a Git LFS pointer, which a checkout without LFS has instead of a large file."""
    if raw.startswith(_POINTER):
        raise ValueError("a pointer of Git LFS, in the place of the file that `git lfs pull` fetches")


def parse_json(raw: bytes) -> Any:
    """Parse untrusted JSON.

    Args:
        raw: The bytes, which may start with a byte-order mark.

    Raises:
        ValueError: The bytes are not JSON, have infinite numbers or deep nesting, or would need too much memory.
    """
    check_pointer(raw)
    # A megabyte of empty lists becomes sixty as Python objects, so estimate the memory before parsing.
    if _parsed_bytes([raw]) > _MOST_PARSED and (size := _parsed_bytes(_without_texts(raw))) > _MOST_PARSED:
        most = f"{_MOST_PARSED / 1e9:.1f} GB, which are the most"
        raise ValueError(f"lists and objects that take about {size / 1e9:.1f} GB once they are read, more than {most}")
    collects = gc.isenabled()
    # The garbage collector would scan everything parsed so far again and again: six times slower for millions of lists.
    gc.disable()
    try:
        return json.loads(raw.decode("utf-8-sig"), parse_constant=_refused, parse_float=_finite)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    finally:
        if collects:
            gc.enable()


def read_json(path: Path, most: int, inside: Path | None = None) -> Any:
    """Read a JSON file; raise errors like `read_bytes` and `parse_json`."""
    return parse_json(read_bytes(path, most, inside))


def parse_toml(text: str) -> dict[str, Any]:
    """Parse untrusted TOML; raise ``ValueError`` for other text, deep nesting, or excessively long or dotted lines."""
    # The time to parse a dotted key grows with the square of its parts, so bound them first.
    for number, line in enumerate(text.split("\n"), 1):
        if len(line) > _TOML_LINE or line.count(".") > _TOML_POINTS:
            raise ValueError(f"a line of over {_TOML_LINE:,} characters or {_TOML_POINTS} points, which is {number}")
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _parsed_bytes(pieces: Iterable[bytes]) -> int:
    # An estimate from brackets and commas, without the bytes of the texts.
    counts = ((piece.count(b"[") + piece.count(b"{"), piece.count(b",")) for piece in pieces)
    return sum(_OF_CONTAINER * containers + _OF_VALUE * commas for containers, commas in counts)


def _without_texts(raw: bytes) -> Iterator[bytes]:
    """Yield JSON in pieces without the contents of its texts, which may have brackets and commas too."""
    within, escape = False, b""
    for at in range(0, len(raw), _PIECE):
        # A backslash at the end of a piece belongs to the first character of the next one.
        piece = (escape + raw[at : at + _PIECE]).replace(rb"\\", b"")
        escape = b"\\" if piece.endswith(b"\\") else b""
        parts = piece.removesuffix(escape).replace(rb"\"", b"").split(b'"')
        yield b"".join(parts[within::2])
        within ^= len(parts) % 2 == 0


def _finite(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise ValueError(f"{text[:40]} is no finite number")
    return number


def _refused(text: str) -> Never:
    raise ValueError(f"{text} is no JSON")


class LockHeldError(Exception):
    """Refusal of a lock that another process has; the text names it, as in "process 12 on node3 since ..."."""


@contextlib.contextmanager
def file_lock(path: Path) -> Iterator[bool]:
    """Context that locks a file, which it creates and removes; yields False if the file system has no locks.

    A file that a killed process has left is not locked. On NFS the lock excludes processes on all hosts.

    Args:
        path: The lock file.

    Raises:
        Held: Another process has the lock.
        OSError: The file cannot be created or written.
    """
    while True:
        file = open_for_writing(os.fspath(path), os.O_RDWR | os.O_CREAT)
        try:
            locked = _take(file)
            # Try again if the previous holder removed the file between our opening and locking it.
            if _is_at(file, path):
                try:
                    os.ftruncate(file, 0)
                    since = time.strftime("%Y-%m-%d %H:%M:%S %Z")
                    os.pwrite(file, f"process {os.getpid()} on {socket.gethostname()} since {since}\n".encode(), 0)
                    yield locked
                finally:
                    with contextlib.suppress(OSError):
                        # While still locked, so that a process that has opened the file finds it removed.
                        os.unlink(path)
                return
        finally:
            os.close(file)


def in_sight(path: Path) -> bool:
    """Return True if a path that another process has created becomes visible here within ten seconds."""
    # NFS may show new files of another host late.
    end = time.monotonic() + _SIGHT_S
    while not path.exists():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


@contextlib.contextmanager
def created_folder(folder: Path) -> Iterator[None]:
    """Context that creates a folder with its parents, and at its end removes those of them that are still empty."""
    new = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    finally:
        for path in new:
            with contextlib.suppress(OSError):
                path.rmdir()


def _take(file: int) -> bool:
    if not stat.S_ISREG(os.fstat(file).st_mode):
        raise OSError(errno.EINVAL, "not a regular file")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(file, _HOLDER_BYTES, 0).decode("utf-8", "backslashreplace")
        raise LockHeldError(" ".join(holder.split()) or "another process") from None
    except OSError as error:
        if error.errno in _WITHOUT_LOCKS:
            return False
        raise
    return True


def _is_at(file: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file), os.stat(path, follow_symlinks=False))
    except FileNotFoundError:
        return False
