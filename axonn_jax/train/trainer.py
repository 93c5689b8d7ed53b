"""The trainer: a model, an optimizer and a grid become a step."""

import contextlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx

from axonn_jax.errors import UserError
from axonn_jax.grid import Grid
from axonn_jax.memory.activations import Activations
from axonn_jax.memory.precision import Precision, compute_dtype
from axonn_jax.state.names import State, flatten, shapes, unflatten
from axonn_jax.tensor.params import Params, take_apart
from axonn_jax.train.batch import local_rows, place
from axonn_jax.train.checkpoints import load_now, save_now
from axonn_jax.train.config import OverlapConfig, PipelineConfig
from axonn_jax.train.program import StageProgram
from axonn_jax.train.step import Step, StepMetrics


class Trainer:
    """Trains a model on a grid: one compiled program a step, parameters and optimizer state donated to it.

    `model` is a module or a function that makes one. `optimizer` is any optax transformation; it sees global arrays,
    so transformations that are not elementwise are right too. The loss is the mean over all target tokens of the
    global batch, whatever the grid. With `clip` the gradients are scaled down to that global norm. Under bf16, layers
    compute in bfloat16 and master weights, gradient sums and optimizer state stay float32.

    On a grid with `pipe` above 1 this makes a `PipelineTrainer`, which has the same methods and takes `pipeline`.
    """

    def __new__(cls, model: Any, optimizer: Any, grid: Grid, **options: Any) -> "Trainer":
        """Makes the trainer that the grid asks for."""
        if grid.shape.pipe > 1 and cls is Trainer:
            from axonn_jax.train.pipelined import PipelineTrainer

            cls = PipelineTrainer
        return super().__new__(cls)

    def __init__(
        self,
        model: nnx.Module | Callable[[], nnx.Module],
        optimizer: optax.GradientTransformation,
        grid: Grid,
        *,
        microbatches: int = 1,
        clip: float = 0.0,
        precision: Precision = "auto",
        activations: Activations = "none",
        bucket: int = 16_000_000,
        seed: int = 0,
        pipeline: PipelineConfig | None = None,
        overlap: OverlapConfig | None = None,
    ):
        if not isinstance(model, nnx.Module):
            model = model()
        parts = take_apart(model)
        shape = getattr(model, "shape", None)
        if shape is not None:
            grid.shape.check_model(shape)
        self.grid, self.microbatches, self.optimizer = grid, microbatches, optimizer
        overlap = overlap or OverlapConfig()
        communicates = max(grid.shape.z, grid.shape.y, grid.shape.x) > 1
        auto = communicates and jax.default_backend() != "cpu"
        ordered = overlap.order == "package" or (overlap.order == "auto" and auto)
        self.program = StageProgram(
            parts, grid, compute_dtype(precision), activations, bucket, overlap.streams, ordered
        )
        self._key = jax.random.key(seed) if getattr(shape, "dropout", 0.0) > 0.0 else None
        shardings = self.program.shardings()
        self.params: Params = jax.device_put(parts.params, shardings)
        step = Step(self.program, optimizer, clip)
        state_shardings = step.state_shardings(self.params)
        self.opt_state: Any = jax.jit(optimizer.init, out_shardings=state_shardings)(self.params)
        self._step = step.jitted(state_shardings)
        self._loss = jax.jit(self.program.loss)
        self.steps_done = 0
        self._rows: dict[int, list[int]] = {}

    def rows(self, global_batch: int) -> list[int]:
        """Rows of a global batch that this process must load (all of them in a run of one process)."""
        if global_batch not in self._rows:
            self.grid.shape.check_batch(global_batch, self.microbatches)
            self._rows[global_batch] = local_rows(self.program.batch_sharding(), global_batch, self.microbatches)
        return self._rows[global_batch]

    def place(self, batch: np.ndarray) -> jax.Array:
        """Puts this process's rows [rows, seq + 1] of a global batch onto the mesh."""
        share = len(self.rows(self.grid.shape.batch_shards * self.microbatches))
        if len(batch) % share:
            raise UserError("batch", batch.shape, f"rows in a multiple of {share}, data*z*microbatches here")
        global_batch = len(batch) // share * self.grid.shape.batch_shards * self.microbatches
        rows = self.rows(global_batch)
        return place(batch, rows, global_batch, self.microbatches, self.program.batch_sharding())

    def step(self, batch: np.ndarray) -> StepMetrics:
        """One optimizer step on this process's rows [rows, seq + 1] of a global batch of token ids.

        Dispatches and returns: the metrics are device values, and nothing is waited for. Collectives are those of
        `StageProgram.gradients`.
        """
        tokens = self.place(batch)
        key = None if self._key is None else jax.random.fold_in(self._key, self.steps_done)
        self.params, self.opt_state, metrics = self._step(self.params, self.opt_state, tokens, key)
        self.steps_done += 1
        return metrics

    def compiled_step(self, batch: np.ndarray) -> jax.stages.Compiled:
        """The step's compiled program for batches of this shape: its HLO, memory and cost can be read."""
        key = None if self._key is None else jax.random.fold_in(self._key, 0)
        return self._step.lower(self.params, self.opt_state, self.place(batch), key).compile()

    def evaluate(self, batches: Iterable[np.ndarray]) -> float:
        """Mean loss over batches (this process's rows of each), without dropout; waits for the result."""
        losses = [self._loss(self.params, self.place(batch)) for batch in batches]
        if not losses:
            raise UserError("evaluate", "no batches", "at least one batch")
        return float(np.mean([float(loss) for loss in losses]))

    def state(self) -> dict[int, State]:
        """All that training changes, by place of the pipe (0 without one): arrays by names without the grid.

        The arrays are those in use, which the next step takes over.
        """
        return {0: flatten(self.params, self.opt_state)}

    def state_elsewhere(self) -> frozenset[str]:
        """Names of arrays here that another process's place saves: none without a pipeline."""
        return frozenset()

    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        """Global shapes of the whole model's state, of all places of the pipe."""
        return {name: value.shape for name, value in self.state()[0].items()}

    def load_state(
        self, read: Callable[[State], State], *, steps_done: int = 0, wanted: Callable[[str], bool] = lambda _: True
    ) -> None:
        """Takes over what `read` makes of shapes, types and layouts by name; it is called for each place here.

        Only names that are `wanted` are read. Their arrays are freed first, so the devices never hold two copies.
        """
        states = self.state()
        for at, state in states.items():
            asked = shapes({name: value for name, value in state.items() if wanted(name)})
            for name in asked:
                state[name].delete()
            states[at] = {**state, **read(asked)}
        self._put_state(states)
        self.steps_done = steps_done

    def _put_state(self, states: Mapping[int, State]) -> None:
        self.params, self.opt_state = unflatten(states[0], self.params, self.opt_state)

    def save(self, directory: Path, step: int) -> Path:
        """Writes all state to `directory/step_N` and waits for it; every process of the run must call it.

        Raises ``OSError`` with the reason where it cannot be written.
        """
        return save_now(self, directory, step)

    def load(self, path: Path, *, weights_only: bool = False) -> int:
        """Takes over a checkpoint (a step_N, or the newest of a run), saved on any grid; returns its step.

        `weights_only` takes the parameters and leaves optimizer state and step as they are. Every process of the run
        must call it. Raises ``UserError`` naming what is missing, unexpected, of another shape or damaged.
        """
        return load_now(self, path, weights_only=weights_only)

    def saving(self) -> contextlib.AbstractContextManager[None]:
        """Around what may take long between steps, so that nobody takes this process for stuck."""
        return contextlib.nullcontext()

    def lost(self) -> bool:
        """Whether another process of the run is known to have gone, so that no step will end any more."""
        return False

    def explain(self) -> list[str]:
        """Lines for people on how the model is spread, beyond the grid: none without a pipeline."""
        return []

    def leave_timeline(self, directory: Path) -> list[Path]:
        """Writes what was measured of the pipeline's last steps; every process of the run must call it.

        Returns the files for people to look at: none without a pipeline.
        """
        return []

    def close(self) -> None:
        """Ends what the trainer keeps running beside the devices: nothing without a pipeline."""
