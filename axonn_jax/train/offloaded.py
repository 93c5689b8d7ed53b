"""A step whose optimizer state is in host memory: one program for the gradients, one a bucket for the update."""

from functools import cached_property
from pathlib import Path
from typing import Any

import jax
from jax.sharding import NamedSharding

from axonn_jax.memory.elementwise import check_elementwise
from axonn_jax.memory.offload import Offload
from axonn_jax.train.step import Measured, Step, StepMetrics, TrainState


class OffloadedStep:
    """Does what a `Step` does, with the optimizer's state streamed through the devices (`memory.offload`).

    Raises ``UserError`` where the optimizer is not elementwise.
    """

    def __init__(self, step: Step, disk: Path | None = None):
        check_elementwise(step.optimizer, "memory.offload = optimizer")
        self.step, program = step, step.program
        shapes = {name: p.shape for name, p in program.parts.params.items()}
        layouts = (program.parts.specs, program.grad_specs)
        mesh, precisions, bucket = program.grid.mesh, step.precisions, step.bucket
        self.update = Offload(step.optimizer, shapes, *layouts, mesh, precisions=precisions, bucket=bucket, disk=disk)

    def run(
        self, measured: Any, state: TrainState, tokens: jax.Array, key: jax.Array | None
    ) -> tuple[TrainState, StepMetrics]:
        """The state after a step, and the step's loss and gradient norm; `measured` is compiled for these tokens.

        Dispatches and returns early: waits only for the host's copy of a bucket where the devices have no room for
        another one.
        """
        found: Measured = measured(state.model.weights, state.scale, tokens, key)
        model = self.update.after(state.model, found.grads, found.factor, found.finite)
        return TrainState(model, found.scale), found.metrics

    @cached_property
    def measured(self) -> Any:
        """The compiled part of a step before the update (see `Step.measured`)."""
        program, scalar = self.step.program, self.step.scalar
        grads = {name: NamedSharding(program.grid.mesh, spec) for name, spec in program.grad_specs.items()}
        return jax.jit(
            self.step.measured,
            out_shardings=Measured(grads, scalar, scalar, scalar, scalar),  # type: ignore[arg-type]
            compiler_options=self.step.compiler_options(),
        )
