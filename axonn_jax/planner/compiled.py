"""Every collective of a compiled program, read from its HLO text: kind, axes, bytes, how often it runs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from axonn_jax.planner.groups import Axes, Groups, axes_finder, replica_groups
from axonn_jax.planner.hlo import Array, Computation, Instruction, Module, arrays, parse
from axonn_jax.planner.ring import KINDS, Kind, ring_bytes

UNKNOWN = "unknown"
"""Stands for the axes of groups that do not run along axes of the mesh."""
_OTHERS = ("collective-broadcast", "ragged-all-to-all")


@dataclass(frozen=True)
class Collective:
    """One buffer of one collective instruction; those that XLA combined into one instruction are split."""

    kind: Kind
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
    places in the flattened mesh. A computation that runs along several ways has its collectives listed for each.
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


def _kind(one: Instruction) -> Kind | None:
    name = one.opcode.removesuffix("-start")
    if name in _OTHERS:
        raise ValueError(f"{one.name} is a {name}, for which there is no formula")
    return next((kind for kind in KINDS if kind == name), None)


def _members(kind: Kind, computation: Computation, one: Instruction) -> list[Array]:
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
