"""The trainer: a model, an optimizer and a grid become a step."""

import contextlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import NamedSharding

from axonn_jax.errors import UserError
from axonn_jax.grid import Grid
from axonn_jax.memory.account import StateBytes, counted, report
from axonn_jax.memory.activations import checked_policies
from axonn_jax.memory.finite import all_finite
from axonn_jax.memory.held import whole
from axonn_jax.memory.placement import Where
from axonn_jax.memory.precision import Accumulate, Precision, precisions
from axonn_jax.memory.temporaries import Temporaries
from axonn_jax.models.vocabulary import fit_vocabulary, padding_of, without_padding
from axonn_jax.state.names import State, flatten, shapes, unflatten, unflatten_scale
from axonn_jax.tensor.counted import filled_up, samples_in
from axonn_jax.tensor.gather import Gather
from axonn_jax.tensor.params import Params, shapes_of, take_apart
from axonn_jax.train.batch import local_rows, place
from axonn_jax.train.check import check_fits, check_scan
from axonn_jax.train.checkpoints import load_now, save_now
from axonn_jax.train.config import OverlapConfig, PipelineConfig, ScanLayers
from axonn_jax.train.layerwise import layerwise
from axonn_jax.train.offloaded import OffloadedStep
from axonn_jax.train.own_state import own_params, own_state, stacked_state
from axonn_jax.train.program import StageProgram, exposed
from axonn_jax.train.scan import LAYERS, choose_stack
from axonn_jax.train.step import Step, StepMetrics, TrainState


class Trainer:
    """Trains a model on a grid: one compiled program a step, parameters and optimizer state donated to it.

    `model` is a module or a function that makes one. A module's arrays are the trainer's from then on: a step uses them
    up, so that they lie in memory once, and the module given can be called no more; `trainer.model` is the trained one.
    `optimizer` is any optax transformation; it sees global arrays,
    so transformations that are not elementwise are right too. The loss is the mean over all target tokens of the
    global batch, whatever the grid. With `clip` the gradients are scaled down to that global norm. Under bf16 and fp16,
    layers compute in that precision, while master weights and optimizer state stay float32; gradient sums are float32
    unless `accumulate` says otherwise. fp16 scales the loss (`memory.scale`). `zero` 1 splits masters and optimizer
    state over `data`; `offload` keeps them in host memory, for which the optimizer must be elementwise
    (``UserError``). `activations` says what the backward pass computes again, of all layers or by ranges
    of them (`memory.policies`); `gather` says how long weights gathered over `z` live (docs/memory.md). `scan_layers`
    says whether layers are one compiled body in a loop; names, shapes and results are the same.

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
        accumulate: Accumulate = "fp32",
        offload: Where = "none",
        zero: int = 0,
        activations: str = "none",
        gather: Gather = "layer",
        bucket: int = 16_000_000,
        seed: int = 0,
        pipeline: PipelineConfig | None = None,
        overlap: OverlapConfig | None = None,
        scan_layers: ScanLayers = "auto",
    ):
        owned = not isinstance(model, nnx.Module)
        if not isinstance(model, nnx.Module):
            model = model()
        model = fit_vocabulary(model, grid.shape)
        self._padding = padding_of(model)
        policies = checked_policies(activations, model)
        shape = getattr(model, "shape", None)
        check_fits(model, grid.shape)
        self.grid, self.microbatches, self.optimizer = grid, microbatches, optimizer
        overlap = overlap or OverlapConfig()
        # Replicas add up beside layers that are unrolled, and to unroll many for that alone does not pay.
        few = len(getattr(model, getattr(model, "repeats", ""), ())) < LAYERS
        communicates = max(grid.shape.z, grid.shape.y, grid.shape.x) > 1 or (grid.shape.data > 1 and few)
        auto = communicates and jax.default_backend() != "cpu"
        ordered = overlap.order == "package" or (overlap.order == "auto" and auto)
        split = zero > 0 and grid.shape.data > 1
        dtypes = precisions(precision, accumulate, apart=split or offload != "none")
        wanted = check_scan(scan_layers, offload, policies)
        stack = choose_stack(model, optimizer, wanted, activations=activations, ordered=ordered)
        parts = shapes_of(stack.parts)
        self.parts = shapes_of(take_apart(model)) if stack.own else parts
        self._stack = replace(stack, parts=parts)
        self.program = StageProgram(
            parts, grid, dtypes.compute, activations, bucket, overlap.streams, ordered, dtypes.sums, split, gather
        )
        self._key = jax.random.key(seed) if getattr(shape, "dropout", 0.0) > 0.0 else None
        params = self._stack.place(model, grid.mesh, used_up=owned)
        step = Step(self.program, layerwise(optimizer, self._stack), clip, dtypes, bucket)
        self._offloaded = OffloadedStep(step, self.program) if offload != "none" else None
        self._step, self.precisions = step, dtypes
        self._compiled: dict[tuple[int, ...], jax.stages.Compiled] = {}
        self._update = self._offloaded.update if self._offloaded else step.update
        self.train_state = TrainState(self._update.start(params, owned=owned), step.first_scale())
        self._temporaries: dict[tuple[int, ...], Temporaries] = {}
        self._last: StepMetrics | None = None
        self._loss = jax.jit(self.program.loss)
        self.steps_done = 0
        self._in_step = False
        self._rows: dict[int, list[int]] = {}

    @property
    def model(self) -> nnx.Module:
        """The trained module, of the type given: copies of `params` on the devices, which later steps leave alone.

        In a pipeline every layer's are on the devices of its stage. Raises ``UserError`` where some are in other
        processes.
        """
        params = self.params
        if len(params) < len(self.parts.params):
            here = f"{len(params)} of {len(self.parts.params)} parameters here"
            accepted = "a pipeline of one process; in others trainer.params has what is here, trainer.save writes all"
            raise UserError("trainer.model", here, accepted)
        return self.parts.rebuild({name: self._copied(name, value) for name, value in params.items()})

    def _copied(self, name: str, value: Any) -> jax.Array:
        return jax.device_put(value, NamedSharding(value.sharding.mesh, self.parts.specs[name]), may_alias=False)

    @property
    def params(self) -> Params:
        """The float32 weights by name, however layers are run; of scanned ones copies, with offload in host memory."""
        return whole(self._masters)  # type: ignore[no-any-return]

    @property
    def opt_state(self) -> Any:
        """The optimizer's state for `params`; of scanned layers, copies."""
        return whole(self._opt_state)

    @property
    def _masters(self) -> Params:
        """As `params`; what is offloaded in parts is `Held`, of scanned layers a `LayerSlice`."""
        return own_params(self._stack, self._update.masters(self.train_state.model))

    @property
    def _opt_state(self) -> Any:
        """As `opt_state`, in the forms of `_masters`."""
        return own_state(self.optimizer, self._stack, self._update.opt_state(self.train_state.model))

    def restore(self, params: Params, opt_state: Any) -> None:
        """Puts other weights and optimizer state in place, as `params` and `opt_state` give them."""
        self._restore(params, opt_state, owned=False)

    def _restore(self, params: Params, opt_state: Any, *, owned: bool) -> None:
        masters = self._stack.join(params, self.grid.mesh, used_up=owned)
        optimizer = stacked_state(self._stack, opt_state, self.train_state.model.optimizer, used_up=owned)
        self.train_state = self.train_state._replace(model=self._update.restored(masters, optimizer, owned=owned))

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

        An id that is not in a transformer's vocabulary makes the loss NaN. A step whose loss or gradients are not
        finite leaves weights and optimizer state as they were, on every device,
        and is counted in the metrics' `skipped`.

        Dispatches and returns: the metrics are device values, and nothing is waited for, unless optimizer state is in
        host memory (`memory.offload`), or the CPU backend has large temporaries to free first (`memory.temporaries`).
        Collectives are those of `StageProgram.gradients`.
        """
        if self._in_step:
            self._check_whole()
        tokens, key = self.place(batch), self._step_key(self.steps_done)
        program = self._compile(tokens, key)
        if self._offloaded is None:
            self._temporaries[tokens.shape].wait(self._last)
        run: Callable[..., Any] = program if self._offloaded is None else partial(self._offloaded.run, program)
        self._in_step = True
        # One statement: Ctrl-C comes before all of it or after.
        (self.train_state, metrics), self.steps_done = run(self.train_state, tokens, key), self.steps_done + 1
        self._in_step = False
        if self._offloaded is None:
            self._last = metrics
        return metrics  # type: ignore[no-any-return]

    def _check_whole(self) -> None:
        """Goes on behind a step that an exception broke off, Ctrl-C say, as if it had not begun.

        Raises ``RuntimeError`` where that step had used the state up.
        """
        if any(isinstance(leaf, jax.Array) and leaf.is_deleted() for leaf in jax.tree.leaves(self.train_state)):
            raise RuntimeError(
                f"step {self.steps_done + 1} was broken off while it changed the weights: make the trainer again and "
                "load a checkpoint"
            )
        self._in_step = False

    def compiled_step(self, batch: np.ndarray) -> jax.stages.Compiled:
        """The step's compiled program for batches of this shape: its HLO, memory and cost can be read.

        With offload that of the gradients.
        """
        return self._compile(self.place(batch), self._step_key(0))

    def _step_key(self, step: int) -> jax.Array | None:
        return None if self._key is None else jax.random.fold_in(self._key, step)

    def _compile(self, tokens: jax.Array, key: jax.Array | None) -> jax.stages.Compiled:
        if tokens.shape not in self._compiled:
            if self._offloaded is None:
                lowered = self._step.jitted().lower(self.train_state, tokens, key)
            else:
                lowered = self._offloaded.measured.lower(
                    self.train_state.model.weights, self.train_state.scale, tokens, key
                )
            self._compiled[tokens.shape] = lowered.compile()
            self._temporaries[tokens.shape] = Temporaries(self._compiled[tokens.shape], self.grid.mesh)
        return self._compiled[tokens.shape]

    def planned_memory(self) -> dict[int, StateBytes]:
        """The bytes of model state of one device by formula, by place of the pipe, of the places here."""
        return {0: self._update.bytes()}

    def memory(self) -> dict[int, dict[str, Any]]:
        """Where the bytes of one device are: planned by formula, counted, and of the compiled step once it has run.

        By place of the pipe, of the places here; see `memory.account.report`.
        """
        found = counted(jax.tree.leaves(self.train_state.model), self.grid.mesh.local_devices[0])
        program = next(iter(self._compiled.values()), None)
        return {0: report(self.planned_memory()[0], found, self.grid.mesh, program)}

    def evaluate(self, batches: Iterable[np.ndarray], *, samples: int | None = None) -> float:
        """Mean loss over the targets of batches (this process's rows of each), without dropout; waits for the result.

        Where this process has all rows a batch may have any number of them. Rows without targets, all of these being
        -1, fill a batch up and do not count; where processes have rows of their own `samples` says how many do, over
        all batches and processes.
        """
        every = self.grid.shape.batch_shards * self.microbatches
        share = len(self.rows(every))
        found, rows, width = [], 0, 0
        for batch in batches:
            rows = max(rows, -(-len(batch) // share) * share)  # what is left at the end runs in the same program
            filled, width = filled_up(batch, rows), batch.shape[1] - 1
            targets = every / share * width  # of all processes, for a row here
            found.append((self._mean_loss(filled), targets * len(filled), targets * samples_in(filled)))
        counted = sum(count for _, _, count in found) if samples is None else samples * width
        if not counted:
            raise UserError("evaluate", "no samples", "at least one sample")
        return sum(float(mean) * targets for mean, targets, _ in found) / counted

    def _mean_loss(self, batch: np.ndarray) -> Any:
        """The loss of a batch, a mean over all of its rows, those that do not count included."""
        return self._loss(self.train_state.model.weights, self.place(batch))

    def finite(self) -> bool:
        """Whether weights and optimizer state are finite numbers, as far as this process sees; waits for them.

        Every process of the run must call it.
        """
        return all_finite(self.train_state.model)

    def state(self) -> dict[int, State]:
        """All that training changes, by place of the pipe (0 without one): arrays by names without the grid.

        The arrays are those in use, which the next step takes over; what is offloaded in parts is `memory.held.Held`,
        and a scanned layer's `memory.held.LayerSlice`.
        """
        return {0: flatten(self._masters, self._opt_state, self.train_state.scale)}

    def state_elsewhere(self) -> frozenset[str]:
        """Names of arrays here that another process's place saves: none without a pipeline."""
        return frozenset()

    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        """Global shapes of the whole model's state, of all places of the pipe, without padding of the vocabulary."""
        like = self._stack.shapes()
        state = flatten(like, jax.eval_shape(self.optimizer.init, like), self.train_state.scale)
        return without_padding({name: value.shape for name, value in state.items()}, self._padding)

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
        like = jax.eval_shape(self.optimizer.init, self._stack.shapes())
        self._restore(*unflatten(states[0], self._stack.shapes(), like), owned=True)
        scale = unflatten_scale(states[0], self.train_state.scale)
        self.train_state = self.train_state._replace(scale=scale)

    def save(self, directory: Path, step: int) -> Path:
        """Writes all state to `directory/step_N` and waits for it; every process of the run must call it.

        Raises ``OSError`` with the reason where it cannot be written, or is not made of finite numbers.
        """
        return save_now(self, directory, step)

    def load(self, path: Path, *, weights_only: bool = False) -> int:
        """Takes over a checkpoint (a step_N, or the newest of a run), saved on any grid; returns its step.

        `weights_only` takes the parameters and leaves optimizer state and step as they are. Every process of the run
        must call it. Raises ``UserError`` naming what is missing, unexpected, of another shape or damaged.
        """
        return load_now(self, path, weights_only=weights_only)

    def saving(self) -> contextlib.AbstractContextManager[Callable[[str], None]]:
        """Around what may take long between steps, so that nobody takes this process for stuck; gives whom to tell."""
        return contextlib.nullcontext(lambda what: None)

    def lost(self) -> bool:
        """Whether another process of the run is known to have gone, so that no step will end any more."""
        return False

    def explain(self, sequences: int) -> list[str]:
        """Lines for people on how a step of so many sequences runs: the pipeline's stages, or what nothing hides."""
        missing = [f"overlap: this XLA has no {name}, which is left out" for name in self._step.missing_options()]
        rows = sequences // (self.microbatches * self.grid.shape.batch_shards)
        return [*exposed(self.program.streams, self.grid.shape, rows), *missing]

    def leave_timeline(self, directory: Path) -> list[Path]:
        """Writes what was measured of the pipeline's last steps; every process of the run must call it.

        Returns the files for people to look at: none without a pipeline.
        """
        return []

    def close(self) -> None:
        """Ends what the trainer keeps running beside the devices: nothing without a pipeline."""
