"""A step whose optimizer state is in host memory: one program for the gradients, one a bucket for the update."""

from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from axonn_jax.grid import BATCH_AXES
from axonn_jax.memory.elementwise import check_elementwise
from axonn_jax.memory.gradients import unreduced_shardings
from axonn_jax.memory.offload import Offload
from axonn_jax.memory.scale import Scale, next_scale
from axonn_jax.tensor.params import Params
from axonn_jax.train.program import StageProgram
from axonn_jax.train.step import Measured, Step, StepMetrics, TrainState


class Summed(NamedTuple):
    """A step before its update, where nothing has to be known of all gradients first."""

    grads: Params
    """Each device's own sums."""
    loss: jax.Array
    finite: jax.Array
    """Whether the loss and what the sums add up to are finite."""
    scale: Scale
    """The next step's."""


class OffloadedStep:
    """Does what a `Step` does, with the optimizer's state streamed through the devices (`memory.offload`).

    Where nothing is clipped, no loss scaled, no gradient scattered over `data` and no sequence split, a bucket of
    gradients is reduced beside the update of the one before; else all are reduced first. Raises ``UserError`` where the
    optimizer is not elementwise.
    """

    def __init__(self, step: Step, program: StageProgram):
        check_elementwise(step.optimizer, "memory.offload = optimizer")
        self.step, self.program = step, program
        shapes = {name: p.shape for name, p in program.parts.params.items()}
        layouts = (program.parts.specs, program.grad_specs)
        mesh, precisions, bucket = program.grid.mesh, step.precisions, step.bucket
        self.update = Offload(step.optimizer, shapes, *layouts, mesh, precisions=precisions, bucket=bucket)
        plain = step.clip == 0.0 and not precisions.scaled and not program.zero and program.token_axes == BATCH_AXES
        self.interleaved = plain and program.grid.shape.data > 1

    def run(
        self, measured: Any, state: TrainState, tokens: jax.Array, key: jax.Array | None
    ) -> tuple[TrainState, StepMetrics]:
        """The state after a step, and the step's loss and gradient norm; `measured` is compiled for these tokens.

        Dispatches and returns early: waits only for the host's copy of a bucket where the devices have no room for
        another one.
        """
        if self.interleaved:
            summed: Summed = measured(state.model.weights, state.scale, tokens, key)
            model, norm = self.update.reducing(state.model, summed.grads, summed.finite)
            metrics: StepMetrics = {"loss": summed.loss, "grad_norm": norm, "skipped": summed.scale.skipped}
            return TrainState(model, summed.scale), metrics
        found: Measured = measured(state.model.weights, state.scale, tokens, key)
        model = self.update.after(state.model, found.grads, found.factor, found.finite)
        return TrainState(model, found.scale), found.metrics

    @cached_property
    def measured(self) -> Any:
        """The compiled part of a step before the update (see `Step.measured`)."""
        program, scalar = self.program, self.step.scalar
        shardings: Any
        if self.interleaved:
            sums: Any = unreduced_shardings(program.parts.specs, program.grid.mesh)
            shardings = Summed(sums, scalar, scalar, scalar)  # type: ignore[arg-type]
        else:
            grads = {name: NamedSharding(program.grid.mesh, spec) for name, spec in program.grad_specs.items()}
            shardings = Measured(grads, scalar, scalar, scalar, scalar)  # type: ignore[arg-type]
        before = self._summed if self.interleaved else self.step.measured
        return jax.jit(before, out_shardings=shardings, compiler_options=self.step.compiler_options())

    def _summed(self, weights: Params, scale: Scale, tokens: jax.Array, key: jax.Array | None) -> Summed:
        sums, loss, squares = self.program.unreduced(weights, tokens, key)
        finite = jnp.isfinite(squares) & jnp.isfinite(loss)
        return Summed(sums, loss, finite, next_scale(scale, finite))
