"""Files: JSON and TOML of strangers, read in bounded time and memory and checked; whole writes; locks.

A checkpoint, prepared data, a timeline or a machine file may come from anywhere, and a checksum beside a file proves
nothing about the author of both.
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

from axonn_jax.errors import UserError

_TOML_LINE, _TOML_POINTS = 10_000, 250
_POINTER = b"version https://git-lfs.github.com/spec/"
_WITHOUT_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)  # Lustre mounted without flock, say
_OF_CONTAINER, _OF_VALUE = 200, 70  # bytes that Python takes for a list or an object of one entry, and for a text
_MOST_PARSED = 1 << 30  # of them: a tokenizer of a million tokens and two million merges takes 0.8 of it
_PIECE = 1 << 20
_HOLDER_BYTES = 200  # bytes read of a lock holder's text
_SIGHT_S = 10
TOML_BYTES = 1_000_000
"""Largest size of a TOML file, in bytes."""


def open_regular(path: Path, inside: Path | None = None) -> BufferedReader:
    """Open a regular file to read; never waits for a pipe or a device.

    Raises ``OSError`` for an unreadable file, ``ValueError`` for another kind of file, or for links out of the
    directory `inside`.
    """
    if inside is not None:
        try:
            path = path.resolve()
            leads_out = not path.is_relative_to(inside.resolve())
        except RuntimeError:  # a link to itself, in Python 3.11 and 3.12; later ones leave it to the opening
            leads_out = True
        if leads_out:
            raise ValueError("a link that leads elsewhere")
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    raise ValueError("not a regular file")


def read_bytes(path: Path, most: int, inside: Path | None = None) -> bytes:
    """A regular file's bytes; raises as `open_regular` does, and ``ValueError`` where there are over `most`."""
    with open_regular(path, inside) as file:
        if (size := os.fstat(file.fileno()).st_size) > most:
            raise ValueError(f"{size:,} bytes, more than the {most:,} that are read")
        return file.read(most)


def look_at(field: str, path: str, *, empty: bool = True) -> None:
    """Raise ``UserError`` where a user's path can neither be looked at nor be missing, as one with a name too long.

    An `empty` one stands for none where that is allowed; else it would be the current directory.
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


def own_file(path: str, flags: int) -> int:
    """Open a file to write, for the `opener` of `open`: through no link, and waiting for no pipe's reader."""
    return os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)


def replace_whole(path: Path, raw: bytes) -> None:
    """Write a whole file: also after a crash the path has the new content or the old; a link is replaced."""
    part = path.with_name(f".{path.name}.part")
    part.unlink(missing_ok=True)
    try:
        with part.open("xb") as file:
            file.write(raw)
        flush(part)
        part.replace(path)
        flush(path.parent)
    except OSError:
        part.unlink(missing_ok=True)
        raise


def new_figure(width: float, height: float) -> Any:
    """Return matplotlib's figure of a size in inches, with 200 pixels an inch, of which a page shows half."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained", dpi=200)


def save_picture(figure: Any, path: Path) -> None:
    """Write matplotlib's figure as `replace_whole` does, in the format of the path's suffix.

    Raises ``ValueError`` for an unknown suffix.
    """
    raw = io.BytesIO()
    figure.savefig(raw, format=path.suffix.removeprefix(".") or "(none)")
    replace_whole(path, raw.getvalue())


def flush(path: Path) -> None:
    """Wait until a file, or a directory's list of names, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check_pointer(raw: bytes) -> None:
    """Raise ``ValueError`` for a pointer of Git LFS in the place of a large file."""
    if raw.startswith(_POINTER):
        raise ValueError("a pointer of Git LFS, in the place of the file that `git lfs pull` fetches")


def parse_json(raw: bytes) -> Any:
    """Parse JSON bytes; ``ValueError`` for other bytes, infinite numbers, deep nesting or more than memory is for.

    A byte-order mark in front is left out. A megabyte of empty lists takes sixty once it is read, so their number is
    looked at first.
    """
    check_pointer(raw)
    if _parsed_bytes([raw]) > _MOST_PARSED and (size := _parsed_bytes(_without_texts(raw))) > _MOST_PARSED:
        most = f"{_MOST_PARSED / 1e9:.1f} GB, which are the most"
        raise ValueError(f"lists and objects that take about {size / 1e9:.1f} GB once they are read, more than {most}")
    collects = gc.isenabled()
    gc.disable()  # it would look at all that has been read again and again: six times the time for millions of lists
    try:
        return json.loads(raw.decode("utf-8-sig"), parse_constant=_refused, parse_float=_finite)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    finally:
        if collects:
            gc.enable()


def read_json(path: Path, most: int, inside: Path | None = None) -> Any:
    """Read the value of a JSON file; raise errors as `read_bytes` and `parse_json` do."""
    return parse_json(read_bytes(path, most, inside))


def parse_toml(text: str) -> dict[str, Any]:
    """Parse TOML; ``ValueError`` for other text, deep nesting, or lines of excessive length or with too many points."""
    for number, line in enumerate(text.split("\n"), 1):  # the time for a key grows with the square of its parts
        if len(line) > _TOML_LINE or line.count(".") > _TOML_POINTS:
            raise ValueError(f"a line of over {_TOML_LINE:,} characters or {_TOML_POINTS} points, which is {number}")
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _parsed_bytes(pieces: Iterable[bytes]) -> int:
    """Bytes that JSON takes once it is read, beside those of its texts, by its brackets and commas."""
    counts = ((piece.count(b"[") + piece.count(b"{"), piece.count(b",")) for piece in pieces)
    return sum(_OF_CONTAINER * containers + _OF_VALUE * commas for containers, commas in counts)


def _without_texts(raw: bytes) -> Iterator[bytes]:
    """Yield JSON in pieces without what is between its quotes, as texts of code have brackets and commas too."""
    within, escape = False, b""
    for at in range(0, len(raw), _PIECE):
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


class Held(Exception):
    """The refusal of a lock that another process holds; the text says which, as in "process 12 on node3 since ..."."""


@contextlib.contextmanager
def held(path: Path) -> Iterator[bool]:
    """Hold the lock of a file, made here and removed at the end; False where the file system has no locks.

    A file left by a killed process is nobody's lock. Over NFS the lock holds on all hosts.

    Raises:
        Held: another process holds the lock.
        OSError: the file cannot be made or written.
    """
    while True:
        file = own_file(os.fspath(path), os.O_RDWR | os.O_CREAT)
        try:
            locked = _take(file)
            if _is_at(file, path):
                try:
                    os.ftruncate(file, 0)
                    since = time.strftime("%Y-%m-%d %H:%M:%S %Z")
                    os.pwrite(file, f"process {os.getpid()} on {socket.gethostname()} since {since}\n".encode(), 0)
                    yield locked
                finally:
                    with contextlib.suppress(OSError):
                        os.unlink(path)  # while it is locked: a process that opened it meanwhile sees that it is gone
                return
        finally:
            os.close(file)


def in_sight(path: Path) -> bool:
    """Return True if another process's path is visible here, at once or within ten seconds (NFS)."""
    end = time.monotonic() + _SIGHT_S
    while not path.exists():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


@contextlib.contextmanager
def made(folder: Path) -> Iterator[None]:
    """Make a folder and missing parents; at the end remove the new ones that are still empty."""
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
        raise Held(" ".join(holder.split()) or "another process") from None
    except OSError as error:
        if error.errno in _WITHOUT_LOCKS:
            return False
        raise
    return True


def _is_at(file: int, path: Path) -> bool:
    """True if the open file is still the one at the path: the last holder may just have removed the path."""
    try:
        return os.path.samestat(os.fstat(file), os.stat(path, follow_symlinks=False))
    except FileNotFoundError:
        return False
