"""Compiled programs of a model on one mesh, for parameters in one form: its steps, losses and numbers."""

from collections.abc import Callable, Hashable
from functools import partial
from typing import Any

import jax

from axonn_jax.backend.cpu_allocator import TemporariesInPlace
from axonn_jax.backend.small_products import compile_traced, form_of, jitted
from axonn_jax.distributed.bounded import InFlight
from axonn_jax.models.stacked import Stack
from axonn_jax.state.param_store import Built
from axonn_jax.tensor.params import Params
from axonn_jax.train.config import MemoryConfig
from axonn_jax.train.engines.offloaded import OffloadedStep
from axonn_jax.train.engines.step import StepMetrics, TrainState, TrainStep


class Programs(Built):
    """Programs of a step, each compiled when a batch of a new shape comes.

    Args:
        stack: How layers are stacked.
        program: The program of the gradients (`OnMesh`).
        step: The step.
        memory: Table [memory].
    """

    def __init__(self, stack: Stack, program: Any, step: TrainStep, memory: MemoryConfig):
        offloads = memory.offload != "none"
        self._offloaded = OffloadedStep(step, program, memory.resident_bytes) if offloads else None
        super().__init__(stack, self._offloaded.update if self._offloaded else step.update)
        self.program, self.train_step = program, step
        self.evaluate: Callable[..., Any] = jitted(program.evaluate)
        """Function of weights, carried state and a batch -> the mean loss and its weight."""
        self._steps: dict[Hashable, jax.stages.Compiled] = {}
        self._temporaries: dict[Hashable, TemporariesInPlace] = {}
        self._forward: dict[Hashable, Callable[..., Any]] = {}
        self._last: StepMetrics | None = None
        self._in_flight = InFlight()

    @property
    def first_step(self) -> jax.stages.Compiled | None:
        """The compiled step of the first shape of a batch; None before the first step."""
        return next(iter(self._steps.values()), None)

    def step(
        self, state: TrainState, batch: Any, key: jax.Array | None, frozen: Params
    ) -> Callable[[], tuple[TrainState, StepMetrics]]:
        """Return the compiled step of a batch as a call that uses `state` up; waits for room for its temporaries."""
        compiled = self.compiled(state, batch, key, frozen)
        if self._offloaded is not None:
            return partial(self._offloaded.run, compiled, state, batch, key, frozen)
        self._temporaries[form_of(batch)].wait(self._last)
        return partial(compiled, state, batch, key, frozen)

    def bounded(self, metrics: StepMetrics) -> StepMetrics:
        """Return a dispatched step's metrics once the step before the last has ended."""
        self._last = metrics
        return self._in_flight(metrics)  # type: ignore[no-any-return]

    def compiled(self, state: TrainState, batch: Any, key: jax.Array | None, frozen: Params) -> jax.stages.Compiled:
        """Return the compiled program of a step, with offload that of its gradients; such a state may be shapes."""
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

    def forward(self, loss: Callable[..., Any] | None, *, at_once: bool) -> Callable[..., Any]:
        """Return the program of a user's loss (None: the job's), of all rows `at_once` where they do not divide."""
        if (form := (loss, at_once)) not in self._forward:
            self._forward[form] = jitted(self.program.of(loss, at_once=at_once).forward)
        return self._forward[form]
