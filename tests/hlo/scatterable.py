"""All-reduces of which a device reads its own shard only: what a compiler may turn into reduce-scatters.

XLA's partitioner sums a gradient that is laid out over the summing devices by an all-reduce and a slice. The GPU
backend makes a reduce-scatter of the two, the CPU backend does not; this says what would be sent if it did.
"""

import re
from collections.abc import Iterable
from fractions import Fraction

from hlo.collectives import Collective, Totals
from hlo.program import Array, Computation, Module, arrays, parse

from axonn_jax.planning.machines.network import ring_bytes

_MOVED = ("bitcast", "copy", "convert", "reshape", "transpose")


def totals_if_scattered(program: str | Module, found: Iterable[Collective]) -> Totals:
    """As `totals` of a program's collectives, every all-reduce that is only sliced as its reduce-scatter.

    Where the slice is over s of an all-reduce's G devices, what is counted is a reduce-scatter over s and an
    all-reduce of the shard over G/s: the least that a compiler could make of it.
    """
    module = parse(program) if isinstance(program, str) else program
    seen: dict[tuple[str, str], int] = {}
    sums: Totals = {}
    for one in found:
        position = seen.get((one.computation, one.name), 0)
        seen[one.computation, one.name] = position + 1
        parts = scatterable(module, one, position) if one.kind == "all-reduce" else 1
        shares = {one.kind: one.bytes_once}
        if parts > 1 and one.group % parts == 0:
            left = ring_bytes("all-reduce", one.whole // parts, one.group // parts)
            shares = {"reduce-scatter": ring_bytes("reduce-scatter", one.whole, parts), "all-reduce": left}
        for kind, amount in shares.items():
            if one.times is None:
                raise ValueError(f"{one.name} ({one.op_name}) is in a loop whose trip count cannot be read")
            sums[kind, one.over] = sums.get((kind, one.over), Fraction(0)) + one.times * amount
    return {key: amount for key, amount in sorted(sums.items()) if amount}


def scatterable(module: Module, one: Collective, position: int = 0) -> int:
    """Into how many parts all readers of a collective's result (its member at `position`) slice it; 1 if not at all."""
    computation = module.computations[one.computation]
    made = computation.by_name[one.name]
    members = len(arrays(made.shape))
    if members == 1:
        return _read(module, computation, made.name, one.operand)
    parts = [
        _read(module, computation, user.name, one.operand)
        for user in computation.instructions
        if made.name in user.operands and _index(user.attributes) == position % members
    ]
    return min(parts, default=1)


def _read(module: Module, computation: Computation, name: str, whole: Array) -> int:
    """The least number of parts into which a reader of the value slices it; 1 where one reads all or gives it back."""
    if computation.root.name == name:
        return 1
    least: list[int] = []
    for user in computation.instructions:
        if name not in user.operands:
            continue
        if user.opcode == "dynamic-slice" and user.operands[0] == name:
            least.append(whole.elements // arrays(user.shape)[0].elements)
        elif user.opcode in _MOVED:
            least.append(_read(module, computation, user.name, whole))
        elif user.opcode == "fusion":
            inner = module.computations[dict(user.called)["calls"]]
            parameters = {int(own.arguments): own for own in inner.instructions if own.opcode == "parameter"}
            least += [
                _read(module, inner, parameters[at].name, whole)
                for at, operand in enumerate(user.operands)
                if operand == name
            ]
        else:
            return 1
    return min(least, default=1)


def _index(attributes: str) -> int | None:
    found = re.search(r"\bindex=(\d+)", attributes)
    return int(found[1]) if found else None
