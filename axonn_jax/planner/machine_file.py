"""A machine as the text of a machine file."""

import json
from dataclasses import fields, is_dataclass
from typing import Any

from axonn_jax.planner.machine import Machine


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
    return [f"{f.name} = {json.dumps(getattr(table, f.name))}" for f in fields(table)]
