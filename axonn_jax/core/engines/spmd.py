"""SPMD engine, whose step is one compiled program on one mesh with donated parameters and optimizer state."""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Generic

import jax
import numpy as np
import optax
from flax import nnx

from axonn_jax.core.checkpoint.naming import CARRIED, State, shapes
from axonn_jax.core.distributed.bounded import STEPS
from axonn_jax.core.distributed.gossip import RankStatus
from axonn_jax.core.distributed.heartbeat import Heartbeat
from axonn_jax.core.engines.engine import Batches, RowChoice, Rows, TokenBatches
from axonn_jax.core.engines.on_mesh import OnMesh, Placed
from axonn_jax.core.engines.optimizer import check_optimizer
from axonn_jax.core.engines.program import exposed
from axonn_jax.core.engines.programs import StepPrograms
from axonn_jax.core.engines.step import StepMetrics, TrainState, TrainStep, build_step
from axonn_jax.core.grid import Grid
from axonn_jax.core.memory.host_arrays import materialize
from axonn_jax.core.memory.precision import Precisions, precisions
from axonn_jax.core.models.protocol import check_model
from axonn_jax.core.models.stacked import Stack
from axonn_jax.core.models.vocabulary import Padded, fit_vocabulary, padding_of, without_padding
from axonn_jax.core.pruned.config import PruneConfig
from axonn_jax.core.pruned.layout import PrunedLayout
from axonn_jax.core.pruned.prune import Pruner, prunable
from axonn_jax.core.settings import MemoryConfig, TensorConfig
from axonn_jax.core.state.param_store import ParamStore
from axonn_jax.core.state.published_matrices import published_matrices
from axonn_jax.core.tensor.params import Params, SplitModule, key_of, place_params, shapes_of, split_module
from axonn_jax.core.tensor.weight_gather import Weights

Build = Callable[[PrunedLayout | None], tuple[Stack, OnMesh[Placed], TrainStep[Placed]]]
"""Function from the layout of pruned parameters to the stack of layers, the program of the gradients and the step."""


@dataclass
class Job(Generic[Rows, Placed]):
    """A model, split into parts, with everything an `SpmdEngine` needs to train it."""

    params: Params
    """Float32 parameters on the mesh, under per-layer names."""
    optimizer: optax.GradientTransformation
    build: Build[Placed]
    batches: Batches[Rows, Placed]
    draws: bool
    """True if a step takes a random key, for example for dropout."""
    owned: bool
    """True if `params` may be freed, one array after another."""
    merge: Callable[[Params, Params], object]
    """Function from parameters and carried state to the user's model."""
    chooser: Pruner | None = None
    formed: bool = True
    """True if the parameters are pruned from the start."""
    padding: Mapping[str, Padded] = field(default_factory=dict)
    """Padding of the vocabulary (`models.vocabulary.padding_of`)."""
    carried: Params = field(default_factory=dict)
    """Model state that is no parameter and that steps change, by name."""
    row_choice: RowChoice | None = None
    """Choice of how a user's loss runs; None for the package's models."""


def model_job(
    model: nnx.Module | Callable[[], nnx.Module],
    optimizer: optax.GradientTransformation,
    grid: Grid,
    *,
    microbatches: int,
    clip: float,
    memory: MemoryConfig,
    tensor: TensorConfig,
    prune: PruneConfig,
) -> Job[np.ndarray, jax.Array]:
    """Return the job of a `models.protocol.Model` or of a function that builds one, without compiling anything.

    Raises ``UserError`` if model, optimizer and settings do not fit together.
    """
    owned = not isinstance(model, nnx.Module)
    if not isinstance(model, nnx.Module):
        model = model()
    model = fit_vocabulary(model, grid.shape)
    checked = check_model(model)
    checked.check_grid(grid.shape)
    split = split_module(model)
    check_optimizer(optimizer, checked, split, memory, prune)
    padding = padding_of(model)
    optimizer = published_matrices(optimizer, model, split.trained)
    # Abstract parts only: a reference to the model's arrays would keep them alive as long as the engine.
    parts = shapes_of(split)
    abstract = parts.merge(parts.params)
    return Job(
        place_params(split.params, parts.specs, grid.mesh),
        optimizer,
        partial(build_step, abstract, parts, optimizer, grid, clip, memory, tensor),
        TokenBatches(grid, microbatches, packed=checked.packed),
        checked.drops_out,
        owned,
        lambda params, carried: parts.merge(params),
        Pruner(prune, prunable(parts, checked.layer_list), parts.specs, grid.mesh) if prune.prunes else None,
        not prune.starts_dense,
        padding,
    )


class SpmdEngine(Generic[Rows, Placed]):
    """Engine of a model on a single mesh; see `engine.Engine` for each member.

    A step returns once it is dispatched: its metrics are device values, and at most two steps are in flight.
    """

    def __init__(self, job: Job[Rows, Placed], grid: Grid, *, seed: int, memory: MemoryConfig):
        self.grid, self.batches, self._job = grid, job.batches, job
        self._key = key_of(seed) if job.draws else None
        self._carried, self.row_choice = job.carried, job.row_choice
        dtype = precisions(memory.precision).compute
        flags: dict[str, Any] = {"formed": job.formed, "owned": job.owned, "dtype": dtype}
        self.store = ParamStore(
            job.params, job.optimizer, lambda forms: StepPrograms(*job.build(forms), memory), job.chooser, **flags
        )
        job.params = job.carried = {}  # the store and the steps donate these arrays
        self.stores: Mapping[int, ParamStore[StepPrograms[Placed]]] = {0: self.store}
        self._scale = self.programs.train_step.first_scale()
        self.steps_done = 0
        self._in_step = False
        self._evaluated: Weights | None = None
        self._status = RankStatus()
        self.heartbeat: Heartbeat | None = None

    @property
    def programs(self) -> StepPrograms[Placed]:
        """Compiled programs for the current form of the parameters."""
        return self.store.plan

    @property
    def program(self) -> OnMesh[Placed]:
        """Program of the gradients."""
        return self.programs.program

    @property
    def precisions(self) -> Precisions:
        """Dtypes of weights, computation and gradients."""
        return self.program.precisions

    @property
    def parts(self) -> SplitModule:  # noqa: D102
        return self.store.stack.per_layer

    @property
    def params(self) -> Params:
        """Float32 weights, and frozen ones in the compute dtype, by name; those of scanned layers are copies."""
        return materialize({**self.store.masters, **self.store.frozen.per_layer})  # type: ignore[no-any-return]

    def merged(self, params: Params) -> object:  # noqa: D102
        return self._job.merge(params, self._carried)

    @property
    def opt_state(self) -> optax.OptState:
        """Optimizer state for `params`; that of scanned layers is copied."""
        return materialize(self.store.opt_state)

    @property
    def train_state(self) -> TrainState:
        """State that a step changes."""
        return TrainState(self.store.model, self._scale, self._carried)

    def watch(self, world: Any) -> None:
        """End the processes of an otherwise unused MPI world if one falls silent; collective over that world."""
        self.heartbeat = Heartbeat(self._status, self.grid, math.inf, world)
        self.heartbeat.start()

    def step(self, batch: Rows) -> StepMetrics:
        """Dispatch an optimizer step and return once the step two before it has ended.

        It only waits for this step if optimizer state is in host memory (`memory.offload`), or if the CPU backend has
        large temporaries to free first (`backend.cpu_allocator`). Collectives: `StageProgram.gradients`.
        """
        if self._in_step:
            self._check_interrupted()
        self._settle(batch)
        shards, key = self.batches.shard(batch), self._step_key(self.steps_done)
        self._status.step, self._status.finished = self.steps_done + 1, f"step {max(0, self.steps_done - STEPS)}"
        self._status.now("compiling" if self.programs.first_step is None else "in a step", running="its program")
        run = self.programs.step(self.train_state, shards, key, self.store.frozen.arrays)
        self._in_step = True
        # A single statement, so that Ctrl-C cannot separate the donated state from its replacement and the count.
        ((self.store.model, self._scale, self._carried), metrics), self.steps_done = run(), self.steps_done + 1
        self._in_step = False
        return self.programs.bounded(metrics)

    def _check_interrupted(self) -> None:
        """Recover from a step that an exception, such as Ctrl-C, interrupted.

        Raises ``RuntimeError`` if the step had already donated the state.
        """
        if any(isinstance(leaf, jax.Array) and leaf.is_deleted() for leaf in jax.tree.leaves(self.train_state)):
            raise RuntimeError(
                f"step {self.steps_done + 1} was interrupted while updating the weights; create a new Trainer and load "
                "a checkpoint"
            )
        self._in_step = False

    def compiled_step(self, batch: Rows) -> jax.stages.Compiled:
        """Return the step's compiled program for batches of this shape; with offload, that of the gradients."""
        self._settle(batch)
        shards = self.batches.shard(batch)
        return self.programs.compiled(self.train_state, shards, self._step_key(0), self.store.frozen.arrays)

    def _settle(self, batch: Rows) -> None:
        """Rebuild the programs if the batch requires another choice of rows."""
        choice = self.row_choice
        if choice is not None and choice.changes(self.steps_done, self.store.weights, self._carried, batch):
            self.store.rebuild()

    def _step_key(self, step: int) -> jax.Array | None:
        return None if self._key is None else jax.random.fold_in(self._key, step)

    def memory(self) -> dict[int, dict[str, Any]]:  # noqa: D102
        return {0: self.store.memory(self.programs.first_step)}

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """Evaluate with averaged weights inside the context."""
        self._evaluated = self.store.averaged
        try:
            yield
        finally:
            self._evaluated = None

    def mean_loss(self, batch: Rows) -> tuple[jax.Array, jax.Array]:  # noqa: D102
        self._settle(batch)
        self._status.now("compiling")  # until the next step; the first evaluation does compile
        return self.programs.evaluate(self._evaluated or self.store.weights, self._carried, self.batches.shard(batch))

    def numbers(self, batch: Rows, loss: Callable[..., object] | None = None) -> tuple[jax.Array, jax.Array, object]:
        """Return the mean loss of a batch, its weight and auxiliary numbers; `loss` replaces the job's loss.

        Only for jobs with a user's loss (`any_flax/modules/`).
        """
        batches: Any = self.batches
        ragged = batches.ragged(batch)
        weights = self._evaluated or self.store.weights
        if not ragged:
            self._settle(batch)
            choice = self.row_choice
            at_once = choice is not None and choice.evaluates_at_once(loss, weights, self._carried, batch)
            batches = batches.at_once() if at_once else batches
        shards = batches.shard_ragged(batch) if ragged else batches.shard(batch)
        result = self.programs.forward(loss, at_once=ragged or at_once)(weights, self._carried, shards)
        return result.loss, result.weight, result.aux

    def finite(self) -> bool:  # noqa: D102
        return self.store.finite()

    def state(self) -> State:  # noqa: D102
        return self.store.checkpoint_state(self._scale) | self._carried_state()

    def state_shapes(self) -> dict[str, tuple[int, ...]]:  # noqa: D102
        state = self.store.shapes(self._scale) | self._carried_state()
        return without_padding({name: value.shape for name, value in state.items()}, self._job.padding)

    def load(self, read: Callable[[State], State], should_load: Callable[[str], bool] = lambda name: True) -> None:
        """Replace the arrays whose names pass `should_load` by those `read` returns."""
        self._scale = self.store.load(read, should_load, self._scale)
        if carried := {name: value for name, value in self._carried_state().items() if should_load(name)}:
            values = read(shapes(carried))
            self._carried = {name: values.get(CARRIED + name, value) for name, value in self._carried.items()}

    def _carried_state(self) -> State:
        return {CARRIED + name: value for name, value in self._carried.items()}

    @contextlib.contextmanager
    def saving(self) -> Iterator[Callable[[str], None]]:  # noqa: D102
        self._status.now("saving")
        yield lambda text: self._status.now(running=text)
        self._status.now("between steps")

    def explain(self, sequences: int) -> list[str]:
        """Return lines of text about exposed communication in a step of `sequences`, and about missing XLA options."""
        missing = [
            f"step: this XLA has no {name}, which is not set" for name in self.programs.train_step.missing_options()
        ]
        lines = exposed(self.program.sub_batches, self.grid.shape, sequences // self.batches.least)
        return [*lines, *missing]

    def write_timeline(self, directory: Path) -> list[Path]:
        """Write nothing and return no pictures, since a step is one program."""
        return []

    def close(self) -> None:
        """Stop the heartbeat's thread."""
        if self.heartbeat is not None:
            self.heartbeat.close()
