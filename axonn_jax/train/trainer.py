"""Trainer: a model, an optimizer and a grid become a step."""

import functools
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import optax
from flax import nnx

from axonn_jax.checkpoint.restore import Checkpoint
from axonn_jax.distributed.bounded import InFlight
from axonn_jax.errors import UserError, integer, typed_arguments
from axonn_jax.grid import Grid
from axonn_jax.memory.report import check_resident
from axonn_jax.options import Rows
from axonn_jax.pruned.config import PruneConfig
from axonn_jax.settings import MemoryConfig, PipelineConfig, TensorConfig, TrainConfig
from axonn_jax.train.engines.base import copied_model
from axonn_jax.train.engines.engine import Engine, mean_by_count
from axonn_jax.train.engines.pruning import Pruning
from axonn_jax.train.engines.spmd import SpmdEngine, model_job
from axonn_jax.train.engines.step import StepMetrics
from axonn_jax.train.optimizer import averaging
from axonn_jax.train.rules import Chosen, check_rules
from axonn_jax.train.saving import iterator_of, load_checkpoint, resume_newest, save_as

P = ParamSpec("P")
T = TypeVar("T")


def _under_mesh(method: Callable[Concatenate["Trainer", P], T]) -> Callable[Concatenate["Trainer", P], T]:
    """Run a method under the mesh of the trainer's grid, whatever mesh is set."""

    @functools.wraps(method)
    def entered(self: "Trainer", /, *args: P.args, **kwargs: P.kwargs) -> T:
        with self.engine.grid.entered():
            return method(self, *args, **kwargs)

    return entered


class Trainer:
    """Trainer of a model on a grid: a facade over an engine that runs the steps.

    The loss is the mean over the counted targets of the global batch, on every grid. A negative id (-1, or -100 as in
    PyTorch) is no target, and id 0 as an input. `engine` is a `PipelineEngine` where the grid's `pipe` is above 1, else
    an `SpmdEngine`, with the float32 weights by name (`engine.params`), the optimizer's state and more for tools and
    tests (`engines.engine.Engine`).

    Args:
        model: A module, whose arrays are the trainer's from then on (`trainer.model` is the trained one), or a function
            that makes one: each process of a pipeline then makes only the parameters of its own stages. With `loss`:
            any Flax module as `parallelize` returns it, or the parameters that `parallelize_linen` returns. Where it
            has adapters (`lora`), these alone are trained.
        optimizer: An optax transformation of gradients and parameters, which may ask for the loss, named `value`; not
            one that evaluates the model again (`optax.lbfgs`) or keeps parameters of its own (`optax.lookahead`). It
            sees global arrays; with `memory.offload` and with a pipeline it must treat every parameter by itself.
        grid: The grid of devices, as `init` returns it.
        loss: Function of the model and a batch, any pytree of arrays with rows in front -> the mean loss of its rows,
            or (loss, numbers to be averaged with it, as `metrics["aux"]`). Default: the loss of a `models.Transformer`
            or `models.SequenceModel` on token ids.
        weight: Function of a batch -> the weight of its mean loss, as the number of unmasked targets. Default: all
            microbatches count alike.
        rows: "parts": `loss` sees a microbatch of one replica; "whole": one of all replicas; "auto": parts if they have
            the results of all rows at once, else whole, which a line says.
        wrt: Filter of the Variables that are trained, of an `nnx.Module` with `loss`.
        microbatches: Parts of a step's batch, processed one after the other.
        clip: Global norm to which gradients are scaled down; 0: no clipping.
        ema: Decay of a moving average of the weights, as 0.999, that `evaluate` uses; 0: none.
        seed: Seed of dropout.
        memory: Table [memory] of a config file (`axonn-jax train --help`). For a model given as a module,
            `sequence_parallel` is the one it was made with.
        tensor: Table [tensor]; for a module, `residual_comm` is the one it was made with.
        pipeline: Table [pipeline], used where the grid's `pipe` is above 1.
        prune: Table [prune]; with `loss` of the kernels of all layers that can be split.

    Raises:
        UserError: An argument is out of range, or arguments contradict each other.
    """

    engine: Engine
    pruning: Pruning

    @typed_arguments
    def __init__(
        self,
        model: Any,
        optimizer: optax.GradientTransformation,
        grid: Grid,
        *,
        loss: Callable[[Any, Any], Any] | None = None,
        weight: Callable[[Any], Any] | None = None,
        rows: Rows = "auto",
        wrt: Any = nnx.Param,
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
        check_rules(Chosen(grid.shape, memory, tensor, prune, train=train, loss=loss is not None))
        check_resident(memory.resident_bytes)
        optimizer = averaging(optimizer, ema) if ema else optimizer
        if loss is None and not (isinstance(model, nnx.Module) or callable(model)):
            raise UserError("model", type(model).__name__, "a models.Transformer, a SequenceModel, or a function")
        job_options: dict[str, Any] = {"clip": clip, "memory": memory, "prune": prune}
        job_options["microbatches"] = integer("microbatches", microbatches, 1)
        self._numbers: Callable[[Any, Any], Any] | None = None
        self._fitting: Callable[[Any], AbstractContextManager[Any]] = nullcontext
        with grid.entered():  # an engine's modules are imported where it is asked for, and need not be there otherwise
            if loss is not None:
                from axonn_jax.train.modules.apart import fitting
                from axonn_jax.train.modules.job import loss_job

                job_options |= {"weight": weight, "rows": rows, "wrt": wrt}
                job = loss_job(model, optimizer, grid, loss=loss, **job_options)
                engine = SpmdEngine(job, grid, seed=seed, memory=memory)
                self.engine, self._numbers, self._fitting = engine, engine.numbers, fitting
            elif grid.shape.pipe > 1:
                from axonn_jax.train.engines.pipeline import PipelineEngine

                self.engine = PipelineEngine(model, optimizer, grid, pipeline=pipeline, seed=seed, **job_options)
            else:
                job = model_job(model, optimizer, grid, tensor=tensor, **job_options)
                self.engine = SpmdEngine(job, grid, seed=seed, memory=memory)
        self._averaged = self.engine.averaged if ema and isinstance(self.engine, SpmdEngine) else nullcontext
        self.pruning = Pruning(prune, self.engine)
        self._run: Mapping[str, Any] = {}

    @property
    @_under_mesh
    def model(self) -> Any:
        """Return the trained module, of copies of the weights on the devices of their stages; raises ``UserError`` in a
        pipeline of several processes."""
        return copied_model(self.engine, self.engine.params)

    @property
    @_under_mesh
    def averaged(self) -> Any:
        """Return the module as `model` does, with the moving average of the weights; raises ``UserError`` without
        `ema`."""
        if self._averaged is nullcontext:
            raise UserError("ema", 0, "a decay, as 0.999, for a trainer whose average is asked for")
        return copied_model(self.engine, {**self.engine.params, **self.engine.opt_state.average})

    @typed_arguments
    def rows(self, sequences: int) -> list[int]:
        """Return this process's sequences of a global batch (all in a run of one process)."""
        return self.engine.batches.local(integer("sequences", sequences, 1))

    @_under_mesh
    def step(self, batch: Any) -> StepMetrics:
        """Run one optimizer step; prune afterwards if due.

        A step with infinite or NaN loss or gradients leaves weights and optimizer state unchanged, on every device. An
        id beyond a transformer's vocabulary makes the loss NaN, and so does a batch without targets.

        Args:
            batch: This process's [sequences, seq + 1] token ids of a global batch: an array or lists of whole numbers.
                With `loss`: a pytree of this process's rows.

        Returns:
            Loss, gradient norm and the number of steps skipped so far. Without a pipeline they are device values, and
            the call waits for the step before the last only (`in_flight`).

        Raises:
            UserError: The batch has another form, or one that `loss` does not take; in a run of one process no targets.
        """
        batch = self.engine.batches.read(batch, counts=True)
        self.pruning.at(self.engine.steps_done)  # a checkpoint of that step may have been loaded
        with self._fitting(batch):
            metrics = self.engine.step(batch)
        self.pruning.at(self.engine.steps_done)
        return metrics

    @typed_arguments
    @_under_mesh
    def evaluate(self, batches: Iterable[Any], *, loss: Callable[..., Any] | None = None, aux: bool = False) -> Any:
        """Return the mean loss over the targets of batches, of the average of the weights with `ema`.

        A module evaluates without dropout; a Linen loss is called as it is, with one key if it takes one.

        Args:
            batches: This process's sequences of each batch, in the form of `step`'s; of any number of sequences where
                this process has all of them. Sequences without targets fill a batch up.
            loss: Another loss, for a trainer with `loss`, as one that calls a Linen module with `train=False`; it sees
                the rows of all replicas.
            aux: True to return (mean loss, the numbers beside it averaged alike) of a trainer with `loss`.

        Raises:
            UserError: No batch has a counted target.
        """
        if (loss is not None or aux) and self._numbers is None:
            raise UserError("evaluate", "loss= or aux=", "neither, by a Trainer without loss=")
        if loss is not None:
            from axonn_jax.train.modules.job import check_loss

            check_loss(loss)
        self.pruning.check_masks()
        shaped, rows, results, bounded = self.engine.batches, 0, [], InFlight()
        with self._averaged():
            for batch in map(shaped.read, batches):
                rows = max(rows, -(-shaped.rows(batch) // shaped.share) * shaped.share)  # smaller: in the same program
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
        from axonn_jax.train.modules.numbers import means

        mean, numbers = means(results)
        return (mean, numbers) if aux else mean

    @typed_arguments
    @_under_mesh
    def set(self, /, **numbers: float) -> None:
        """Replace numbers of the optimizer from the next step on, as `set(learning_rate=1e-4)`.

        Args:
            numbers: Values by name, of an optimizer made by `optax.inject_hyperparams`.

        Raises:
            UserError: The optimizer keeps no number of that name.
        """
        for store in self.engine.stores.values():
            store.set(numbers)

    @typed_arguments
    @_under_mesh
    def save(self, directory: str | Path, step: int, *, keep: int | None = None, iterator: Any = None) -> Path:
        """Write all state to a checkpoint, wait, and return its path; collective over the run's processes.

        Args:
            directory: The directory in which `step_N` is made.
            step: The step's number N.
            keep: The newest checkpoints that stay in the directory; None: all.
            iterator: The state of this process's data, as `Loader.position` or what Grain's `get_state` returns.

        Raises:
            UserError: JSON does not hold the iterator's state.
            OSError: The checkpoint cannot be written, or the state is not finite; the text has the reason.
        """
        self.pruning.check_masks()
        integer("step", step, 0)
        keep = keep if keep is None else integer("keep", keep, 1)
        return save_as(self.engine, Path(directory), step, keep=keep, iterator=iterator)

    @typed_arguments
    @_under_mesh
    def load(self, path: str | Path, *, weights_only: bool = False) -> int:
        """Replace the state by a checkpoint's, saved on any grid; collective over the run's processes.

        Args:
            path: A step_N, or a directory of them, of which the newest is loaded.
            weights_only: True if optimizer state and step stay as they are.

        Returns:
            The checkpoint's step.

        Raises:
            UserError: Arrays are missing, unexpected, misshapen or corrupt, or masks contradict `prune`.
        """
        checkpoint = load_checkpoint(self.engine, Path(path), weights_only=weights_only)
        return self._loaded(checkpoint, resumes=not weights_only) or 0

    @typed_arguments
    @_under_mesh
    def resume(self, directory: str | Path) -> int | None:
        """Load the newest whole checkpoint of a directory as `load` does, and return its step; None: a new run."""
        return self._loaded(resume_newest(self.engine, Path(directory)))

    def _loaded(self, checkpoint: Checkpoint | None, *, resumes: bool = True) -> int | None:
        if checkpoint is not None and resumes:
            self._run = checkpoint.manifest.run
        self.pruning.loaded()
        return None if checkpoint is None else checkpoint.manifest.step

    @property
    def iterator(self) -> Any:
        """Return this process's `iterator` of the checkpoint loaded last, or None; raises ``UserError`` where each of
        another number of processes had its own."""
        return iterator_of(self._run, self.engine.grid)

    def close(self) -> None:
        """End threads and channels of a pipeline, before the process ends."""
        self.engine.close()
