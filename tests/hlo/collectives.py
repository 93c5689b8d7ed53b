"""Collectives of a compiled program, read from its HLO text: kind, who takes part, axes, bytes, how often they run."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from itertools import product
from typing import get_args

from hlo.program import Array, Computation, Instruction, Module, arrays, parse

from axonn_jax.planning.communication import Predicted
from axonn_jax.planning.machines.network import CollectiveKind, ring_bytes

Groups = tuple[tuple[int, ...], ...]
Axes = tuple[str, ...]
Totals = dict[tuple[str, str], Fraction]
"""Bytes a device by (kind, axes joined by `*`)."""
UNKNOWN = "unknown"
"""Stands for the axes of groups that do not run along axes of the mesh."""
_OTHERS = ("collective-broadcast", "ragged-all-to-all")


@dataclass(frozen=True)
class Collective:
    """One buffer of one collective instruction; those that XLA combined into one instruction are split."""

    kind: CollectiveKind
    name: str
    """The instruction's name; equal for the members of a combined one."""
    operand: Array
    """What each device puts in."""
    groups: Groups
    """Devices that take part together; pairs of source and target for a permutation."""
    axes: Axes | None
    """Mesh axes it runs over, slowest first; None if unknown."""
    op_name: str
    """Where the traced program made it."""
    times: int | None
    """Runs in one run of the program; None where a loop's trip count cannot be read."""
    conditional: bool
    """Whether a conditional may leave it out; `times` counts it as if it did not."""
    computation: str
    """Name of the computation whose instructions `start` and `done` count: between them it may run beside others."""
    start: int
    """Index of the instruction that starts it."""
    done: int
    """Index of the instruction that waits for it; `start` for a synchronous one."""

    @property
    def group(self) -> int:
        """Devices in a group."""
        return max(map(len, self.groups))

    @property
    def whole(self) -> int:
        """Bytes of the whole buffer: gathered, to be reduced, or sent."""
        return self.operand.bytes * (self.group if self.kind == "all-gather" else 1)

    @property
    def bytes_once(self) -> Fraction:
        """Bytes a device sends on a ring, in one run of this collective."""
        return ring_bytes(self.kind, self.whole, self.group)

    @property
    def bytes(self) -> Fraction:
        """Bytes a device sends on a ring, in one run of the program; ``ValueError`` where `times` is unknown."""
        if self.times is None:
            raise ValueError(f"{self.name} ({self.op_name}) is in a loop whose trip count cannot be read")
        return self.times * self.bytes_once

    @property
    def over(self) -> str:
        """The axes joined by `*`, or `unknown`."""
        return UNKNOWN if self.axes is None else "*".join(self.axes)


def collectives(
    program: str | Module, axes: Mapping[str, int], order: Sequence[int] | None = None
) -> tuple[Collective, ...]:
    """Every collective of a compiled program's text, over groups larger than one.

    `axes` has the mesh's sizes, slowest axis first, and `order` the numbers of its devices where they are not their
    positions in the flattened mesh. A computation that runs along several ways has its collectives listed for each.
    Raises ``ValueError`` for text that is no HLO module, and for a kind of collective without a formula.
    """
    module = parse(program) if isinstance(program, str) else program
    over, wrapped = axes_finder(axes, order), _wrapped(module)
    found: list[Collective] = []
    for computation, times, conditional in module.visits():
        for start, one in enumerate(computation.instructions):
            kind = _kind(one)
            if kind is None:
                continue
            groups = replica_groups(one.attributes.split(", metadata=")[0], module.devices)
            if max(map(len, groups)) == 1:
                continue
            where, at = wrapped.get(computation.name, (computation, start))
            window = (where.name, at, _done(where, at))
            axes_here = over(groups, kind == "collective-permute")
            for operand in _members(kind, computation, one):
                found.append(
                    Collective(kind, one.name, operand, groups, axes_here, one.op_name, times, conditional, *window)
                )
    return tuple(found)


def _kind(one: Instruction) -> CollectiveKind | None:
    name = one.opcode.removesuffix("-start")
    if name in _OTHERS:
        raise ValueError(f"{one.name} is a {name}, for which there is no formula")
    return next((kind for kind in get_args(CollectiveKind) if kind == name), None)


def _members(kind: CollectiveKind, computation: Computation, one: Instruction) -> list[Array]:
    """A buffer an operand, except that an all-to-all of a tuple is one exchange: its operands are the parts."""
    operands = [array for name in one.operands for array in arrays(computation.by_name[name].shape)]
    if kind == "all-to-all" and len(operands) > 1:
        first = operands[0]
        return [Array(first.dtype, (sum(array.elements for array in operands),))]
    return operands


def _wrapped(module: Module) -> dict[str, tuple[Computation, int]]:
    """Computations that an `async-start` runs, each with where that stands: the collective inside starts there."""
    return {
        name: (computation, at)
        for computation in module.computations.values()
        for at, one in enumerate(computation.instructions)
        if one.opcode == "async-start"
        for _, name in one.called
    }


def _done(computation: Computation, start: int) -> int:
    """Index of the instruction that waits for the one at `start`, updates on the way followed; else `start`."""
    name = computation.instructions[start].name
    for at in range(start + 1, len(computation.instructions)):
        later = computation.instructions[at]
        if name in later.operands and later.opcode.endswith("-done"):
            return at
        if name in later.operands and later.opcode.endswith("-update"):
            name = later.name
    return start


_NUMBERS = r"(?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))?"
"""How a printed mesh's devices lie where they are not in the order of their numbers."""


def replica_groups(attributes: str, devices: int) -> Groups:
    """The groups of a collective of `devices` in all: lists, `[2,4]<=[8]T(1,0)`, a mesh's axes, or everyone.

    A permutation's groups are its pairs of source and target. Raises ``ValueError`` where none is printed.
    """
    if pairs := re.search(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}", attributes):
        return tuple((int(a), int(b)) for a, b in re.findall(r"(\d+),(\d+)\}", pairs[1]))
    if listed := re.search(r"replica_groups=\{((?:\{[\d,]*\},?)*)\}", attributes):
        groups = tuple(tuple(int(n) for n in one.split(",")) for one in re.findall(r"\{([\d,]+)\}", listed[1]))
        return groups or (tuple(range(devices)),)
    if iota := re.search(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", attributes):
        dims = [int(n) for n in iota[3].split(",")]
        order = [int(n) for n in iota[4].split(",")] if iota[4] else list(range(len(dims)))
        return _chunks(_transposed(dims, order), int(iota[2]))
    if named := re.search(rf"replica_groups=mesh\[([^\]]+)\]{_NUMBERS} \{{([^}}]+)\}}", attributes):
        sizes = {axis: int(size) for axis, size in re.findall(r"'(\w+)'=(\d+)", named[1])}
        over = re.findall(r"'(\w+)'", named[4])
        names = list(sizes)
        order = [names.index(axis) for axis in (*(axis for axis in names if axis not in over), *over)]
        count = 1
        for axis in over:
            count *= sizes[axis]
        positions = _transposed(list(sizes.values()), order)
        return _chunks([_numbers(named[2], named[3], len(positions))[position] for position in positions], count)
    raise ValueError(f"no replica groups in {attributes[:200]!r}")


def _numbers(dims: str | None, order: str | None, count: int) -> list[int]:
    """The device at every position of a printed mesh: in order, unless the mesh says how its devices lie."""
    if dims is None:
        return list(range(count))
    sizes = [int(n) for n in dims.split(",")]
    return _transposed(sizes, [int(n) for n in order.split(",")] if order else list(range(len(sizes))))


def _transposed(dims: Sequence[int], order: Sequence[int]) -> list[int]:
    """0, 1, 2, ... as an array of `dims` (last dim fastest), its dims put into `order`, flattened."""
    strides = [1] * len(dims)
    for at in reversed(range(len(dims) - 1)):
        strides[at] = strides[at + 1] * dims[at + 1]
    positions = product(*(range(dims[at]) for at in order))
    return [sum(index * strides[at] for index, at in zip(position, order, strict=True)) for position in positions]


def _chunks(ids: Sequence[int], size: int) -> Groups:
    return tuple(tuple(ids[at : at + size]) for at in range(0, len(ids), size))


def axes_finder(axes: Mapping[str, int], order: Sequence[int] | None = None) -> Callable[[Groups, bool], Axes | None]:
    """Returns a function that names the mesh axes (slowest first) that groups run over, None where none fit.

    `axes` has the mesh's sizes, slowest first. `order[position]` is the number that replica groups use for the device
    at a position of the flattened mesh; left out, they are the same, as they are in programs that jax compiles. The
    function's second argument says that the groups are pairs of a permutation: these run over every axis along
    which some pair differs; other groups must be exactly the devices that differ along the axes.
    """
    names, sizes = tuple(axes), tuple(axes.values())
    numbers = range(len(list(product(*map(range, sizes))))) if order is None else order
    positions = dict(zip(numbers, product(*map(range, sizes)), strict=True))

    @cache
    def over(groups: Groups, permutation: bool) -> Axes | None:
        if not all(device in positions for group in groups for device in group):
            return None
        found = set()
        for group in groups:
            members = [positions[device] for device in group]
            along = tuple(at for at in range(len(names)) if len({position[at] for position in members}) > 1)
            whole = 1
            for at in along:
                whole *= sizes[at]
            if not permutation and (len(set(group)) != len(group) or whole != len(group)):
                return None
            found.add(along)
        if permutation:
            return tuple(name for at, name in enumerate(names) if any(at in along for along in found))
        return tuple(names[at] for at in found.pop()) if len(found) == 1 else None

    return over


def totals(found: Iterable[Collective | Predicted]) -> Totals:
    """Bytes a device in a step by (kind, axes); ``ValueError`` where a compiled loop's trip count is unknown."""
    sums: Totals = {}
    for one in found:
        key = (one.kind, one.over)
        sums[key] = sums.get(key, Fraction(0)) + one.bytes
    return dict(sorted(sums.items()))
