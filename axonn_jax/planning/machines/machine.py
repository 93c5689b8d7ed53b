"""A machine as the planner sees it: rates, latencies and sizes."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import ceil, log, log2
from typing import Annotated, Literal, TypeVar, get_args

from axonn_jax.core.backend.traits import pools_memory
from axonn_jax.core.distributed.gpu_limits import FRACTION
from axonn_jax.core.errors import UserError
from axonn_jax.core.options import Count, CountOrZero, Range
from axonn_jax.planning.memory import Precision

GIB = 2**30
Measured = Literal["all-reduce", "all-gather", "reduce-scatter"]
Platform = Literal["", "cpu", "cuda", "rocm", "tpu"]
_REACH = "neither below 1e-15 nor above 1e+24"  # seconds, bytes and operations of machines to come, and shares
Amount = Annotated[float, Range(f"a finite number above 0, {_REACH}", 1e-15, 1e24)]
AmountOrZero = Annotated[float, Range(f"a finite number of at least 0, {_REACH}", 1e-15, 1e24, zero=True)]
PartOfWhole = Annotated[float, Range("a share above 0 and of at most 1", 1e-15, 1)]
PartOrZero = Annotated[float, Range("a share of at most 1, or 0", 1e-15, 1, zero=True)]
Less = Annotated[float, Range("a share below 1, or 0", 1e-15, 1, open_high=True, zero=True)]


@dataclass(frozen=True)
class RingRate:
    """A measured bandwidth of ring collectives, all groups of an axis at once."""

    inner: Count
    """Product of the axes inside (faster) of this one; counts from here to the next entry's."""
    size: Count
    """Devices of a group; counts from here to the next entry's."""
    gib_per_s: Amount
    """Rate at which a device sends, in 2^30 bytes a second."""


@dataclass(frozen=True)
class CollectiveTime:
    """A measured time of one kind of collective, all groups of an axis at once."""

    kind: Measured
    """Kind of the collective: all-reduce, all-gather or reduce-scatter."""
    inner: Count
    """Product of the axes inside (faster) of this one; counts from here to the next entry's."""
    size: Count
    """Devices of a group; counts from here to the next entry's."""
    bytes: Amount
    """Bytes of the whole buffer: gathered, or to be reduced."""
    seconds: Amount
    """Measured seconds."""


@dataclass(frozen=True)
class Messages:
    """Measured messages between pipeline stages inside a node."""

    channel: str
    """Channel of the messages, as in `pipeline.channel`."""
    bytes_per_s: Amount
    """Bytes a second of long messages."""
    latency_s: Amount
    """Seconds of short messages."""


@dataclass(frozen=True)
class MatmulShare:
    """Share of the rate of large matmuls that matmuls of one size reach."""

    size: Count
    """Cube root of the product of its three dims."""
    share: PartOfWhole
    """At most 1."""


Curve = tuple[tuple[float, float], ...]
"""Points (x, y), x ascending."""

Row = TypeVar("Row", RingRate, CollectiveTime)


@dataclass(frozen=True)
class Device:
    """One accelerator, as jax counts them (a GCD, a GPU; a CPU socket)."""

    kind: str
    """Name of the device."""
    memory_bytes: Amount
    """Bytes of the device's memory."""
    memory_bytes_per_s: Amount
    """Bytes a second of streaming kernels."""
    peak_fp32: Amount
    """FLOP/s advertised for matmuls of float32."""
    peak_bf16: AmountOrZero = 0.0
    """The same for bfloat16; 0: it has none."""
    peak_fp16: AmountOrZero = 0.0
    """The same for float16; 0: it has none."""
    reserved_bytes: AmountOrZero = 0.0
    """Bytes taken by driver, runtime and communicators."""
    attention: PartOrZero = 0.0
    """Rate of attention, in half precision's kernel, as a share of matmuls'; 0: derived from its blocks."""
    launch_s: AmountOrZero = 0.0
    """Least time of a kernel."""
    program_s: AmountOrZero = 0.0
    """Least time of a program with a stage's arrays: every task of a pipeline is one."""
    light_bytes_per_s: AmountOrZero = 0.0
    """Bytes a second that norms, activation functions and additions must move; 0: memory's rate."""
    update_bytes_per_s: AmountOrZero = 0.0
    """Bytes a second of the optimizer's update; 0: memory's rate."""
    contention: Less = 0.0
    """Share of its speed that compute loses while a collective runs beside it (cores and memory bandwidth taken)."""
    platform: Platform = ""
    """Platform of jax: cpu, cuda, rocm or tpu; empty: unknown, without fused attention."""
    capability: AmountOrZero = 0.0
    """Compute capability of a GPU with CUDA, such as 9.0."""

    @property
    def free_bytes(self) -> float:
        """Bytes of memory that driver, runtime and communicators leave."""
        return self.memory_bytes - self.reserved_bytes

    @property
    def program_bytes(self) -> float:
        """Bytes of memory that a run gets: on a GPU, the default, jax's pool."""
        return self.free_bytes * (FRACTION if pools_memory(self.platform) else 1.0)


@dataclass(frozen=True)
class Matmul:
    """Share of the peak that matmuls reach."""

    large: PartOfWhole
    """Share of the peak that large matmuls reach when measured alone."""
    sustained: PartOfWhole = 1.0
    """Share of that rate that is left in the middle of long training steps (clocks, power)."""
    tile_rows: CountOrZero = 0
    """Rows of the output that a core computes at a time; 0: sizes do not matter."""
    tile_columns: CountOrZero = 0
    """Columns of it."""
    cores: CountOrZero = 0
    """Tiles computed at once."""


@dataclass(frozen=True)
class Node:
    """Links and shared cores of a node's devices."""

    devices: Count
    """Number of devices in a node."""
    bytes_per_s: Amount
    """Bytes a second that a device sends to others of its node."""
    latency_s: Amount
    """Seconds of one hop."""
    at_once: AmountOrZero = 0.0
    """Number of devices that compute at full speed together where they share cores; 0: all."""


@dataclass(frozen=True)
class Network:
    """Links between nodes; any numbers for a machine of one node."""

    bytes_per_s: Amount
    """Bytes a second that a node sends to other nodes, with all its adapters."""
    latency_s: Amount
    """Seconds of one hop of a collective."""
    straggling: AmountOrZero = 0.0
    """Slowdown of a job's devices with every doubling of its nodes, as a share of one node's time: all wait for the
    slowest."""


@dataclass(frozen=True)
class Host:
    """The memory beside the devices."""

    memory_bytes: Amount
    """Bytes of a node's host memory."""
    bytes_per_s: Amount
    """Between a device and the host, each way."""


@dataclass(frozen=True)
class Machine:
    """Everything that times and memory are predicted with."""

    name: str
    """Name of the machine for `--machine`."""
    title: str
    """For people."""
    sources: tuple[str, ...]
    """Sources of the numbers."""
    device: Device
    matmul: Matmul
    node: Node
    network: Network
    host: Host
    bandwidth: tuple[RingRate, ...] = ()
    """Measured rates of collectives; where there are none, the rates of the links decide."""
    messages: tuple[Messages, ...] = ()
    """By channel; where there are none, the rates of the links decide."""
    matmuls: tuple[MatmulShare, ...] = ()
    """By size; where there are none, all are large."""
    collectives: tuple[CollectiveTime, ...] = ()
    """By kind, place and bytes; they come before `bandwidth` and the links' latencies."""

    def peak(self, precision: Precision) -> float:
        """FLOP/s advertised for matmuls; raises ``UserError`` where the device has no such units."""
        rate = float(getattr(self.device, f"peak_{precision}"))
        if rate <= 0:
            have = [name for name in get_args(Precision) if getattr(self.device, f"peak_{name}") > 0]
            raise UserError("--memory.precision", precision, f"one that a {self.device.kind} has: {', '.join(have)}")
        return rate

    @property
    def half(self) -> Precision:
        """The precision that training uses by default here: bf16, else fp16, else fp32."""
        return "bf16" if self.device.peak_bf16 > 0 else "fp16" if self.device.peak_fp16 > 0 else "fp32"

    def slower(self, devices: int) -> float:
        """Factor by which a device computes slower when so many devices share cores."""
        least = self.node.at_once
        return max(1.0, min(devices, self.node.devices) / least) if least else 1.0

    def shared(self, devices: int) -> "Machine":
        """Return the machine as seen by one of `devices` devices that share cores and memory."""
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

    def curve(self, kind: str, inner: int, size: int) -> Curve:
        """Measured (bytes of the whole buffer, seconds) of a collective, ascending; empty where there are none."""
        rows = at_place([row for row in self.collectives if row.kind == kind], inner, size)
        return tuple(sorted((row.bytes, row.seconds) for row in rows))

    def measured(self, inner: int, size: int, across: bool = False) -> float | None:
        """Bytes/s a device sends in a measured collective of `size` devices, `inner` axes' product inside of it.

        For groups `across` nodes only measurements across nodes count.
        """
        rows = [row for row in self.bandwidth if not across or row.inner * row.size > self.node.devices]
        points = at_place(rows, inner, size)
        return points[0].gib_per_s * GIB if points else None


def at_place(rows: Sequence[Row], inner: int, size: int) -> list[Row]:
    """Return the rows of the largest measured product of inner axes, and then size, that are not larger than given."""
    rows = [row for row in rows if row.inner <= inner]
    level = max((row.inner for row in rows), default=0)
    rows = [row for row in rows if row.inner == level and row.size <= size]
    return [row for row in rows if row.size == max(other.size for other in rows)]


def between(curve: Curve, at: float) -> float:
    """The value of a curve: linear between its points, the first y before them, `slope` beyond the last."""
    if at <= curve[0][0]:
        return curve[0][1]
    for (x, y), (further, higher) in pairwise(curve):
        if at <= further:
            return y + (at - x) * (higher - y) / (further - x)
    return curve[-1][1] + (at - curve[-1][0]) * slope(curve)


def slope(curve: Curve) -> float:
    """Growth of y with x for large x: between the last two points, or in proportion to x if there is one."""
    if len(curve) == 1:
        return curve[0][1] / curve[0][0]
    (x, y), (further, higher) = curve[-2:]
    # Noise in the last two measurements must not make larger buffers faster.
    return max(0.0, higher - y) / (further - x)


def matmul_share(rows: tuple[MatmulShare, ...], size: float) -> float:
    """Share of the rate of large matmuls that those of a size (cube root of their dims' product) reach.

    Between measured sizes by the logarithm; that of the nearest outside, 1 where there are none.
    """
    if not rows:
        return 1.0
    # Clamp at the largest measured size: extrapolation could exceed the rate of large matmuls.
    points = tuple(sorted((log(row.size), row.share) for row in rows))
    return between(points, min(log(size), points[-1][0]))
