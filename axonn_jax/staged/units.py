"""Units of a traced loss, the smallest parts that a stage can hold: where each begins in the program, and its costs."""

import re
from bisect import bisect_left
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import prod
from typing import Any

from jax.extend.core import Var

from axonn_jax.core.backend.jaxprs import bodies
from axonn_jax.staged.loss_trace import LossTrace

FREE = frozenset({"param", "state"})
"""Kinds of inputs of which a value that depends on nothing else is computed in every stage that reads it: a cast or a
transposed table costs less than a message, and a table that two stages read is then a parameter of both."""


@dataclass(frozen=True)
class Unit:
    """Consecutive equations of a traced loss that stay together."""

    name: str
    """Path of the module whose parameters the unit begins with."""
    begin: int
    """Number of its first equation, among those of `Flow.steps`."""
    flops: int
    """FLOPs of its forward pass, on all devices."""
    params: int
    """Elements of the parameters that no earlier unit reads."""


class Flow:
    """Values of a traced loss, by what they depend on.

    A value that depends on parameters and state alone, or on the batch alone (masks, labels, random bits), is computed
    in every stage that reads it. All other equations are `steps`, in the order of the trace, in which every value is
    computed ahead of its readers: a cut anywhere between two of them is a pipeline.
    """

    def __init__(self, trace: LossTrace):
        self.trace, jaxpr = trace, trace.closed.jaxpr
        self.slot_of = dict(zip(jaxpr.invars, trace.inputs, strict=True))
        self.producer: dict[Var, Any] = {}
        self.steps: list[Any] = []
        self.step_of: dict[Var, int] = {}
        """Number of the step that computes a value; values of other equations are missing."""
        self.last_read: dict[Var, int] = {}
        """Last step that reads a step's value; results of the loss are read at the very end."""
        # Values that depend on parameters or state, and values that depend on the batch; constants are neither.
        free = {var for var, slot in self.slot_of.items() if slot.kind in FREE}
        of_batch = set(self.slot_of) - free
        arrays_of: dict[Var, frozenset[str]] = {
            var: frozenset({slot.name}) for var, slot in self.slot_of.items() if slot.kind in FREE
        }
        self.read_at: dict[str, list[int]] = {}
        """Steps that read a parameter or state, or a value that depends on these alone, by path."""
        for eqn in jaxpr.eqns:
            self.producer.update((var, eqn) for var in eqn.outvars)
            read = [atom for atom in eqn.invars if isinstance(atom, Var)]
            arrays: frozenset[str] = frozenset().union(*(arrays_of.get(var, frozenset()) for var in read))
            reads_free, reads_batch = (any(var in group for var in read) for group in (free, of_batch))
            if reads_free and reads_batch:
                number = len(self.steps)
                self.steps.append(eqn)
                self.step_of.update((var, number) for var in eqn.outvars)
                for name in arrays:
                    self.read_at.setdefault(name, []).append(number)
                self.last_read.update((var, number) for var in read if var in self.step_of)
            elif reads_free:
                arrays_of.update((var, arrays) for var in eqn.outvars)
            for group, member in ((free, reads_free), (of_batch, reads_batch)):
                group.update(eqn.outvars if member else ())
        end = len(self.steps)
        for var, slot in zip(jaxpr.outvars, trace.results, strict=True):
            if slot.kind != "state" and isinstance(var, Var) and var in self.step_of:
                self.last_read[var] = end

    def crossing(self, position: int) -> list[Var]:
        """Return the values that are computed before a step and read in it or later, in the order of the trace."""
        return [var for var, step in self.step_of.items() if step < position <= self.last_read.get(var, -1)]

    def crossing_bytes(self) -> list[int]:
        """Return the bytes of the values that cross a cut before each step, and after the last one."""
        change = [0] * (len(self.steps) + 2)
        for var, last in self.last_read.items():
            if last > self.step_of[var]:
                change[self.step_of[var] + 1] += bytes_of(var)
                change[last + 1] -= bytes_of(var)
        return list(accumulate(change))[: len(self.steps) + 1]


def units_of(
    flow: Flow,
    sizes: Mapping[str, int],
    collections: frozenset[str] = frozenset(),
    names: Collection[str] | None = None,
) -> list[Unit]:
    """Return the units of a traced loss, in order.

    A unit begins where the program first reads a parameter or state of the next module: of the next entry of a list of
    layers, or of the next module outside of lists. Between the last read of one module's arrays and the first of the
    next one's, the cut goes where the fewest bytes cross: behind the residual addition, ahead of the norm's mean.
    State counts, so that a BatchNorm's statistics lie with the same stage in a training step and in an evaluation.
    An entry is cut between its own modules too, as a block between attention and MLP, where no more bytes cross than
    ahead of it: stages are the better balanced.

    Args:
        flow: The traced loss.
        sizes: Number of elements of every parameter, by path.
        collections: Roots of paths under which Linen has arrays of the same modules, as `params` and `batch_stats`.
        names: Units of another trace of the loss, of which entries are cut as they are there; None to choose.
    """
    modules: dict[str, dict[str, list[int]]] = {}
    for name, steps in flow.read_at.items():
        root, _, path = name.partition(".")
        path = path if root in collections else name
        module = module_of(path)
        part = ".".join(path.split(".")[:-1][: module.count(".") + 2])
        modules.setdefault(module, {}).setdefault(part, []).extend(steps)
    crossing = flow.crossing_bytes()
    reads = {module: [step for steps in parts.values() for step in steps] for module, parts in modules.items()}
    cuts = [(0, min(reads, key=lambda module: min(reads[module]), default="loss")), *_cuts(reads, crossing, 0)]
    ends = [*(begin for begin, _ in cuts[1:]), len(flow.steps)]
    for (begin, module), end in zip([*cuts], ends, strict=True):
        inside = {
            part: within
            for part, steps in modules.get(module, {}).items()
            if (within := [step for step in steps if begin <= step < end])
        }
        most = crossing[begin] if begin else crossing[end]
        cuts += [
            (at, part)
            for at, part in _cuts(inside, crossing, begin)
            if part != module and (crossing[at] <= most if names is None else part in names)
        ]
    cuts.sort()
    flops = [0, *accumulate(flops_of(eqn) for eqn in flow.steps)]
    seen: set[str] = set()
    units = []
    for number, (begin, module) in enumerate(cuts):
        end = cuts[number + 1][0] if number + 1 < len(cuts) else len(flow.steps)
        params = {name for name, steps in flow.read_at.items() if any(begin <= step < end for step in steps)} - seen
        seen |= params
        units.append(Unit(module, begin, flops[end] - flops[begin], sum(sizes.get(name, 0) for name in params)))
    return units


def _cuts(reads: Mapping[str, Sequence[int]], crossing: Sequence[int], start: int) -> list[tuple[int, str]]:
    """Return the step where each module but the first begins, by the steps that read its arrays, from `start` on."""
    begins = sorted((min(steps), module) for module, steps in reads.items())
    cuts: list[tuple[int, str]] = []
    for (_, previous), (first, module) in pairwise(begins):
        steps = sorted(reads[previous])
        last = cuts[-1][0] if cuts else start
        low = max(steps[bisect_left(steps, first) - 1] if steps[0] < first else first, last) + 1
        if low <= first:
            cuts.append((min(range(low, first + 1), key=lambda at: (crossing[at], -at)), module))
    return cuts


def module_of(name: str) -> str:
    """Return the path of the module that a parameter belongs to: an entry of a list, or a module outside of lists.

    An entry of a list is the first number in a path, or else the first name that ends in one, as `Block_3`.
    """
    parts = name.split(".")
    for numbered in (r"\d+", r".*\d"):
        at = next((at for at, part in enumerate(parts[:-1]) if re.fullmatch(numbered, part)), None)
        if at is not None:
            return ".".join(parts[: at + 1])
    return ".".join(parts[:-1]) or name


def bytes_of(var: Any) -> int:
    """Return the size of a traced value in bytes."""
    return int(var.aval.size) * int(getattr(var.aval.dtype, "itemsize", 8))


def flops_of(eqn: Any) -> int:
    """Return the FLOPs of an equation; an elementwise one counts its results."""
    inner = list(bodies(eqn))
    if eqn.primitive.name in ("custom_jvp_call", "custom_vjp_call"):
        inner = inner[:1]
    if inner:
        times = eqn.params.get("length", 1) if eqn.primitive.name == "scan" else 1
        # The body of a manual region has the shapes of one device.
        if eqn.primitive.name == "shard_map":
            times = eqn.params["mesh"].size
        return int(times * sum(flops_of(each) for body in inner for each in body.eqns))
    results = sum(int(var.aval.size) for var in eqn.outvars)
    if eqn.primitive.name == "dot_general":
        (contracted, _), _ = eqn.params["dimension_numbers"]
        return 2 * results * prod(eqn.invars[0].aval.shape[dim] for dim in contracted)
    if eqn.primitive.name == "conv_general_dilated":
        kernel, numbers = eqn.invars[1].aval, eqn.params["dimension_numbers"]
        return 2 * results * int(kernel.size) // kernel.shape[numbers.rhs_spec[0]]
    return results


def needed(
    flow: Flow, atoms: Iterable[Any], defined: set[Var], steps: range | None = None
) -> tuple[list[Any], list[Var]]:
    """Return the equations that compute values, in the order of the trace, and the program's inputs that they read.

    Args:
        flow: The traced loss.
        atoms: The values.
        defined: Values that are there already, which stops the search.
        steps: Steps that may be among the equations; all other equations may be in any case.

    Raises:
        KeyError: A value needs a step outside of `steps`.
    """
    equations: dict[int, Any] = {}
    inputs: dict[Var, None] = {}
    todo = [atom for atom in atoms if isinstance(atom, Var)]
    seen: set[Var] = set()
    constants = set(flow.trace.closed.jaxpr.constvars)
    while todo:
        var = todo.pop()
        if var in seen or var in defined or var in constants:
            continue
        seen.add(var)
        if var in flow.slot_of:
            inputs[var] = None
            continue
        step = flow.step_of.get(var)
        if step is not None and (steps is None or step not in steps):
            raise KeyError(var)
        eqn = flow.producer[var]
        equations[id(eqn)] = eqn
        todo += [atom for atom in eqn.invars if isinstance(atom, Var)]
    order = {id(eqn): at for at, eqn in enumerate(flow.trace.closed.jaxpr.eqns)}
    ordered = sorted(equations.values(), key=lambda eqn: order[id(eqn)])
    position = {var: at for at, var in enumerate(flow.trace.closed.jaxpr.invars)}
    return ordered, sorted(inputs, key=position.__getitem__)
