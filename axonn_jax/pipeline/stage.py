"""One virtual stage: groups of layers in a row, each with compiled programs: forward, backward, evaluation."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from axonn_jax.memory.host_arrays import HOST, replicated, transferred
from axonn_jax.pipeline.stage_programs import Result, StagePrograms
from axonn_jax.pipeline.trace import DY, LATER, TOKENS, Group, Stretch, X, crossing, trace_whole
from axonn_jax.schedule.policies import Backwards
from axonn_jax.tensor.params import Params, evaluating


class SegmentPrograms:
    """The compiled programs of a stretch of layers; compiling is the slow part of making them.

    `backwards` gives the backward pass as one program, "B", as two, "I" for the gradient of the input and "W" for those
    of the weights, or both ways. Where the last stretch `joins` forwards and backwards (`Policy.joins`),
    "FB" and "FI" take the place of "F", "B" and "I": values that the two share are then never written out.
    """

    def __init__(self, stretch: Stretch, *, backwards: Backwards, joins: bool):
        self.stretch = stretch
        traced = trace_whole(stretch)
        out = traced.closed.jaxpr.outvars
        skip = 1 if stretch.first else 2
        parts = stretch.parts
        gradients = dict(enumerate((name for name in stretch.names if name in parts.trained), skip))
        dtypes = {n: jnp.dtype(jnp.float32) if n in parts.roles else stretch.work.sums for n in gradients.values()}
        self.sums = {
            n: crossing(out[i].aval, stretch.mesh, parts.specs[n]).update(dtype=dtypes[n]) for i, n in gradients.items()
        }
        """Forms of the gradients while they add up, unreduced over `data`."""
        self.losses = crossing(out[0].aval, stretch.mesh) if stretch.last else None
        """Form of the last stretch's forward result: sums over each device's own targets."""
        self.joins = stretch.last and joins
        """True if a forward and its backward are one program."""
        goals, joined = _goals(backwards, [] if stretch.first else [1], list(gradients), joins=self.joins)
        self.chain = StagePrograms(stretch, traced, goals, gradients, self.sums, joined)
        plain = replace(stretch, keyed=False, parts=evaluating(stretch.parts))
        if stretch.keyed or plain.parts is not stretch.parts:
            traced = trace_whole(plain)
        self.evaluation = StagePrograms(plain, traced, {"F": [0]}, {}, {})


@dataclass
class Kept:
    """Values that a microbatch leaves with a group of layers between its tasks."""

    arrived: dict[str, jax.Array] = field(default_factory=dict)
    """Activations and their gradient."""
    handed: list[list[Any]] = field(default_factory=list)
    """Values that each program has handed over."""


class Stage:
    """One virtual stage, whose groups run in turn; the programs of equal groups are made once, in `compiled`."""

    def __init__(
        self,
        groups: Sequence[Group],
        *,
        backwards: Backwards,
        joins: bool,
        compiled: dict[int, SegmentPrograms] | None = None,
    ):
        made = {} if compiled is None else compiled
        for group in groups:
            if id(group.stretch) not in made:
                made[id(group.stretch)] = SegmentPrograms(group.stretch, backwards=backwards, joins=joins)
        self._members = [_Member(group, made[id(group.stretch)]) for group in groups]
        first, last = groups[0].stretch, self._members[-1].programs
        self.parts, self.mesh, self.work = first.parts, first.mesh, first.work
        self.first, self.last, self.keyed = first.first, last.stretch.last, first.keyed
        self.model = first.model
        """The model, with abstract parameters."""
        self.x, self.y = first.x, groups[-1].stretch.y
        """Incoming activations (None for the first stage) and outgoing ones (None for the last)."""
        read = next((group.stretch for group in groups if group.stretch.reads_tokens), None)
        self.tokens = None if read is None else read.inputs(())[TOKENS]
        """Form of a microbatch's tokens, for a stage that reads them."""
        self.joins, self.losses = last.joins, last.losses
        self.sums = {name: form for member in self._members for name, form in member.sums().items()}
        """Forms of the gradients while they add up, unreduced over `data`."""

    def kept(self) -> list[Kept]:
        """Return empty `Kept`s, one for each group, for a microbatch before its first task."""
        return [Kept() for _ in self._members]

    def run(
        self, name: str, given: Mapping[str, Any], arrived: jax.Array | None, kept: list[Kept], sums: Params
    ) -> Result:
        """Start the programs of a task, or of two in a row that are joined.

        `given` holds parameters and the microbatch's other inputs by name, `arrived` is the array of the task's
        message. `kept` and `sums`, of which the arrays are donated, are brought up to date.
        """
        loss = None
        for number, program in self._order(name):
            ran = self._members[number].run(program, given, arrived, kept[number], sums)
            arrived = ran.value
            loss = ran.loss if loss is None else loss
        return ran._replace(loss=loss)

    def evaluate(self, given: Mapping[str, Any], arrived: jax.Array | None) -> Result:
        """Start a forward without dropout that keeps nothing."""
        for member in self._members:
            ran = member.evaluate(given, arrived)
            arrived = ran.value
        return ran

    def bytes_kept(self) -> int:
        """Return bytes kept of a microbatch from forward to backward, beside `x`, on all devices of the stage."""
        between = [member.programs.stretch.x for member in self._members[1:]]
        kept = sum(member.programs.chain.bytes_kept() for member in self._members)
        return kept + sum(x.size * x.dtype.itemsize for x in between if x is not None)

    def _order(self, name: str) -> list[tuple[int, str]]:
        """Return the groups in the order in which they run a task, each with its program."""
        count = len(self._members)
        if name == "F":
            return [(number, name) for number in range(count)]
        if name in ("FB", "FI"):
            ahead = range(count - 1)
            return [*((n, "F") for n in ahead), (count - 1, name), *((n, name[1]) for n in reversed(ahead))]
        return [(number, name) for number in reversed(range(count))]


class _Member:
    """Group with its programs, which use the parameter names of the stretch they were made of."""

    def __init__(self, group: Group, programs: SegmentPrograms):
        self.programs = programs
        self._names = dict(zip(group.stretch.names, group.names, strict=True))
        stretch = programs.stretch
        self._offloads = stretch.work.activations == "offload"
        self._fixed = (
            {LATER: replicated(np.uint32(group.later), NamedSharding(stretch.mesh, P()))} if stretch.keyed else {}
        )

    def sums(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Return the forms of the gradients' sums."""
        return {own: self.programs.sums[name] for name, own in self._names.items() if name in self.programs.sums}

    def run(self, name: str, given: Mapping[str, Any], arrived: jax.Array | None, kept: Kept, sums: Params) -> Result:
        """Start one program; see `Stage.run`."""
        if name.startswith("F") and arrived is not None:
            kept.arrived[X] = arrived
        elif name in ("B", "I"):
            if arrived is not None:
                kept.arrived[DY] = arrived
            if self._offloads:
                kept.arrived |= self._moved(kept, "device")
        own = {their: sums[name] for their, name in self._names.items() if their in self.programs.sums}
        ran = self.programs.chain.run(name, self._inputs(given, kept.arrived), kept.handed, own)
        sums.update((self._names[their], value) for their, value in ran.sums.items())
        reads = self.programs.chain.reads(name)
        kept.arrived = {slot: value for slot, value in kept.arrived.items() if slot in reads}
        if name == "F" and self._offloads:
            kept.arrived |= self._moved(kept, HOST)
        return ran

    def evaluate(self, given: Mapping[str, Any], arrived: jax.Array | None) -> Result:
        """Start a forward without dropout that keeps nothing."""
        inputs = self._inputs(given, {} if arrived is None else {X: arrived})
        return self.programs.evaluation.run("F", inputs, [], {})

    def _moved(self, kept: Kept, kind: str) -> dict[str, jax.Array]:
        return {slot: transferred(x, kind) for slot, x in kept.arrived.items() if slot == X}

    def _inputs(self, given: Mapping[str, Any], arrived: Mapping[str, jax.Array]) -> dict[str, Any]:
        own = {their: given[own] for their, own in self._names.items()}
        return {**given, **own, **arrived, **self._fixed}


def _goals(
    backwards: Backwards, dx: list[int], own: list[int], *, joins: bool
) -> tuple[dict[str, list[int]], dict[str, tuple[str, ...]]]:
    """Return the outputs of each program, and the programs that combine two of these.

    A backward in one piece is made of its two where both ways exist, so that both need the same of the forward.
    """
    first = {"F": [0], "I": dx} if not joins else {"FI": [0, *dx]}
    whole = "FB" if joins else "B"
    if backwards == "whole":
        return ({"FB": [0, *dx, *own]} if joins else {"F": [0], "B": dx + own}), {}
    *_, before = first
    return {**first, "W": own}, {whole: (before, "W")} if backwards == "both" else {}
