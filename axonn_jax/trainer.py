"""Trainer of the Python API: a facade over the engines that run the steps."""

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import optax
from flax import nnx

from axonn_jax.core.checkpoint.restore import Checkpoint
from axonn_jax.core.distributed.bounded import InFlight
from axonn_jax.core.engines.base import copied_model, under_mesh
from axonn_jax.core.engines.engine import BatchEngine, mean_by_count
from axonn_jax.core.engines.optimizer import averaging
from axonn_jax.core.engines.pruning import Pruning
from axonn_jax.core.engines.rules import RunSettings, check_rules
from axonn_jax.core.engines.saving import iterator_of, load_checkpoint, resume_newest, save_as
from axonn_jax.core.engines.spmd import SpmdEngine, model_job
from axonn_jax.core.engines.step import StepMetrics
from axonn_jax.core.errors import UserError, integer, typed_arguments
from axonn_jax.core.grid import Grid
from axonn_jax.core.memory.report import check_resident
from axonn_jax.core.options import Rows
from axonn_jax.core.pruned.config import PruneConfig
from axonn_jax.core.settings import MemoryConfig, PipelineConfig, TensorConfig, TrainConfig


class Trainer:
    """Trainer of a model on a grid: a facade over an engine that runs the steps.

    The loss is the mean over the counted targets of the global batch, on every grid. A negative id (-1, or -100 as in
    PyTorch) does not count as a target, and is id 0 as an input. `engine` is a `PipelineEngine` if the grid's `pipe` is
    above 1, otherwise an `SpmdEngine`; tools and tests find the float32 weights by name (`engine.params`), the
    optimizer's state and more there (`engines.engine.Engine`).

    Args:
        model: A module, whose arrays belong to the trainer from then on (`trainer.model` is the trained one), or a
            function that returns one, so that each process of a pipeline only creates the parameters of its stages.
            With `loss`: any Flax module that `parallelize` has returned, or the parameters from `parallelize_linen`; in
            a pipeline the module, the Linen parameters, or a function that makes them, whose loss is cut into stages.
            If it has adapters (`lora`), only these are trained.
        optimizer: An optax transformation of gradients and parameters, which may also take the loss as `value`, but may
            not evaluate the model again (`optax.lbfgs`) or keep a copy of the parameters (`optax.lookahead`). It sees
            global arrays; with `memory.offload` or a pipeline it must treat every parameter independently.
        grid: The grid of devices, as `init` returns it.
        loss: Function of the model and a batch (any pytree of arrays whose leading axis is rows) that returns the mean
            loss of the rows, or (loss, numbers to average with it, returned as `metrics["aux"]`). Default: the loss of
            a `models.Transformer` or `models.SequenceModel` on token ids.
        weight: Function of a batch that returns the weight of its mean loss, such as the number of unmasked targets.
            Default: all microbatches have the same weight.
        rows: "parts": `loss` sees a microbatch of one replica; "whole": a microbatch of all replicas; "auto": parts if
            the results are the same as for all rows at once, otherwise whole, with a line that says so.
        wrt: Filter of the Variables to train, for an `nnx.Module` with `loss`.
        microbatches: Number of parts of a step's batch, processed one after the other.
        clip: Global norm to which larger gradients are scaled down; 0: no clipping.
        ema: Decay of a moving average of the weights, such as 0.999, which `evaluate` uses; 0: none.
        seed: Seed of dropout.
        memory: Table [memory] of a config file (`axonn-jax train --help`). For a model passed as a module,
            the `sequence_parallel` that it was created with applies.
        tensor: Table [tensor]; for a module, the `residual_comm` that it was created with applies.
        pipeline: Table [pipeline], used if the grid's `pipe` is above 1.
        prune: Table [prune]; with `loss` it applies to the kernels of all layers that can be split.

    Raises:
        UserError: An argument is out of range, or arguments contradict each other.
    """

    engine: BatchEngine[Any]
    pruning: Pruning

    @typed_arguments
    def __init__(
        self,
        model: Any,
        optimizer: optax.GradientTransformation,
        grid: Grid,
        *,
        loss: Callable[[object, object], object] | None = None,
        weight: Callable[[object], object] | None = None,
        rows: Rows = "auto",
        wrt: object = nnx.Param,
        microbatches: int = 1,
        clip: float = 0.0,
        ema: float = 0.0,
        seed: int = 0,
        memory: MemoryConfig = MemoryConfig(),  # noqa: B008 (frozen)
        tensor: TensorConfig = TensorConfig(),  # noqa: B008
        pipeline: PipelineConfig = PipelineConfig(),  # noqa: B008
        prune: PruneConfig = PruneConfig(),  # noqa: B008
    ):
        train = TrainConfig(ema=ema, clip=clip, seed=seed)
        check_rules(RunSettings(grid.shape, memory, tensor, prune, train=train, loss=loss is not None))
        check_resident(memory.resident_bytes)
        optimizer = averaging(optimizer, ema) if ema else optimizer
        if loss is None and not (isinstance(model, nnx.Module) or callable(model)):
            raise UserError("model", type(model).__name__, "a models.Transformer, a SequenceModel, or a function")
        job_options: dict[str, Any] = {"memory": memory, "prune": prune}
        job_options["microbatches"] = integer("microbatches", microbatches, 1)
        self._fitting: Callable[[object], AbstractContextManager[object]] = nullcontext
        with grid.entered():
            # An engine's modules are imported only if it is used: a run need not have the dependencies of the others.
            if loss is not None:
                from axonn_jax.any_flax.modules.loss_model import fitting

                job_options |= {"loss": loss, "weight": weight, "rows": rows, "wrt": wrt}
                self._fitting = fitting
            engine: Any
            if grid.shape.pipe > 1:
                from axonn_jax.pipe.engine import PipelineEngine

                engine = PipelineEngine(
                    _staged_job(model, optimizer, grid, pipeline, job_options), clip=clip, seed=seed
                )
            elif loss is not None:
                from axonn_jax.any_flax.modules.job import loss_job

                job = loss_job(model, optimizer, grid, clip=clip, **job_options)
                engine = SpmdEngine(job, grid, seed=seed, memory=memory)
            else:
                job = model_job(model, optimizer, grid, clip=clip, tensor=tensor, **job_options)
                engine = SpmdEngine(job, grid, seed=seed, memory=memory)
            self.engine, self._numbers = engine, None if loss is None else engine.numbers
        self._averaged = self.engine.averaged if ema and isinstance(self.engine, SpmdEngine) else nullcontext
        self.pruning = Pruning(prune, self.engine)
        self._run: Mapping[str, object] = {}

    @property
    @under_mesh
    def model(self) -> Any:
        """Trained module with copies of the weights; raises ``UserError`` in a pipeline of several processes."""
        return copied_model(self.engine, self.engine.params)

    @property
    @under_mesh
    def averaged(self) -> Any:
        """Module like `model` with the moving average of the weights; raises ``UserError`` without `ema`."""
        if self._averaged is nullcontext:
            raise UserError("ema", 0, "a decay, as 0.999, for a trainer whose average is asked for")
        return copied_model(self.engine, {**self.engine.params, **self.engine.opt_state.average})

    @typed_arguments
    def rows(self, sequences: int) -> list[int]:
        """Return the indices of this process's sequences in a global batch of so many sequences."""
        return self.engine.batches.local(integer("sequences", sequences, 1))

    @under_mesh
    def step(self, batch: Any) -> StepMetrics:
        """Run one optimizer step, and prune afterwards if due; collective over the run's processes.

        A step with infinite or NaN loss or gradients leaves weights and optimizer state unchanged on every device. An
        id beyond a transformer's vocabulary makes the loss NaN, and so does a batch without targets.

        Args:
            batch: This process's [sequences, seq + 1] token ids of a global batch, as an array or lists of integers.
                With `loss`: a pytree of this process's rows.

        Returns:
            Loss, gradient norm and the number of skipped steps so far. Without a pipeline they are device values, and
            the call only waits for the step before the last (`in_flight`).

        Raises:
            UserError: The batch has another form, or one that `loss` does not accept, or has no targets in a run of one
                process.
        """
        batch = self.engine.batches.read(batch, counts=True)
        self.pruning.at(self.engine.steps_done)  # due here if a checkpoint of that step was loaded unpruned
        with self._fitting(batch):
            metrics = self.engine.step(batch)
        self.pruning.at(self.engine.steps_done)
        return metrics

    @typed_arguments
    @under_mesh
    def evaluate(self, batches: Iterable[Any], *, loss: Callable[..., Any] | None = None, aux: bool = False) -> Any:
        """Return the mean loss over the targets of all batches; with `ema`, that of the averaged weights.

        A module is evaluated without dropout; a Linen loss is called unchanged, with a fixed key if it takes one.

        Args:
            batches: This process's sequences of each batch, in the form that `step` takes. In a run of one process
                batches may have any number of sequences; short ones are padded with sequences without targets.
            loss: Another loss, for a trainer with `loss`, such as one that calls a Linen module with `train=False`; it
                sees the rows of all replicas.
            aux: True to return (mean loss, its auxiliary numbers averaged alike), for a trainer with `loss`.

        Raises:
            UserError: No batch has a counted target.
        """
        if (loss is not None or aux) and self._numbers is None:
            raise UserError("evaluate", "loss= or aux=", "neither, by a Trainer without loss=")
        if loss is not None:
            from axonn_jax.any_flax.modules.job import check_loss

            check_loss(loss)
        self.pruning.check_masks()
        shaped, rows, results, bounded = self.engine.batches, 0, [], InFlight()
        with self._averaged():
            for batch in map(shaped.read, batches):
                # Pad every batch to the largest so far, so that a smaller one does not compile a new program.
                rows = max(rows, -(-shaped.rows(batch) // shaped.share) * shaped.share)
                filled = shaped.filled(batch, rows)
                with self._fitting(batch):
                    numbers_of = self._numbers
                    result = (*self.engine.mean_loss(filled), {}) if numbers_of is None else numbers_of(filled, loss)
                results.append(bounded(result))
        if not results:
            raise UserError("batches", "none", "at least one batch")
        if self._numbers is None:
            losses, counts, _ = zip(*results, strict=True)
            return mean_by_count(losses, [float(count) for count in counts])
        from axonn_jax.any_flax.modules.metrics import means

        mean, numbers = means(results)
        return (mean, numbers) if aux else mean

    @typed_arguments
    @under_mesh
    def set(self, /, **numbers: float) -> None:
        """Replace hyperparameters of the optimizer from the next step on, as in `set(learning_rate=1e-4)`.

        Args:
            numbers: Values by name, for an optimizer made by `optax.inject_hyperparams`.

        Raises:
            UserError: The optimizer has no hyperparameter of that name.
        """
        for store in self.engine.stores.values():
            store.set(numbers)

    @typed_arguments
    @under_mesh
    def save(self, directory: str | Path, step: int, *, keep: int | None = None, iterator: Any = None) -> Path:
        """Write the full state to a checkpoint, wait, and return its path; collective over the run's processes.

        Args:
            directory: Directory in which `step_N` is created.
            step: The step's number N.
            keep: Number of newest checkpoints to keep in the directory; None: all.
            iterator: State of this process's data, such as `Loader.position` or the result of Grain's `get_state`.

        Raises:
            UserError: JSON cannot represent the iterator's state.
            OSError: The checkpoint cannot be written, or the state is not finite; the text has the reason.
        """
        self.pruning.check_masks()
        integer("step", step, 0)
        keep = keep if keep is None else integer("keep", keep, 1)
        return save_as(self.engine, Path(directory), step, keep=keep, iterator=iterator)

    @typed_arguments
    @under_mesh
    def load(self, path: str | Path, *, weights_only: bool = False) -> int:
        """Replace the state by that of a checkpoint, saved on any grid; collective over the run's processes.

        Args:
            path: A step_N, or a directory of them, whose newest is loaded.
            weights_only: True to keep optimizer state and step.

        Returns:
            The checkpoint's step; 0 for a pretrained directory.

        Raises:
            UserError: Arrays are missing, unexpected, misshapen or corrupt, or masks contradict `prune`.
        """
        checkpoint = load_checkpoint(self.engine, Path(path), weights_only=weights_only)
        return self._loaded(checkpoint, resumes=not weights_only) or 0

    @typed_arguments
    @under_mesh
    def resume(self, directory: str | Path) -> int | None:
        """Load the newest complete checkpoint of a directory like `load`, and return its step; None: a new run."""
        return self._loaded(resume_newest(self.engine, Path(directory)))

    def _loaded(self, checkpoint: Checkpoint | None, *, resumes: bool = True) -> int | None:
        if checkpoint is not None and resumes:
            self._run = checkpoint.manifest.run
        self.pruning.loaded()
        return None if checkpoint is None else checkpoint.manifest.step

    @property
    def iterator(self) -> object:
        """State of this process's data iterator in the last loaded checkpoint, or None; ``UserError`` if another number
        of processes saved it, with states that differ."""
        return iterator_of(self._run, self.engine.grid)

    def close(self) -> None:
        """Stop a pipeline's threads and channels, before the process ends."""
        self.engine.close()


def _staged_job(model: Any, optimizer: Any, grid: Grid, pipeline: PipelineConfig, options: Mapping[str, Any]) -> Any:
    job_of: Callable[..., Any]
    if "loss" in options:
        from axonn_jax.staged.make_job import pipelined_loss_job as job_of
    else:
        from axonn_jax.pipe.token_job import token_job as job_of
    return job_of(model, optimizer, grid, pipeline=pipeline, **options)
