"""Files: JSON and TOML of strangers, read in bounded time and memory and checked; whole writes; locks.

A checkpoint, prepared data, a timeline or a machine file may come from anywhere, and a checksum beside its file proves
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
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from io import BufferedReader
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Never, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")

_NOUNS = {int: "a whole number", float: "a number", str: "a text", bool: "true or false", NoneType: "null"}
_LARGEST = 2**63 - 1
_TOML_LINE = 10_000
_POINTER = b"version https://git-lfs.github.com/spec/"
_WITHOUT_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)  # Lustre mounted without flock, say
_HOLDER_BYTES = 200  # bytes read of a lock holder's text
_SIGHT_S = 10
TOML_BYTES = 1_000_000
"""Largest size of a TOML file, in bytes."""


def open_regular(path: Path, inside: Path | None = None) -> BufferedReader:
    """Open a regular file to read; never waits for a pipe or a device.

    Raises ``OSError`` where it cannot be read, ``ValueError`` where it is no regular file, or where links lead to one
    that is not below the directory `inside`.
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


def save_picture(figure: Any, path: Path, **options: Any) -> None:
    """Write matplotlib's figure as `replace_whole` does, in the format that the path's suffix names.

    Raises ``ValueError`` for an unknown suffix.
    """
    raw = io.BytesIO()
    figure.savefig(raw, format=path.suffix.removeprefix(".") or "(none)", **options)
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
    """Parse JSON bytes; ``ValueError`` for bytes that are not JSON, not finite or nested too deeply."""
    check_pointer(raw)
    collects = gc.isenabled()
    gc.disable()  # it would look at all that has been read again and again: six times the time for millions of lists
    try:
        return json.loads(raw.decode("utf-8"), parse_constant=_refused, parse_float=_finite)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    finally:
        if collects:
            gc.enable()


def read_json(path: Path, most: int, inside: Path | None = None) -> Any:
    """Read the value of a JSON file; raise errors as `read_bytes` and `parse_json` do."""
    return parse_json(read_bytes(path, most, inside))


def parse_toml(text: str) -> dict[str, Any]:
    """Parse TOML; ``ValueError`` for text that is not TOML, is nested too deeply or has lines of excessive length."""
    if max(map(len, text.split("\n"))) > _TOML_LINE:  # the time for a key grows with the square of its parts
        raise ValueError(f"a line of over {_TOML_LINE:,} characters")
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def typed(kind: type[T], value: Any, name: str = "") -> T:
    """Return JSON as an instance of a type: dataclasses by their fields, tuples, mappings of texts, plain values.

    Nothing is guessed: only a whole number is taken for a float. Fields that a dataclass does not have are left out, so
    that later versions may write more. `name` is the value's name in errors.

    Raises:
        ValueError: a field is missing or not of its type; the text names it.
    """
    made: T = _typed(kind, value, name)
    return made


def _typed(kind: Any, value: Any, name: str) -> Any:
    if kind is Any or (kind is type(value) and kind is not int):
        return value
    if is_dataclass(kind):
        return _built(kind, value, name)
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        if value is None and NoneType in inner:
            return None
        return _typed(next(option for option in inner if option is not NoneType), value, name)
    if origin is Literal:
        if value not in inner:
            raise _wrong(name, value, f"one of {', '.join(map(str, inner))}")
        return value
    if origin is tuple:
        if type(value) is not list:
            raise _wrong(name, value, "a list")
        return tuple(_typed(inner[0], entry, f"{name}[{at}]") for at, entry in enumerate(value))
    if origin is not None:  # Mapping
        if type(value) is not dict:
            raise _wrong(name, value, "an object")
        return {key: _typed(inner[1], entry, f"{name}[{key!r}]") for key, entry in value.items()}
    if kind is float and type(value) is int and abs(value) <= _LARGEST:
        return float(value)
    if type(value) is not kind or (kind is int and abs(value) > _LARGEST):
        raise _wrong(name, value, _NOUNS[kind])
    return value


def _built(kind: Any, value: Any, name: str) -> Any:
    if type(value) is not dict:
        raise _wrong(name, value, "an object")
    prefix = f"{name}." if name else ""
    given = {}
    for key, (hint, required) in _fields(kind).items():
        if key in value:
            given[key] = _typed(hint, value[key], prefix + key)
        elif required:
            raise ValueError(f"{_brief(prefix + key)} is missing")
    return kind(**given)


@cache
def _fields(kind: Any) -> Mapping[str, tuple[Any, bool]]:
    hints = get_type_hints(kind)
    return {f.name: (hints[f.name], f.default is MISSING and f.default_factory is MISSING) for f in fields(kind)}


def _wrong(name: str, value: Any, accepted: str) -> ValueError:
    shown = _NOUNS.get(type(value), "a list" if type(value) is list else "an object")
    if type(value) in (int, float, str):
        shown = repr(value) if len(repr(value)) <= 40 else f"{repr(value)[:40]}..."
    return ValueError(f"{_brief(name) or 'all of it'} = {shown}, not {accepted}")


def _brief(name: str) -> str:
    return name if len(name) <= 80 else f"{name[:80]}..."  # a stranger chose the keys in it


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
    """Hold the lock of a file, which it makes and at the end removes; False where the file system has no locks.

    A file that a killed process left is nobody's lock. Over NFS the lock counts on all hosts.

    Raises:
        Held: another process holds it.
        OSError: the file cannot be made or written.
    """
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
        try:
            locked = _take(file)
            if _is_at(file, path):
                try:
                    os.ftruncate(file, 0)
                    os.pwrite(file, _me().encode(), 0)
                    yield locked
                finally:
                    with contextlib.suppress(OSError):
                        os.unlink(path)  # while it is locked: a process that opened it meanwhile sees that it is gone
                return
        finally:
            os.close(file)


def in_sight(path: Path) -> bool:
    """Return True if a path that another process has made is seen here, at once or within ten seconds (NFS)."""
    end = time.monotonic() + _SIGHT_S
    while not path.exists():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


@contextlib.contextmanager
def made(folder: Path) -> Iterator[None]:
    """Make a folder and its missing parents; at the end remove those that it made and that are still empty."""
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
    """True if the open file is still the one at the path, which its last holder may just have removed."""
    try:
        return os.path.samestat(os.fstat(file), os.stat(path, follow_symlinks=False))
    except FileNotFoundError:
        return False


def _me() -> str:
    return f"process {os.getpid()} on {socket.gethostname()} since {time.strftime('%Y-%m-%d %H:%M:%S %Z')}\n"
