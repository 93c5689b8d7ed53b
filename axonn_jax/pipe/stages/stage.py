"""Virtual stage: consecutive groups of layers, each with compiled forward, backward and evaluation programs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from axonn_jax.core.memory.host_arrays import HOST, replicated, transferred
from axonn_jax.core.tensor.params import Params, evaluating
from axonn_jax.pipe.schedule.policies import Backwards
from axonn_jax.pipe.stages.region import LocalShards
from axonn_jax.pipe.stages.stage_programs import Result, StageFunction, StagePrograms
from axonn_jax.pipe.stages.trace import (
    DY,
    LAYER_OFFSET,
    TOKENS,
    Group,
    Stretch,
    Traced,
    X,
    boundary_struct,
    trace_forward_backward,
)


class SegmentPrograms:
    """The compiled programs of a stretch of layers; constructing one is slow, because it compiles them.

    `backwards` selects the backward pass: one program, "B"; two, "I" for the gradient of the input and "W" for those
    of the weights; or both variants. Where the last stretch `joins` forwards and backwards (`Policy.joins`), "FB" and
    "FI" replace "F", "B" and "I": values that the two share are then never written out.
    """

    def __init__(self, stretch: Stretch, *, backwards: Backwards, joins: bool):
        self.stretch = stretch
        traced = trace_forward_backward(stretch)
        out = traced.closed.jaxpr.outvars
        # Outputs are the result, the input's gradient (not in the first stretch), then one gradient per parameter.
        skip = 1 if stretch.first else 2
        parts = stretch.parts
        gradients = dict(enumerate((name for name in stretch.names if name in parts.trained), skip))
        dtypes = {n: jnp.dtype(jnp.float32) if n in parts.roles else stretch.work.sums for n in gradients.values()}
        self.sums = {
            n: boundary_struct(out[i].aval, stretch.mesh, parts.specs[n]).update(dtype=dtypes[n])
            for i, n in gradients.items()
        }
        """Shape and layout of each accumulated gradient, unreduced over `data`."""
        self.losses = boundary_struct(out[0].aval, stretch.mesh) if stretch.last else None
        """Shape and layout of the last stretch's forward result: sums over each device's own targets."""
        self.joins = stretch.last and joins
        """True if a forward and its backward are one program."""
        goals, combined = goals_of(backwards, [0], [] if stretch.first else [1], list(gradients), joins=self.joins)
        region = LocalShards(stretch.mesh)
        function = stage_function(stretch, traced, gradients)
        self.chain = StagePrograms(function, region, goals, self.sums, stretch.work.activations, combined)
        # Evaluation runs without dropout, so it needs a trace of its own only if training differs from it.
        plain = replace(stretch, keyed=False, parts=evaluating(stretch.parts))
        if stretch.keyed or plain.parts is not stretch.parts:
            traced = trace_forward_backward(plain)
        function = stage_function(plain, traced, {})
        self.evaluation = StagePrograms(function, region, {"F": [0]}, {}, stretch.work.activations)


def stage_function(stretch: Stretch, traced: Traced, gradients: Mapping[int, str]) -> StageFunction:
    """Return the traced forward and backward pass of a stretch with the roles of its inputs and results."""
    loss = traced.closed.jaxpr.outvars[0].aval
    heads = {0: boundary_struct(loss, stretch.mesh) if stretch.last else stretch.y}
    heads |= {} if stretch.x is None else {1: stretch.x}
    return StageFunction(traced, stretch.all_inputs, stretch.names, heads, gradients, stretch.last)  # type: ignore[arg-type]


@dataclass
class GroupState:
    """Values of one microbatch that a group of layers holds between its tasks."""

    arrived: dict[str, jax.Array] = field(default_factory=dict)
    """Incoming activations and the gradient of the outgoing ones."""
    residuals: list[list[Any]] = field(default_factory=list)
    """Values that each program has handed to later ones; None once no program needs them."""


class Stage:
    """One virtual stage, which runs its groups in turn.

    Groups of the same stretch share one `SegmentPrograms`, looked up in `compiled` by the stretch's id; new ones are
    added there, so that the stages of a rank can share programs too.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        *,
        backwards: Backwards,
        joins: bool,
        compiled: dict[int, SegmentPrograms] | None = None,
    ):
        programs = {} if compiled is None else compiled
        for group in groups:
            if id(group.stretch) not in programs:
                programs[id(group.stretch)] = SegmentPrograms(group.stretch, backwards=backwards, joins=joins)
        self._members = [_Member(group, programs[id(group.stretch)]) for group in groups]
        first, last = groups[0].stretch, self._members[-1].programs
        self.parts, self.mesh, self.work = first.parts, first.mesh, first.work
        self.first, self.last, self.keyed = first.first, last.stretch.last, first.keyed
        self.model = first.model
        """The model, with abstract parameters."""
        self.x, self.y = first.x, groups[-1].stretch.y
        """Incoming activations (None for the first stage) and outgoing ones (None for the last)."""
        read = next((group.stretch for group in groups if group.stretch.reads_tokens), None)
        self.tokens = None if read is None else read.inputs(())[TOKENS]
        """Shape and layout of a microbatch's tokens, for a stage that reads them."""
        self.joins, self.losses = last.joins, last.losses
        self.sums = {name: form for member in self._members for name, form in member.sums().items()}
        """Shape and layout of each accumulated gradient, unreduced over `data`."""

    def new_states(self) -> list[GroupState]:
        """Return an empty state for each group, for a microbatch before its first task."""
        return [GroupState() for _ in self._members]

    def run(
        self, name: str, inputs: Mapping[str, Any], arrived: jax.Array | None, states: list[GroupState], sums: Params
    ) -> Result:
        """Start the programs of a task, or of two consecutive tasks that are joined.

        Args:
            name: Program to run, such as "F" or "FB".
            inputs: Parameters and the microbatch's other inputs, by name.
            arrived: Array of the task's message: the incoming activations or gradient.
            states: The microbatch's state in each group; updated in place.
            sums: Accumulated gradients, by name; updated in place, the previous arrays are donated.
        """
        loss = None
        for number, program in self._order(name):
            ran = self._members[number].run(program, inputs, arrived, states[number], sums)
            arrived = ran.value
            loss = ran.loss if loss is None else loss
        return ran._replace(loss=loss)

    def evaluate(self, inputs: Mapping[str, Any], arrived: jax.Array | None) -> Result:
        """Start a forward pass without dropout that saves nothing for a backward pass."""
        for member in self._members:
            ran = member.evaluate(inputs, arrived)
            arrived = ran.value
        return ran

    def residual_bytes(self) -> int:
        """Return the bytes a microbatch holds from forward to backward, excluding `x`, on all devices of the stage."""
        boundaries = [member.programs.stretch.x for member in self._members[1:]]
        total = sum(member.programs.chain.residual_bytes() for member in self._members)
        return total + sum(x.size * x.dtype.itemsize for x in boundaries if x is not None)

    def _order(self, name: str) -> list[tuple[int, str]]:
        """Return (group number, program) pairs in the order in which a task runs them."""
        count = len(self._members)
        if name == "F":
            return [(number, name) for number in range(count)]
        if name in ("FB", "FI"):
            # Only the last group's forward runs straight into its backward. The groups ahead of it need separate
            # programs, since the gradient reaches them after that.
            ahead = range(count - 1)
            return [*((n, "F") for n in ahead), (count - 1, name), *((n, name[1]) for n in reversed(ahead))]
        return [(number, name) for number in reversed(range(count))]


class _Member:
    """Group with its programs, which use the parameter names of the stretch they were compiled from."""

    def __init__(self, group: Group, programs: SegmentPrograms):
        self.programs = programs
        self._names = dict(zip(group.stretch.names, group.names, strict=True))
        stretch = programs.stretch
        self._offloads = stretch.work.activations == "offload"
        self._fixed = (
            {LAYER_OFFSET: replicated(np.uint32(group.layer_offset), NamedSharding(stretch.mesh, P()))}
            if stretch.keyed
            else {}
        )

    def sums(self) -> dict[str, jax.ShapeDtypeStruct]:
        return {
            group_name: self.programs.sums[name]
            for name, group_name in self._names.items()
            if name in self.programs.sums
        }

    def run(
        self, name: str, inputs: Mapping[str, Any], arrived: jax.Array | None, state: GroupState, sums: Params
    ) -> Result:
        if name.startswith("F") and arrived is not None:
            state.arrived[X] = arrived
        elif name in ("B", "I"):
            if arrived is not None:
                state.arrived[DY] = arrived
            if self._offloads:
                state.arrived |= self._moved(state, "device")
        group_sums = {n: sums[group_name] for n, group_name in self._names.items() if n in self.programs.sums}
        ran = self.programs.chain.run(name, self._inputs(inputs, state.arrived), state.residuals, group_sums)
        sums.update((self._names[n], value) for n, value in ran.sums.items())
        # Drop references as soon as no later program reads the array: its device memory is freed between tasks.
        reads = self.programs.chain.reads(name)
        state.arrived = {slot: value for slot, value in state.arrived.items() if slot in reads}
        if name == "F" and self._offloads:
            state.arrived |= self._moved(state, HOST)
        return ran

    def evaluate(self, inputs: Mapping[str, Any], arrived: jax.Array | None) -> Result:
        group_inputs = self._inputs(inputs, {} if arrived is None else {X: arrived})
        return self.programs.evaluation.run("F", group_inputs, [], {})

    def _moved(self, state: GroupState, kind: str) -> dict[str, jax.Array]:
        return {slot: transferred(x, kind) for slot, x in state.arrived.items() if slot == X}

    def _inputs(self, inputs: Mapping[str, Any], arrived: Mapping[str, jax.Array]) -> dict[str, Any]:
        params = {name: inputs[group_name] for name, group_name in self._names.items()}
        return {**inputs, **params, **arrived, **self._fixed}


def goals_of(
    backwards: Backwards, forward: list[int], dx: list[int], dw: list[int], *, joins: bool
) -> tuple[dict[str, list[int]], dict[str, tuple[str, ...]]]:
    """Return the output positions of each program, and the programs that combine two of these.

    Where both variants of the backward exist, "B" is "I" and "W" in one program rather than a cut of its own, so that
    both variants take the same residuals from the forward.

    Args:
        backwards: Variants of the backward pass.
        forward: Positions of the forward pass's results.
        dx: Position of the gradient of the incoming activations, if there are any.
        dw: Positions of the gradients of the parameters.
        joins: True if a forward and its backward are one program.
    """
    first = {"F": forward, "I": dx} if not joins else {"FI": [*forward, *dx]}
    combined = "FB" if joins else "B"
    if backwards == "whole":
        return ({"FB": [*forward, *dx, *dw]} if joins else {"F": forward, "B": dx + dw}), {}
    *_, input_gradient = first
    return {**first, "W": dw}, {combined: (input_gradient, "W")} if backwards == "both" else {}
