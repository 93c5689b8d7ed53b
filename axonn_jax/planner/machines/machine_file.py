"""A machine file: TOML read and checked field by field, and written."""

import json
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

from axonn_jax.documents import TOML_BYTES, parse_toml, read_bytes
from axonn_jax.errors import NOT_GIVEN, UserError, nearest
from axonn_jax.planner.machines.machine import CollectiveTime, Machine, MatmulShare, Messages, RingRate, check_measured

_FOLDER = Path(__file__).parent

PLATFORMS = ("cpu", "cuda", "rocm", "tpu")

_MOST, _SMALLEST, _LARGEST = 10**9, 1e-15, 1e24
"""Counts; seconds, bytes and operations of machines to come, and shares."""

_ROWS: Mapping[str, tuple[type[Any], tuple[str, ...]]] = {
    "bandwidth": (RingRate, ("inner", "size")),
    "messages": (Messages, ("channel",)),
    "matmuls": (MatmulShare, ("size",)),
    "collectives": (CollectiveTime, ("kind", "inner", "size", "bytes")),
}
"""Lists of tables, and the keys that tell their entries apart."""


def machine_names() -> tuple[str, ...]:
    """The machines that come with the package."""
    return tuple(sorted(path.stem for path in _FOLDER.glob("*.toml")))


def load_machine(name: str) -> Machine:
    """Return a machine that comes with the package, or that of a TOML file whose path is given.

    Raises:
        UserError: there is no such machine or file, or a field of the file is missing, unknown or out of range.
    """
    path = _FOLDER / f"{name}.toml"
    if name not in machine_names():
        path = Path(name)
        if path.suffix != ".toml":
            names = machine_names()
            accepted = f"one of {', '.join(names)}, or the path of a .toml file{nearest(name, names)}"
            raise UserError("--machine", name, accepted)
    try:
        text = read_bytes(path, TOML_BYTES).decode("utf-8")
    except (OSError, ValueError) as error:
        raise UserError("--machine", str(path), f"a machine file that can be read; {error}") from None
    return loads_machine(text, path.stem, str(path))


def loads_machine(text: str, name: str, source: str = "text") -> Machine:
    """Read a machine from TOML text; raise ``UserError`` that names the table and key that are wrong."""
    try:
        raw = parse_toml(text)
    except ValueError as error:
        raise UserError("--machine", source, f"valid TOML; {error}") from None
    hints = get_type_hints(Machine)
    known = [f.name for f in fields(Machine) if f.name != "name"]
    for key, value in raw.items():
        if key not in known:
            raise UserError(
                key, value, f"not a key of a machine file{nearest(key, known)}; those are {', '.join(known)}"
            )
    values: dict[str, Any] = {"name": name}
    for f in fields(Machine):
        if f.name == "name":
            continue
        if f.name not in raw:
            if f.default is MISSING:
                raise UserError(f.name, NOT_GIVEN, f"required in a machine file ({source})")
            continue
        value = raw[f.name]
        if f.name == "title":
            values["title"] = _value("title", value, str)
        elif f.name == "sources":
            if not isinstance(value, list) or not value:
                raise UserError("sources", value, "a list of at least one text")
            values["sources"] = tuple(_value("sources", one, str) for one in value)
        elif f.name in _ROWS:
            if not isinstance(value, list):
                raise UserError(f.name, value, f"tables [[{f.name}]]")
            cls, keys = _ROWS[f.name]
            rows = [_table(f"{f.name}[{at}]", one, cls) for at, one in enumerate(value)]
            places = [tuple(getattr(row, key) for key in keys) for row in rows]
            if len(set(places)) < len(places):
                twice = next(place for at, place in enumerate(places) if place in places[:at])
                raise UserError(f.name, twice, f"one entry for each {' and '.join(keys)}")
            values[f.name] = tuple(rows)
        else:
            values[f.name] = _table(f.name, value, hints[f.name])
    machine = Machine(**values)
    _check(machine)
    return machine


def _table(name: str, raw: object, cls: type[Any]) -> Any:
    if not isinstance(raw, Mapping):
        raise UserError(name, raw, f"a table with the keys {', '.join(f.name for f in fields(cls))}")
    known = [f.name for f in fields(cls)]
    for key, value in raw.items():
        if key not in known:
            raise UserError(
                f"{name}.{key}", value, f"not a known key{nearest(key, known)}; those are {', '.join(known)}"
            )
    values = {}
    for f in fields(cls):
        if f.name in raw:
            values[f.name] = _value(f"{name}.{f.name}", raw[f.name], f.type, positive=f.default is MISSING)
        elif f.default is MISSING:
            raise UserError(f"{name}.{f.name}", NOT_GIVEN, "required in a machine file")
    return cls(**values)


def _value(name: str, value: object, kind: Any, positive: bool = True) -> Any:
    """Check one value: texts are not empty, required numbers above 0, optional ones at least 0, none out of reach."""
    if kind is str:
        if not isinstance(value, str) or not value.strip():
            raise UserError(name, value, "a text")
        return value
    noun, low, high = ("an integer", 1, _MOST) if kind is int else ("a finite number", _SMALLEST, _LARGEST)
    right = type(value) is int or (type(value) is float and kind is float)
    if right and (low <= value <= high or (value == 0 and not positive)):  # type: ignore[operator]
        return kind(value)
    least = "above 0" if positive else "of at least 0"
    raise UserError(name, value, f"{noun} {least}, neither below {low:g} nor above {high:g}")


def _check(machine: Machine) -> None:
    """Raise ``UserError`` for fields that contradict each other."""
    for name in ("large", "sustained"):
        share = getattr(machine.matmul, name)
        if not 0 < share <= 1:
            raise UserError(f"matmul.{name}", share, "a share above 0 and of at most 1")
    check_measured(machine.matmuls, machine.collectives)
    if machine.device.contention >= 1:
        raise UserError("device.contention", machine.device.contention, "a share below 1, or 0")
    if machine.device.attention > 1:
        raise UserError("device.attention", machine.device.attention, "a share of at most 1, or 0")
    platform, capability = machine.device.platform, machine.device.capability
    if platform not in ("", *PLATFORMS):
        raise UserError("device.platform", platform, f"one of {', '.join(PLATFORMS)}")
    if platform == "cuda" and not capability:
        raise UserError("device.capability", NOT_GIVEN, "required with the platform cuda, such as 9.0")
    if capability and (platform != "cuda" or capability != round(capability, 1)):
        raise UserError("device.capability", capability, "a version such as 9.0, of the platform cuda alone")
    if machine.device.reserved_bytes >= machine.device.memory_bytes:
        raise UserError("device.reserved_bytes", machine.device.reserved_bytes, "less than device.memory_bytes")
    tiling = (machine.matmul.tile_rows, machine.matmul.tile_columns, machine.matmul.cores)
    if any(tiling) and not all(tiling):
        raise UserError("matmul", tiling, "tile_rows, tile_columns and cores all above 0, or none of them")


def dumps_machine(machine: Machine) -> str:
    """TOML that `loads_machine` reads back as the same machine."""
    values = {f.name: getattr(machine, f.name) for f in fields(machine) if f.name != "name"}
    lines = [f"title = {json.dumps(values.pop('title'))}", "sources = ["]
    lines += [*(f"    {json.dumps(source)}," for source in values.pop("sources")), "]"]
    for name, value in values.items():
        if is_dataclass(value):
            lines += ["", f"[{name}]", *_keys(value)]
        else:
            for row in value:
                lines += ["", f"[[{name}]]", *_keys(row)]
    return "\n".join([*lines, ""])


def _keys(table: Any) -> list[str]:
    values = {f.name: getattr(table, f.name) for f in fields(table)}
    return [f"{name} = {json.dumps(value)}" for name, value in values.items() if value != ""]
