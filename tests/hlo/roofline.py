"""Rooflines of a compiled program's instructions: a device's rates for matmuls and memory, rings over links."""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from math import prod

from hlo.collectives import Collective, Groups
from hlo.program import Array, Computation, Instruction, Module, arrays

from axonn_jax.core.hardware import Accelerator, Link

_FREE = frozenset(
    {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "replica-id"}
)
_PARTIAL = frozenset({"dynamic-slice", "slice", "gather"})


def link(machine: Accelerator, groups: Groups) -> Link:
    """The links that decide a collective's time: the network if any group has devices of several nodes."""
    return "network" if _rings(machine, groups) else "node"


def _rings(machine: Accelerator, groups: Groups) -> int:
    """Of the groups that leave a node, at most so many have devices in one."""
    nodes = [{device // machine.node_devices for device in group} for group in groups]
    leaving = Counter(chain.from_iterable(one for one in nodes if len(one) > 1))
    return max(leaving.values(), default=0)


def ring_rate(machine: Accelerator, groups: Groups) -> float:
    """Bytes/s a device sends in a collective of these groups, all at once.

    Groups inside a node have the device's links to themselves. The rings of groups across nodes share what a node
    sends: beta_inter / min(G_node, product of the inner axes) (AxoNN SC 24).
    """
    rings = _rings(machine, groups)
    return min(machine.node_bytes_per_s, machine.network_bytes_per_s / rings) if rings else machine.node_bytes_per_s


def ring_seconds(machine: Accelerator, members: Sequence[Collective]) -> float:
    """Time of one collective instruction, all of whose buffers travel together."""
    return machine.latency_s + float(sum(one.bytes_once for one in members)) / ring_rate(machine, members[0].groups)


@dataclass(frozen=True)
class OpCost:
    """What one instruction asks of a device."""

    flops: float = 0.0
    bytes: float = 0.0
    matmuls: int = 0

    def seconds(self, machine: Accelerator) -> float:
        """Roofline time."""
        return max(self.flops / machine.flops_per_s, self.bytes / machine.bytes_per_s)


@dataclass(frozen=True)
class Costs:
    """The work of a module's instructions; loops and calls are for who walks the module."""

    module: Module
    _known: dict[str, tuple[int, float]] = field(default_factory=dict, repr=False)

    def of(self, inside: Computation, one: Instruction) -> OpCost:
        """FLOPs of its matmuls and the bytes it reads and writes; nothing for a collective's parts."""
        if one.opcode in _FREE or one.opcode.endswith(("-start", "-done", "-update")):
            return OpCost()
        count, flops = self._own_matmuls(inside, one)
        called = self.module.computations[one.called[0][1]] if one.opcode == "fusion" else None
        return OpCost(flops, _moved(inside, one, called), count)

    def _own_matmuls(self, inside: Computation, one: Instruction) -> tuple[int, float]:
        """How many matmuls an instruction has in it, and their FLOPs."""
        if one.opcode == "dot":
            return 1, _dot_flops(inside, one, one.attributes)
        if one.opcode == "custom-call":
            return _library_matmul(inside, one)
        if one.opcode not in ("fusion", "call"):
            return 0, 0.0
        parts = [self.matmuls(name) for _, name in one.called]
        return sum(count for count, _ in parts), sum(flops for _, flops in parts)

    def matmuls(self, name: str) -> tuple[int, float]:
        """How many matmuls a computation and what it calls have, loops taken once, and their FLOPs."""
        if name not in self._known:
            computation = self.module.computations[name]
            parts = [self._own_matmuls(computation, one) for one in computation.instructions]
            self._known[name] = (sum(count for count, _ in parts), sum(flops for _, flops in parts))
        return self._known[name]


def _dot_flops(inside: Computation, one: Instruction, attributes: str) -> float:
    """2 times the result's elements times the contracted length, whose dims HLO and cuBLAS print differently."""
    found = re.search(r"lhs_contracting_dim(?:ension)?s\"?[=:][{\[]([\d,\"]*)[}\]]", attributes)
    left = arrays(inside.by_name[one.operands[0]].shape)[0]
    contracted = prod(left.dims[int(dim)] for dim in re.findall(r"\d+", found[1])) if found else 1
    return 2.0 * arrays(one.shape)[0].elements * contracted


def _library_matmul(inside: Computation, one: Instruction) -> tuple[int, float]:
    """Matmuls of a call into cuBLAS, into cuDNN's fused attention, or of a Triton kernel that says what it is."""
    target = re.search(r'custom_call_target="([^"]*)"', one.attributes)
    name = target[1] if target else ""
    if "__cublas" in name or "gemm" in name:
        return 1, _dot_flops(inside, one, one.attributes)
    if "fmha" in name:
        queries, keys = (arrays(inside.by_name[operand].shape)[0] for operand in one.operands[:2])
        matmuls = 5 if "Backward" in name else 2
        causal = 0.5 if "CAUSAL" in one.attributes else 1.0
        return matmuls, causal * matmuls * 2.0 * queries.elements * keys.dims[1]  # [batch, seq, heads, features]
    return 0, 0.0


def _moved(inside: Computation, one: Instruction, called: Computation | None) -> float:
    """Bytes read and written; of an operand that is only sliced the slices, of an update in place the update."""
    written = float(_size(arrays(one.shape)))
    if called is None:
        return written + sum(
            _size(arrays(inside.by_name[name].shape)) for name in one.operands if name in inside.by_name
        )
    users_of: dict[str, list[Instruction]] = {}
    same: dict[str, str] = {}  # bitcasts, by the parameter whose bytes they are
    for user in called.instructions:
        names = {same.get(name, name) for name in user.operands}
        if user.opcode == "bitcast" and called.by_name[min(names)].opcode == "parameter":
            same[user.name] = min(names)
            continue
        for name in names:
            users_of.setdefault(name, []).append(user)

    def first(user: Instruction) -> str:
        return same.get(user.operands[0], user.operands[0])

    read = 0.0
    for parameter in called.instructions:
        if parameter.opcode != "parameter":
            continue
        users = users_of.get(parameter.name, [])
        if users and all(user.opcode in _PARTIAL and first(user) == parameter.name for user in users):
            read += sum(_size(arrays(user.shape)) for user in users)
        elif users and all(user.opcode == "dynamic-update-slice" and first(user) == parameter.name for user in users):
            updates = sum(_size(arrays(called.by_name[user.operands[1]].shape)) for user in users)
            written -= _size(arrays(parameter.shape)) - updates
        else:
            read += _size(arrays(parameter.shape))
    return read + max(written, 0.0)


def _size(found: Iterable[Array]) -> int:
    return sum(array.bytes for array in found)
