"""JSON and TOML that strangers may have written: read in bounded time and memory; JSON checked against types.

A checkpoint, prepared data, a timeline or a machine file may come from anywhere, and a checksum that lies beside what
it is a checksum of proves nothing about who wrote both.
"""

import gc
import json
import math
import os
import stat
import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, BinaryIO, Never, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")

_NOUNS = {int: "a whole number", float: "a number", str: "a text", bool: "true or false", NoneType: "null"}
_LARGEST = 2**63 - 1
_TOML_LINE = 10_000
TOML_BYTES = 1_000_000
"""So much of a TOML file is read."""


def open_regular(path: Path, inside: Path | None = None) -> BinaryIO:
    """Opens a regular file to read; never waits for a pipe or a device.

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
    """Writes a file that is there whole, or as it was, also after a crash; a link is replaced, not followed."""
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


def flush(path: Path) -> None:
    """Waits until a file, or a directory's list of names, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def parse_json(raw: bytes) -> Any:
    """The value that JSON bytes hold; ``ValueError`` for what is not JSON, not finite or nested too deeply."""
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
    """What a JSON file holds; raises as `read_bytes` and `parse_json` do."""
    return parse_json(read_bytes(path, most, inside))


def parse_toml(text: str) -> dict[str, Any]:
    """The tables of TOML; ``ValueError`` for what is not TOML, nested too deeply or has lines of excessive length."""
    if max(map(len, text.split("\n"))) > _TOML_LINE:  # the time for a key grows with the square of its parts
        raise ValueError(f"a line of over {_TOML_LINE:,} characters")
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def typed(kind: type[T], value: Any, name: str = "") -> T:
    """Returns JSON as an instance of a type: dataclasses by their fields, tuples, mappings of texts, plain values.

    Nothing is guessed: only a whole number is taken for a float. Fields that a dataclass does not have are left out,
    so that later versions may write more. `name` is what the value is called in errors.

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
    if origin is tuple:
        if type(value) is not list:
            raise _wrong(name, value, "a list")
        return tuple(_typed(inner[0], one, f"{name}[{at}]") for at, one in enumerate(value))
    if origin is not None:  # Mapping
        if type(value) is not dict:
            raise _wrong(name, value, "an object")
        return {key: _typed(inner[1], one, f"{name}[{key!r}]") for key, one in value.items()}
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
