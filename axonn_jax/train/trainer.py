"""The trainer: a model, an optimizer and a grid become a step."""

from collections.abc import Callable, Iterable
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
from axonn_jax.state.checkpoint import save_weights
from axonn_jax.tensor.params import Params
from axonn_jax.train.batch import local_rows, place
from axonn_jax.train.config import OverlapConfig, PipelineConfig, ScanLayers
from axonn_jax.train.layerwise import layerwise
from axonn_jax.train.own_state import own_state, stacked_state
from axonn_jax.train.program import StageProgram
from axonn_jax.train.scan import choose_stack
from axonn_jax.train.step import Step, StepMetrics


class Trainer:
    """Trains a model on a grid: one compiled program a step, parameters and optimizer state donated to it.

    `model` is a module or a function that makes one. `optimizer` is any optax transformation; it sees global arrays,
    so transformations that are not elementwise are right too. The loss is the mean over all target tokens of the
    global batch, whatever the grid. With `clip` the gradients are scaled down to that global norm. Under bf16, layers
    compute in bfloat16 and master weights, gradient sums and optimizer state stay float32. `scan_layers` says whether
    layers are one compiled body in a loop; names, shapes and results are the same either way.

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
        scan_layers: ScanLayers = "auto",
    ):
        made_here = not isinstance(model, nnx.Module)
        if not isinstance(model, nnx.Module):
            model = model()
        shape = getattr(model, "shape", None)
        if shape is not None:
            grid.shape.check_model(shape)
        self.grid, self.microbatches, self.optimizer = grid, microbatches, optimizer
        overlap = overlap or OverlapConfig()
        communicates = max(grid.shape.z, grid.shape.y, grid.shape.x) > 1
        auto = communicates and jax.default_backend() != "cpu"
        ordered = overlap.order == "package" or (overlap.order == "auto" and auto)
        self._stack = choose_stack(model, optimizer, scan_layers, activations=activations, ordered=ordered)
        self.program = StageProgram(
            self._stack.parts, grid, compute_dtype(precision), activations, bucket, overlap.streams, ordered
        )
        self._key = jax.random.key(seed) if getattr(shape, "dropout", 0.0) > 0.0 else None
        self._params = self._stack.place(model, grid.mesh, used_up=made_here)
        optimizer = layerwise(optimizer, self._stack)
        step = Step(self.program, optimizer, clip)
        state_shardings = step.state_shardings(self._params)
        self._opt_state: Any = jax.jit(optimizer.init, out_shardings=state_shardings)(self._params)
        self._step = step.jitted(state_shardings)
        self._loss = jax.jit(self.program.loss)
        self.steps_done = 0
        self._rows: dict[int, list[int]] = {}

    @property
    def held(self) -> tuple[Params, Any]:
        """Parameters and optimizer state as the step's program takes them: of scanned layers stacked, and no copies."""
        return self._params, self._opt_state

    @property
    def params(self) -> Params:
        """The parameters by name, the same names and shapes however layers are run; of scanned layers, copies."""
        return self._stack.split(self._params)

    @params.setter
    def params(self, params: Params) -> None:
        self._params = self._stack.join(params, self.grid.mesh)

    @property
    def opt_state(self) -> Any:
        """The optimizer's state for `params`; of scanned layers, copies."""
        return own_state(self.optimizer, self._stack, self._opt_state)

    @opt_state.setter
    def opt_state(self, state: Any) -> None:
        self._opt_state = stacked_state(self._stack, state, self._opt_state)

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
        self._params, self._opt_state, metrics = self._step(self._params, self._opt_state, tokens, key)
        self.steps_done += 1
        return metrics

    def compiled_step(self, batch: np.ndarray) -> jax.stages.Compiled:
        """The step's compiled program for batches of this shape: its HLO, memory and cost can be read."""
        key = None if self._key is None else jax.random.fold_in(self._key, 0)
        return self._step.lower(self._params, self._opt_state, self.place(batch), key).compile()

    def evaluate(self, batches: Iterable[np.ndarray]) -> float:
        """Mean loss over batches (this process's rows of each), without dropout; waits for the result."""
        losses = [self._loss(self._params, self.place(batch)) for batch in batches]
        if not losses:
            raise UserError("evaluate", "no batches", "at least one batch")
        return float(np.mean([float(loss) for loss in losses]))

    def save(self, directory: Path, step: int) -> Path:
        """Writes the weights below `directory`; every process of the run must call it. Returns the path."""
        return save_weights(directory, step, self.params)

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
