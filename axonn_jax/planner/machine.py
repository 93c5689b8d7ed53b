"""A machine as the planner sees it: rates, latencies and sizes, read from a data file and checked field by field."""

import math
import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, replace
from math import ceil, log2
from pathlib import Path
from typing import Any, get_args, get_type_hints

from axonn_jax.errors import NOT_GIVEN, UserError, nearest
from axonn_jax.planner.measured import (
    Collective,
    Curve,
    MatmulShare,
    Measured,
    Messages,
    at_place,
    check_measured,
    matmul_share,
)
from axonn_jax.planner.memory import Precision

_FOLDER = Path(__file__).with_name("machines")
GIB = 2**30


@dataclass(frozen=True)
class Device:
    """One accelerator, as jax counts them (a GCD, a GPU; a CPU socket)."""

    kind: str
    """Its name."""
    memory_bytes: float
    """What it has."""
    memory_bytes_per_s: float
    """Of streaming kernels."""
    peak_fp32: float
    """FLOP/s advertised for matmuls of float32."""
    peak_bf16: float = 0.0
    """The same for bfloat16; 0: it has none."""
    peak_fp16: float = 0.0
    """The same for float16; 0: it has none."""
    reserved_bytes: float = 0.0
    """Taken by runtime and communicators."""
    attention: float = 0.0
    """Rate of fused attention kernels as a share of the matmul rate; 0: scores go through memory."""
    launch_s: float = 0.0
    """Least time of a kernel."""
    program_s: float = 0.0
    """Least time of a program with a stage's arrays: every task of a pipeline is one."""
    light_bytes_per_s: float = 0.0
    """Of norms, activation functions and additions, by the bytes they must move; 0: memory's rate."""
    update_bytes_per_s: float = 0.0
    """Of the optimizer's update; 0: memory's rate."""
    contention: float = 0.0
    """Share of its speed that compute loses while a collective runs beside it (cores and memory bandwidth taken)."""


@dataclass(frozen=True)
class Matmul:
    """How much of the peak matmuls reach."""

    large: float
    """Share of the peak that large matmuls reach when measured alone."""
    sustained: float = 1.0
    """Share of that rate that is left in the middle of long training steps (clocks, power)."""
    tile_rows: int = 0
    """Rows of the output that a core computes at a time; 0: sizes do not matter."""
    tile_columns: int = 0
    """Columns of it."""
    cores: int = 0
    """Tiles computed at once."""


@dataclass(frozen=True)
class Node:
    """What devices share inside a node."""

    devices: int
    """How many they are."""
    bytes_per_s: float
    """What a device sends to others of its node."""
    latency_s: float
    """Of one hop."""
    at_once: float = 0.0
    """Devices that compute at full speed together, where they share what computes; 0: all."""


@dataclass(frozen=True)
class Network:
    """What joins the nodes; a machine of one node has any numbers here."""

    bytes_per_s: float
    """What a node sends to other nodes, all its adapters together."""
    latency_s: float
    """Of one hop of a collective."""
    straggling: float = 0.0
    """How much longer a job's devices take with every doubling of its nodes, as a share of one node's time: all wait
    for the slowest of them."""


@dataclass(frozen=True)
class Host:
    """The memory beside the devices."""

    memory_bytes: float
    """Of a node."""
    bytes_per_s: float
    """Between a device and the host, each way."""


@dataclass(frozen=True)
class Machine:
    """Everything that times and memory are predicted with."""

    name: str
    """What `--machine` calls it."""
    title: str
    """For people."""
    sources: tuple[str, ...]
    """Where the numbers come from."""
    device: Device
    matmul: Matmul
    node: Node
    network: Network
    host: Host
    bandwidth: tuple[Measured, ...] = ()
    """Measured rates of collectives; where there are none, the rates of the links decide."""
    messages: tuple[Messages, ...] = ()
    """By channel; where there are none, the rates of the links decide."""
    matmuls: tuple[MatmulShare, ...] = ()
    """By size; where there are none, all are large."""
    collectives: tuple[Collective, ...] = ()
    """By kind, place and bytes; they come before `bandwidth` and the links' latencies."""

    def peak(self, precision: Precision) -> float:
        """FLOP/s advertised for matmuls; raises ``UserError`` where the device has no such units."""
        found = float(getattr(self.device, f"peak_{precision}"))
        if found <= 0:
            have = [name for name in get_args(Precision) if getattr(self.device, f"peak_{name}") > 0]
            raise UserError("--precision", precision, f"one that a {self.device.kind} has: {', '.join(have)}")
        return found

    @property
    def half(self) -> Precision:
        """The precision that training uses by default here: bf16, else fp16, else fp32."""
        return "bf16" if self.device.peak_bf16 > 0 else "fp16" if self.device.peak_fp16 > 0 else "fp32"

    def slower(self, devices: int) -> float:
        """How many times longer a device computes when so many do that share what computes."""
        least = self.node.at_once
        return max(1.0, min(devices, self.node.devices) / least) if least else 1.0

    def shared(self, devices: int) -> "Machine":
        """The machine as one of so many devices sees it that share what computes and the way to memory, and wait
        for the slowest of them."""
        slower, device = self.slower(devices), self.device
        slower *= 1.0 + self.network.straggling * log2(max(1, ceil(devices / self.node.devices)))
        if slower == 1.0:
            return self
        device = replace(
            device,
            memory_bytes_per_s=device.memory_bytes_per_s / slower,
            light_bytes_per_s=device.light_bytes_per_s / slower,
            update_bytes_per_s=device.update_bytes_per_s / slower,
        )
        return replace(self, device=device, matmul=replace(self.matmul, large=self.matmul.large / slower))

    def matmul_share(self, size: float) -> float:
        """Share of the rate of large matmuls that those of a size (cube root of their dims' product) reach."""
        return matmul_share(self.matmuls, size)

    def curve(self, kind: str, inner: int, size: int) -> Curve:
        """Measured (bytes of the whole buffer, seconds) of a collective, ascending; empty where there are none."""
        rows = at_place([row for row in self.collectives if row.kind == kind], inner, size)
        return tuple(sorted((row.bytes, row.seconds) for row in rows))

    def measured(self, inner: int, size: int) -> float | None:
        """Bytes/s a device sends in a measured collective of `size` devices, `inner` axes' product inside of it."""
        rows = at_place(self.bandwidth, inner, size)
        return rows[0].gib_per_s * GIB if rows else None


_ROWS: Mapping[str, tuple[type[Any], tuple[str, ...]]] = {
    "bandwidth": (Measured, ("inner", "size")),
    "messages": (Messages, ("channel",)),
    "matmuls": (MatmulShare, ("size",)),
    "collectives": (Collective, ("kind", "inner", "size", "bytes")),
}
"""Lists of tables, and the keys that tell their entries apart."""


def machine_names() -> tuple[str, ...]:
    """The machines that come with the package."""
    return tuple(sorted(path.stem for path in _FOLDER.glob("*.toml")))


def load_machine(name: str) -> Machine:
    """Returns a machine that comes with the package, or that of a TOML file whose path is given.

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
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise UserError("--machine", str(path), f"a machine file that can be read; {error}") from None
    return loads_machine(text, path.stem, str(path))


def loads_machine(text: str, name: str, source: str = "text") -> Machine:
    """Reads a machine from TOML text; raises ``UserError`` that names the table and key that are wrong."""
    try:
        raw = tomllib.loads(text)
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
            if twice := next((place for at, place in enumerate(places) if place in places[:at]), None):
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
    """Checks one value: texts are not empty, required numbers above 0, optional ones at least 0, all finite."""
    if kind is str:
        if not isinstance(value, str) or not value.strip():
            raise UserError(name, value, "a text")
        return value
    noun = "an integer" if kind is int else "a finite number"
    accepted = f"{noun} above 0" if positive else f"{noun} of at least 0"
    right = isinstance(value, int) if kind is int else isinstance(value, (int, float))
    if not right or isinstance(value, bool) or not math.isfinite(value) or value < 0 or (positive and value == 0):  # type: ignore[arg-type,operator]
        raise UserError(name, value, accepted)
    return kind(value)


def _check(machine: Machine) -> None:
    """What no single field can say."""
    for name in ("large", "sustained"):
        share = getattr(machine.matmul, name)
        if not 0 < share <= 1:
            raise UserError(f"matmul.{name}", share, "a share above 0 and of at most 1")
    check_measured(machine.matmuls, machine.collectives)
    if machine.device.contention >= 1:
        raise UserError("device.contention", machine.device.contention, "a share below 1, or 0")
    if machine.device.attention > 1:
        raise UserError("device.attention", machine.device.attention, "a share of at most 1, or 0")
    if machine.device.reserved_bytes >= machine.device.memory_bytes:
        raise UserError("device.reserved_bytes", machine.device.reserved_bytes, "less than device.memory_bytes")
    tiling = (machine.matmul.tile_rows, machine.matmul.tile_columns, machine.matmul.cores)
    if any(tiling) and not all(tiling):
        raise UserError("matmul", tiling, "tile_rows, tile_columns and cores all above 0, or none of them")
