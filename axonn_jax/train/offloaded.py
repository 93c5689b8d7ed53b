"""A step whose optimizer state is in host memory: one program for the gradients, one a bucket for the update."""

from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from axonn_jax.memory.elementwise import check_elementwise
from axonn_jax.memory.offload import MASTER, Offload, OffloadState
from axonn_jax.memory.scale import first_scale
from axonn_jax.tensor.params import Params
from axonn_jax.train.step import Step, StepMetrics, TrainState


class OffloadedStep:
    """Does what a `Step` does, with the optimizer's state streamed through the devices (`memory.offload`).

    Raises ``UserError`` where the optimizer is not elementwise.
    """

    def __init__(self, step: Step, *, zero: bool):
        check_elementwise(step.optimizer, "memory.offload = optimizer")
        self.step, parts = step, step.program.parts
        self.offload = Offload(
            step.optimizer,
            {name: jax.ShapeDtypeStruct(p.shape, jnp.float32) for name, p in parts.params.items()},
            parts.specs,
            step.program.grid.mesh,
            weights=step.precisions.weights,
            bucket=step.bucket,
            zero=zero,
        )

    def start(self, params: Params, *, owned: bool = True) -> TrainState:
        """Float32 parameters -> the first state; they are used up where they are `owned`, and perhaps part of it."""
        weights, state = self.offload.start(params, owned=owned)
        scale = jax.device_put(first_scale(), self.step.scalar) if self.step.precisions.scaled else None
        return TrainState(weights, {}, state, scale)

    def __call__(self, state: TrainState, tokens: jax.Array, key: jax.Array | None) -> tuple[TrainState, StepMetrics]:
        """The state after a step, and the step's loss and gradient norm; dispatches and returns early.

        Waits for the host's copy of a bucket where the devices have no room for another one.
        """
        assert isinstance(state.optimizer, OffloadState)
        grads, metrics, factor, finite, scale = self.gradients(state.weights, state.scale, tokens, key)
        weights, optimizer = self.offload.apply(state.weights, state.optimizer, grads, factor, finite)
        return TrainState(weights, {}, optimizer, scale), metrics

    @cached_property
    def gradients(self) -> Any:
        """The compiled part of a step before the update (see `Step.measured`)."""
        program, scalar = self.step.program, self.step.scalar
        grads = {name: NamedSharding(program.grid.mesh, spec) for name, spec in program.grad_specs.items()}
        return jax.jit(
            self.step.measured,
            out_shardings=(grads, scalar, scalar, scalar, scalar),
            compiler_options=self.step.compiler_options(),
        )

    def masters(self, state: TrainState) -> Params:
        """The float32 weights by name, in host memory (on the devices where weights are float32)."""
        return self.offload.arrays(state.optimizer, MASTER) if self.offload.masters else state.weights
