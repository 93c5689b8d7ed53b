"""A step whose optimizer state is in host memory: one program for the gradients, one a bucket for the update."""

from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from axonn_jax.grid import BATCH_AXES
from axonn_jax.memory.offload import OffloadedOptimizer
from axonn_jax.memory.offload_buckets import unreduced_shardings
from axonn_jax.memory.precision import Scale, next_scale
from axonn_jax.tensor.params import Params
from axonn_jax.tensor.weight_gather import Weights
from axonn_jax.train.engines.program import StageProgram
from axonn_jax.train.engines.step import MeasuredStep, StepMetrics, TrainState, TrainStep


class OffloadedStep:
    """Training step like `TrainStep`, with the optimizer's state streamed through the devices (`memory.offload`).

    Where nothing is clipped, no loss scaled, no gradient scattered over `data`, no sequence split, no expert counts its
    tokens and weights are trained and not adapters, a bucket of gradients is reduced beside the update of the one
    before; else all are reduced first. Raises ``UserError`` where the optimizer looks at all parameters together.
    """

    def __init__(self, step: TrainStep, program: StageProgram, resident: int | None):
        self.step, self.program = step, program
        self.update = OffloadedOptimizer(step.update, resident=resident)
        plain = step.clip == 0.0 and not program.precisions.scaled and program.token_axes == BATCH_AXES
        measured_first = program.zero or bool(program.parts.loads or program.parts.adapters)
        self.interleaved = plain and not measured_first and program.grid.shape.replicas > 1

    def run(
        self, measured: Any, state: TrainState, batch: Any, key: jax.Array | None, frozen: Params
    ) -> tuple[TrainState, StepMetrics]:
        """The state after a step, and the step's loss and gradient norm; `measured` is compiled for such a batch.

        Dispatches and returns early: waits only for the host's copy of a bucket where the devices have no room for
        another one.
        """
        before: MeasuredStep = measured({**state.model.weights, **frozen}, state.scale, state.carried, batch, key)
        loss = before.metrics["loss"]
        if self.interleaved:
            model, norm = self.update.reducing(state.model, before.grads, loss, before.finite)
            metrics: StepMetrics = {"loss": loss, "grad_norm": norm, "skipped": before.scale.skipped}
            return TrainState(model, before.scale, before.carried), metrics
        model, _ = self.update.after(state.model, before.grads, before.factor, loss, before.finite)
        return TrainState(model, before.scale, before.carried), before.metrics

    @cached_property
    def measured(self) -> Any:
        """The compiled part of a step before the update (see `TrainStep.measured`).

        Where it is `interleaved` gradients are each device's own sums, metrics the loss alone, and there is no factor.
        """
        program, scalar = self.program, self.step.scalar
        grads = {name: NamedSharding(program.grid.mesh, spec) for name, spec in program.grad_specs.items()}
        carried = {name: value.sharding for name, value in program.carried.items()}
        shardings: Any = MeasuredStep(grads, scalar, scalar, scalar, scalar, carried)  # type: ignore[arg-type]
        if self.interleaved:
            shardings = shardings._replace(
                grads=unreduced_shardings(program.parts.specs, program.grid.mesh), factor=None
            )
        before = self._summed if self.interleaved else self.step.measured
        return jax.jit(before, out_shardings=shardings, compiler_options=self.step.compiler_options())

    def _summed(
        self, weights: Weights, scale: Scale, carried: Any, batch: jax.Array, key: jax.Array | None
    ) -> MeasuredStep:
        sums, loss, squares = self.program.unreduced(weights, batch, key)
        finite = jnp.isfinite(squares) & jnp.isfinite(loss)
        metrics: Any = {"loss": loss}
        return MeasuredStep(sums, metrics, None, finite, next_scale(scale, finite), carried)
