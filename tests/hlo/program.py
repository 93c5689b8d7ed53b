"""Compiled HLO modules as text, taken apart: computations, their instructions in order, how often each runs."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

_BITS = {"pred": 8, "s2": 2, "u2": 2, "s4": 4, "u4": 4, "c64": 64, "c128": 128, "token": 0, "opaque": 0}
_HEAD = re.compile(r"^(ENTRY )?%?([\w.\-]+)(?: \(.*\) -> .*)? \{$")
_LINE = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (.*)$")
_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,<=?]*)\]")
_CALLED = re.compile(r"\b(to_apply|calls|body|condition|true_computation|false_computation)=%?([\w.\-]+)")


class Array(NamedTuple):
    """Element type and dims of an array in a program."""

    dtype: str
    dims: tuple[int, ...]

    @property
    def elements(self) -> int:
        """Number of elements."""
        count = 1
        for size in self.dims:
            count *= size
        return count

    @property
    def bytes(self) -> int:
        """Size in bytes, types of less than a byte packed."""
        return -(-self.elements * _bits(self.dtype) // 8)


def _bits(dtype: str) -> int:
    if dtype in _BITS:
        return _BITS[dtype]
    width = re.match(r"[a-z]+(\d+)", dtype)  # f32, bf16, s8, f8e4m3fn
    if width is None:
        raise ValueError(f"element type {dtype!r} of unknown width")
    return int(width[1])


def arrays(shape: str) -> tuple[Array, ...]:
    """The arrays of a printed shape, tuples flattened: `(f32[2,3]{1,0}, s32[])` has two."""
    return tuple(
        Array(dtype, tuple(int(size.lstrip("<=")) for size in dims.split(",") if size))
        for dtype, dims in _ARRAY.findall(re.sub(r"\{[^{}]*\}", "", shape))
    )


@dataclass(frozen=True)
class Instruction:
    """One line of a computation."""

    name: str
    """Unique in the module."""
    shape: str
    """The result's shape as printed."""
    opcode: str
    """Such as `all-reduce-start`."""
    operands: tuple[str, ...]
    """Names of instructions of the same computation."""
    arguments: str
    """What stands between the parentheses: operands, or a constant's value."""
    attributes: str
    """What stands behind the parentheses."""
    root: bool = False
    """Whether this is the computation's result."""

    @property
    def op_name(self) -> str:
        """Where the traced program made it, as in `jit(step)/while/body/all_gather`; empty if not recorded."""
        found = re.search(r'op_name="((?:[^"\\]|\\.)*)"', self.attributes)
        return found[1] if found else ""

    @cached_property
    def called(self) -> tuple[tuple[str, str], ...]:
        """Computations it runs, each with its part (`body`, `condition`, `calls`, `to_apply`, `branch`).

        What waits for another instruction runs nothing, though some printers repeat the computation there.
        """
        if self.opcode.endswith(("-done", "-update")):
            return ()
        code = self.attributes.split(", metadata=")[0]
        branches = re.search(r"branch_computations=\{([^}]*)\}", code)
        names = re.findall(r"[\w.\-]+", branches[1]) if branches else []
        parts = [("branch" if part.endswith("_computation") else part, name) for part, name in _CALLED.findall(code)]
        return (*parts, *(("branch", name) for name in names))


@dataclass(frozen=True)
class Computation:
    """Instructions in the order printed: the order of execution where the module is scheduled."""

    name: str
    entry: bool
    instructions: tuple[Instruction, ...]

    @cached_property
    def by_name(self) -> Mapping[str, Instruction]:
        """Instructions by name."""
        return {one.name: one for one in self.instructions}

    @property
    def root(self) -> Instruction:
        """The instruction whose result is the computation's."""
        return next(one for one in self.instructions if one.root)


class Visit(NamedTuple):
    """A computation reached from the entry, and how often one run of the program runs it along one way."""

    computation: Computation
    times: int | None
    """None where a loop on the way has no trip count that can be read."""
    conditional: bool
    """Whether a conditional on the way may leave it out."""


@dataclass(frozen=True)
class Module:
    """A compiled program: its computations, and what its first line says."""

    header: str
    computations: Mapping[str, Computation] = field(repr=False)

    @property
    def scheduled(self) -> bool:
        """Whether instructions stand in the order of execution."""
        return "is_scheduled=true" in self.header

    @property
    def devices(self) -> int:
        """Devices that run the program: partitions times replicas."""
        count = 1
        for name in ("num_partitions", "replica_count"):
            found = re.search(rf"\b{name}=(\d+)", self.header)
            count *= int(found[1]) if found else 1
        return count

    @property
    def entry(self) -> Computation:
        """Where execution starts."""
        return next(one for one in self.computations.values() if one.entry)

    def visits(self) -> Iterator[Visit]:
        """Every computation that runs, along every way that leads to it, loops multiplied out."""
        pending = [Visit(self.entry, 1, False)]
        while pending:
            visit = pending.pop()
            yield visit
            for one in visit.computation.instructions:
                for part, name in one.called:
                    times = visit.times
                    if part in ("body", "condition"):
                        trips = trip_count(self, visit.computation, one)
                        per_run = None if trips is None else trips + (part == "condition")
                        times = None if times is None or per_run is None else times * per_run
                    conditional = visit.conditional or part == "branch"
                    pending.append(Visit(self.computations[name], times, conditional))


def parse(text: str) -> Module:
    """Takes apart what `jax.stages.Compiled.as_text()` gives; raises ``ValueError`` for text that is no HLO module."""
    lines = text.splitlines()
    header = next((line for line in lines if line.startswith("HloModule ")), None)
    if header is None:
        raise ValueError("no HLO module: no line starts with 'HloModule'")
    computations: dict[str, Computation] = {}
    name, entry, body = "", False, list[Instruction]()
    for line in lines:
        if head := _HEAD.match(line):
            name, entry, body = head[2], bool(head[1]), []
        elif line.startswith("}"):
            computations[name] = Computation(name, entry, tuple(body))
        elif (found := _LINE.match(line)) and name:
            body.append(_instruction(found[2], found[3], bool(found[1])))
    if not any(one.entry for one in computations.values()):
        raise ValueError("no HLO module: it has no ENTRY computation")
    return Module(header, computations)


def _instruction(name: str, text: str, root: bool) -> Instruction:
    end = _closing(text, 0) if text.startswith("(") else text.index(" ")
    shape, rest = text[:end].strip(), text[end:].strip()
    opcode, _, rest = rest.partition("(")
    close = _closing("(" + rest, 0) - 1
    arguments = rest[: close - 1] if close else rest
    # Older printers put each operand's shape in front of its name; names there start with a percent sign.
    bare = re.sub(r"/\*.*?\*/", "", arguments)
    words = re.findall(r"%([\w.\-]+)", bare) or [word.strip() for word in bare.split(",") if word.strip()]
    return Instruction(name, shape, opcode.strip(), tuple(words), arguments, rest[close:], root)


def _closing(text: str, start: int) -> int:
    """Where the parenthesis that opens at `start` has been closed: one behind its closing one."""
    depth = 0
    for at in range(start, len(text)):
        depth += (text[at] == "(") - (text[at] == ")")
        if depth == 0:
            return at + 1
    raise ValueError(f"parentheses do not match in {text[:80]!r}")


def trip_count(module: Module, inside: Computation, loop: Instruction) -> int | None:
    """How often a while loop's body runs; None where neither XLA's note nor a counted loop's constants say it."""
    known = re.search(r'"known_trip_count":\{"n":"?(\d+)', loop.attributes)
    if known:
        return int(known[1])
    parts = dict(loop.called)
    condition, body = module.computations[parts["condition"]], module.computations[parts["body"]]
    compare = condition.root
    if compare.opcode != "compare" or "direction=LT" not in compare.attributes:
        return None
    counter, limit = (condition.by_name[name] for name in compare.operands)
    position = re.search(r"index=(\d+)", counter.attributes)
    if counter.opcode != "get-tuple-element" or position is None or limit.opcode != "constant":
        return None
    step = _step(body, int(position[1]))
    start = _constant(inside, inside.by_name[loop.operands[0]], int(position[1]))
    if step is None or start is None or step < 1:
        return None
    return max(0, -(-(int(limit.arguments) - start) // step))


def _step(body: Computation, position: int) -> int | None:
    """What a loop adds to the counter at a position of its state."""
    if body.root.opcode != "tuple":
        return None
    add = body.by_name[body.root.operands[position]]
    if add.opcode != "add":
        return None
    values = [body.by_name[name] for name in add.operands]
    steps = [int(one.arguments) for one in values if one.opcode == "constant"]
    counters = [one for one in values if one.opcode == "get-tuple-element" and f"index={position}" in one.attributes]
    return steps[0] if len(steps) == 1 and counters else None


def _constant(inside: Computation, state: Instruction, position: int) -> int | None:
    """The value a loop's counter starts with."""
    if state.opcode != "tuple":
        return None
    value = inside.by_name[state.operands[position]]
    while value.opcode in ("copy", "convert"):
        value = inside.by_name[value.operands[0]]
    return int(value.arguments) if value.opcode == "constant" else None
