"""Compiled programs of a model on one mesh, for one form of its parameters: steps, losses and metrics."""

from collections.abc import Callable, Hashable
from functools import cached_property, partial
from typing import Any, Generic, Protocol, Self, cast

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from axonn_jax.core.backend.cpu_allocator import TemporariesInPlace
from axonn_jax.core.backend.small_products import compile_traced, form_of, jitted
from axonn_jax.core.distributed.bounded import InFlight
from axonn_jax.core.engines.on_mesh import OnMesh, Placed
from axonn_jax.core.engines.program import StageProgram
from axonn_jax.core.engines.step import MeasuredStep, StepMetrics, TrainState, TrainStep
from axonn_jax.core.grid import BATCH_AXES
from axonn_jax.core.memory.offload import OffloadedOptimizer
from axonn_jax.core.memory.offload_buckets import unreduced_shardings
from axonn_jax.core.memory.precision import Scale, next_scale
from axonn_jax.core.models.stacked import Stack
from axonn_jax.core.settings import MemoryConfig
from axonn_jax.core.state.param_store import ParamPlan
from axonn_jax.core.tensor.params import Params
from axonn_jax.core.tensor.weight_gather import Weights


class OffloadedStep(Generic[Placed]):
    """Training step like `TrainStep`, with the optimizer's state streamed through the devices (`memory.offload`).

    If possible, a bucket of gradients is reduced while the previous bucket is updated (`interleaved`). Raises
    ``UserError`` if the optimizer looks at all parameters together.
    """

    def __init__(self, step: TrainStep[Placed], program: OnMesh[Placed], resident: int | None):
        self.step, self.program = step, program
        self.update = OffloadedOptimizer(step.update, resident=resident)
        # Clipping and loss scaling need the global norm before the first update, and `Bucket.reduce` supports neither
        # ZeRO nor split sequences, token counts or adapters.
        plain = step.clip == 0.0 and not program.precisions.scaled and program.token_axes == BATCH_AXES
        measured_first = program.zero or bool(program.parts.loads or program.parts.adapters)
        self.interleaved = plain and not measured_first and program.grid.shape.replicas > 1

    def run(
        self,
        measured: Callable[..., MeasuredStep],
        state: TrainState,
        batch: Placed,
        key: jax.Array | None,
        frozen: Params,
    ) -> tuple[TrainState, StepMetrics]:
        """Return the state after a step and its metrics; `measured` is the compiled gradients' program of the batch.

        Returns before the step has run; blocks only until the devices have room for the next bucket of state.
        """
        measured_step = measured({**state.model.weights, **frozen}, state.scale, state.carried, batch, key)
        loss = measured_step.metrics["loss"]
        if self.interleaved:
            model, norm = self.update.reducing(state.model, measured_step.grads, loss, measured_step.finite)
            metrics: StepMetrics = {"loss": loss, "grad_norm": norm, "skipped": measured_step.scale.skipped}
            return TrainState(model, measured_step.scale, measured_step.carried), metrics
        model, _ = self.update.apply_update(
            state.model, measured_step.grads, measured_step.factor, loss, measured_step.finite
        )
        return TrainState(model, measured_step.scale, measured_step.carried), measured_step.metrics

    @cached_property
    def measured(self) -> jax.stages.Wrapped:
        """Jitted part of a step before the update (see `TrainStep.measured`).

        If `interleaved`, gradients are each device's unreduced sums, the only metric is the loss, and there is no
        factor.
        """
        program, scalar = self.program, self.step.scalar
        grads = {name: NamedSharding(program.grid.mesh, spec) for name, spec in program.grad_specs.items()}
        carried = {name: value.sharding for name, value in program.carried.items()}
        shardings: Any = MeasuredStep(grads, scalar, scalar, scalar, scalar, carried)  # type: ignore[arg-type]
        if self.interleaved:
            shardings = shardings._replace(
                grads=unreduced_shardings(program.parts.specs, program.grid.mesh), factor=None
            )
        function = self._summed if self.interleaved else self.step.measured
        return jax.jit(function, out_shardings=shardings, compiler_options=self.step.compiler_options())

    def _summed(
        self, weights: Weights, scale: Scale, carried: Params, batch: jax.Array, key: jax.Array | None
    ) -> MeasuredStep:
        sums, loss, squares = cast(StageProgram, self.program).unreduced(weights, batch, key)
        finite = jnp.isfinite(squares) & jnp.isfinite(loss)
        metrics: StepMetrics = {"loss": loss}
        return MeasuredStep(sums, metrics, None, finite, next_scale(scale, finite), carried)


class Evaluation(Protocol):
    """Results of a user's loss on a batch."""

    loss: jax.Array
    weight: jax.Array
    aux: object
    """Metrics, averaged like the loss."""


class UserProgram(Protocol):
    """Program of a user's loss (`any_flax/modules/program.py`), as far as evaluation needs it."""

    forward: Callable[..., Evaluation]

    def of(self, loss: Callable[..., object] | None, *, at_once: bool) -> Self:
        """Return the program of another loss (None: this one's), on all rows `at_once` or in microbatches."""


class StepPrograms(ParamPlan, Generic[Placed]):
    """Programs of a step, each compiled for the first batch of a new shape.

    Args:
        stack: Model with its layers both stacked and separate.
        program: Program of the gradients (`OnMesh`).
        step: The step.
        memory: Table [memory].
    """

    def __init__(self, stack: Stack, program: OnMesh[Placed], step: TrainStep[Placed], memory: MemoryConfig):
        offloads = memory.offload != "none"
        self._offloaded = OffloadedStep(step, program, memory.resident_bytes) if offloads else None
        super().__init__(stack, self._offloaded.update if self._offloaded else step.update)
        self.program, self.train_step = program, step
        self.evaluate: Callable[[Weights, Params, Placed], tuple[jax.Array, jax.Array]] = jitted(program.evaluate)
        """Function from weights, carried state and a batch to the mean loss and its weight."""
        self._steps: dict[Hashable, jax.stages.Compiled] = {}
        self._temporaries: dict[Hashable, TemporariesInPlace] = {}
        self._forward: dict[Hashable, Callable[..., Evaluation]] = {}
        self._last: StepMetrics | None = None
        self._in_flight = InFlight()

    @property
    def first_step(self) -> jax.stages.Compiled | None:
        """Compiled step of the first batch shape; None before the first step."""
        return next(iter(self._steps.values()), None)

    def step(
        self, state: TrainState, batch: Placed, key: jax.Array | None, frozen: Params
    ) -> Callable[[], tuple[TrainState, StepMetrics]]:
        """Return the compiled step of a batch as a call that donates `state`; waits for room for its temporaries."""
        # Return a call instead of running it: the engine runs it in the statement that replaces the donated state.
        compiled = self.compiled(state, batch, key, frozen)
        if self._offloaded is not None:
            return partial(self._offloaded.run, compiled, state, batch, key, frozen)
        self._temporaries[form_of(batch)].wait(self._last)
        return partial(compiled, state, batch, key, frozen)

    def bounded(self, metrics: StepMetrics) -> StepMetrics:
        """Return a dispatched step's metrics, once the step two before it has ended."""
        # An unbounded lead of the host keeps batches in memory, and XLA's CPU client can hang with over 32 programs.
        self._last = metrics
        return self._in_flight(metrics)  # type: ignore[no-any-return]

    def compiled(self, state: TrainState, batch: Placed, key: jax.Array | None, frozen: Params) -> jax.stages.Compiled:
        """Return the compiled program of a step, or with offload of its gradients; `state` may be abstract."""
        if (form := form_of(batch)) not in self._steps:
            if self._offloaded is None:
                traced = self.train_step.jitted().trace(state, batch, key, frozen)
            else:
                weights = {**state.model.weights, **frozen}
                traced = self._offloaded.measured.trace(weights, state.scale, state.carried, batch, key)
            self.program.check_traced(traced.jaxpr.jaxpr)
            self._steps[form] = compile_traced(traced)
            self._temporaries[form] = TemporariesInPlace(self._steps[form], self.program.grid.mesh)
        return self._steps[form]

    def forward(self, loss: Callable[..., object] | None, *, at_once: bool) -> Callable[..., Evaluation]:
        """Return the jitted program of a user's loss (None: the job's), on all rows `at_once` or in microbatches."""
        if (form := (loss, at_once)) not in self._forward:
            self._forward[form] = jitted(cast(UserProgram, self.program).of(loss, at_once=at_once).forward)
        return self._forward[form]
