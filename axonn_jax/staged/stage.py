"""Virtual stage of any Flax model: its compiled programs, and what a microbatch holds between them."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax

from axonn_jax.core.options import Activations
from axonn_jax.core.tensor.params import Params
from axonn_jax.pipe.schedule.policies import Backwards
from axonn_jax.pipe.stages.stage import GroupState, goals_of
from axonn_jax.pipe.stages.stage_programs import Result, StageFunction, StagePrograms
from axonn_jax.pipe.stages.trace import DY, X
from axonn_jax.staged.crossing import Crossing
from axonn_jax.staged.loss_trace import Replicas, TraceSlot
from axonn_jax.staged.stage_trace import StageRegion

STATE = " state "
"""Prefix of the names of inputs that are state of the model."""


@dataclass(frozen=True)
class StageSides:
    """Messages of a stage."""

    incoming: Crossing | None
    """Messages from the stage before; None for the first stage."""
    outgoing: Crossing | None
    """Messages to the next stage; None for the last stage."""


class LossStage:
    """One virtual stage of a loss; see `RankStage` for each member.

    Args:
        replicas: Replicas on the mesh of the stage.
        sides: Its messages.
        function: Its forward and backward pass.
        evaluation: Its forward pass in an evaluation.
        slots: Results of the loss by their position in `function`, and in `evaluation`.
        sums: Form of the accumulated gradients, by name.
        idle: Form of the gradients of parameters of its rank that no loss reads, which stay zero: the optimizer may
            decay them, and another rank may read them.
        activations: Policy for the values that the forward pass saves.
        backwards: Variants of the backward pass.
        joins: True if the last stage joins forwards and backwards.
    """

    def __init__(
        self,
        replicas: Replicas,
        sides: StageSides,
        function: StageFunction,
        evaluation: StageFunction,
        slots: tuple[Mapping[int, TraceSlot], Mapping[int, TraceSlot]],
        sums: Mapping[str, jax.ShapeDtypeStruct],
        idle: Mapping[str, jax.ShapeDtypeStruct],
        *,
        activations: Activations,
        backwards: Backwards,
        joins: bool,
    ):
        self.first, self.last = sides.incoming is None, sides.outgoing is None
        self.joins, self.sums, self._summed = self.last and joins, {**sums, **idle}, tuple(sums)
        self.x = None if sides.incoming is None else sides.incoming.struct
        self.result_slots, self.evaluation_slots = slots
        """Results of the loss by their position among those of a program's `further`."""
        self.reads = frozenset(function.inputs) | frozenset(evaluation.inputs)
        """Names of the inputs of its programs."""
        region, forward = StageRegion(replicas), [0, *sorted(function.further)]
        dx = [] if self.first else [1]
        goals, combined = goals_of(backwards, forward, dx, list(function.gradients), joins=self.joins)
        self._chain = StagePrograms(function, region, goals, sums, activations, combined)
        forward = [0, *sorted(evaluation.further)]
        self._compile_evaluation = lambda: StagePrograms(evaluation, region, {"F": forward}, {}, activations)

    @cached_property
    def evaluation(self) -> StagePrograms:
        """Program of an evaluation, compiled on the first use: many runs never evaluate."""
        return self._compile_evaluation()

    def new_states(self) -> GroupState:
        """Return an empty state of a microbatch, before its first task."""
        return GroupState()

    def run(
        self, name: str, inputs: Mapping[str, Any], arrived: jax.Array | None, states: GroupState, sums: Params
    ) -> Result:
        """Start a program; `states` and `sums` are updated in place, the sums' previous arrays are donated."""
        if name.startswith("F"):
            # The next microbatch writes the state, and this one's backward pass may still read what its forward read.
            states.arrived |= {slot: value for slot, value in inputs.items() if slot.startswith(STATE)}
        if arrived is not None:
            states.arrived[X if name.startswith("F") else DY] = arrived
        stage_sums = {parameter: sums[parameter] for parameter in self._summed}
        ran = self._chain.run(name, {**inputs, **states.arrived}, states.residuals, stage_sums)
        sums.update(ran.sums)
        # Drop references as soon as no later program reads the array: its device memory is freed between tasks.
        reads = self._chain.reads(name)
        states.arrived = {slot: value for slot, value in states.arrived.items() if slot in reads}
        return ran

    def evaluate(self, inputs: Mapping[str, Any], arrived: jax.Array | None) -> Result:
        """Start a forward pass of an evaluation, which saves nothing for a backward pass."""
        return self.evaluation.run("F", {**inputs, **({} if arrived is None else {X: arrived})}, [], {})

    def residual_bytes(self) -> int:
        """Return the bytes that a microbatch holds from forward to backward, excluding `x`, on all devices."""
        return self._chain.residual_bytes()
