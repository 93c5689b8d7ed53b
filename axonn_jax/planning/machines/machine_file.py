"""A machine file: TOML read and checked field by field, and written."""

import json
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from axonn_jax.core.documents import TOML_BYTES, parse_toml, read_bytes
from axonn_jax.core.errors import UNSET, UserError, local_path, nearest
from axonn_jax.core.options import typed
from axonn_jax.planning.machines.machine import Machine

_FOLDER = Path(__file__).parent

_TABLE_KEYS: Mapping[str, tuple[str, ...]] = {
    "bandwidth": ("inner", "size"),
    "messages": ("channel",),
    "matmuls": ("size",),
    "collectives": ("kind", "inner", "size", "bytes"),
}
"""Lists of tables, and the keys that tell their entries apart."""


def machine_names() -> tuple[str, ...]:
    """The machines that come with the package."""
    return tuple(sorted(path.stem for path in _FOLDER.glob("*.toml")))


def load_machine(name: str, field: str = "machine") -> Machine:
    """Return a machine that comes with the package, or that of a TOML file whose path is given.

    Raises:
        UserError: there is no such machine or file, or a field of the file is missing, unknown or out of range.
    """
    path = _FOLDER / f"{name}.toml"
    if name not in machine_names():
        path = Path(local_path(field, name))
        if path.suffix != ".toml":
            names = machine_names()
            accepted = f"one of {', '.join(names)}, or the path of a .toml file{nearest(name, names)}"
            raise UserError(field, name, accepted)
    try:
        text = read_bytes(path, TOML_BYTES).decode("utf-8-sig")
    except (OSError, ValueError) as error:
        raise UserError(field, str(path), f"a machine file that can be read; {error}") from None
    return loads_machine(text, path.stem, str(path), field)


def loads_machine(text: str, name: str, source: str = "text", field: str = "machine") -> Machine:
    """Read a machine from TOML text; raise ``UserError`` that names the table and key that are wrong."""
    try:
        raw = parse_toml(text)
    except ValueError as error:
        raise UserError(field, source, f"valid TOML; {error}") from None
    if "name" in raw:
        raise UserError("name", raw["name"], "not a key of a machine file, which is named as the file")
    machine = typed(Machine, {"name": name, **raw}, closed=True)
    _check(machine)
    return machine


def _check(machine: Machine) -> None:
    """Raise ``UserError`` for fields that contradict each other."""
    for name, text in (("title", machine.title), ("device.kind", machine.device.kind)):
        if not text.strip():
            raise UserError(name, text, "a text")
    if not machine.sources:
        raise UserError("sources", [], "a list of at least one text")
    # Two measurements of one place would make the result depend on their order in the file.
    for name, keys in _TABLE_KEYS.items():
        places = [tuple(getattr(row, key) for key in keys) for row in getattr(machine, name)]
        if len(set(places)) < len(places):
            twice = next(place for at, place in enumerate(places) if place in places[:at])
            raise UserError(name, twice, f"one entry for each {' and '.join(keys)}")
    platform, capability = machine.device.platform, machine.device.capability
    if platform == "cuda" and not capability:
        raise UserError("device.capability", UNSET, "required with the platform cuda, such as 9.0")
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
