"""The `Engine` protocol: `SpmdEngine` (one compiled program) and `PipelineEngine` (stages as tasks)."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import jax
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from numpy.typing import NDArray

from axonn_jax.core.checkpoint.naming import State
from axonn_jax.core.distributed.heartbeat import Heartbeat
from axonn_jax.core.engines.step import StepMetrics
from axonn_jax.core.errors import UserError
from axonn_jax.core.grid import BATCH_AXES, Grid
from axonn_jax.core.models.packed import counted_targets, pad_batch
from axonn_jax.core.state.param_store import ParamStore
from axonn_jax.core.tensor.params import Params, SplitModule
from axonn_jax.core.tensor.weight_gather import Weights


def token_ids_of(batch: object) -> NDArray[np.int32]:
    """Return a batch [sequences, seq + 1] as int32 NumPy array, from any library's array (PyTorch's too) or lists.

    Raises ``UserError`` for anything else; numbers are neither rounded nor truncated to 32 bits.
    """
    accepted = "[sequences, seq_len + 1] token ids: whole numbers of 32 bits, as an array or as lists of one length"
    try:
        ids = np.asarray(batch)
    except Exception as error:  # ragged lists, and whatever an object's `__array__` raises
        raise UserError("batch", type(batch).__name__, accepted) from error
    if ids.dtype.kind not in "iu":
        raise UserError("batch", f"{type(batch).__name__} of {ids.dtype}", accepted)
    if ids.ndim != 2 or ids.shape[1] < 2:
        raise UserError("batch", ids.shape, accepted)
    bounds, extremes = np.iinfo(np.int32), (ids.min(initial=0), ids.max(initial=0))
    # A cast to int32 would wrap silently.
    for extreme in extremes:
        if not bounds.min <= extreme <= bounds.max:
            raise UserError("batch", f"{type(batch).__name__} with {extreme}", accepted)
    return ids.astype(np.int32, copy=False)


def mean_by_count(values: Sequence[jax.Array | float], counts: Sequence[float]) -> float:
    """Return the mean of batches' values, weighted by their counts.

    Raises ``UserError`` if all counts are zero.
    """
    if not any(counts):
        raise UserError("evaluate", "no targets", "at least one target that counts")
    return sum(float(v) * count for v, count in zip(values, counts, strict=True) if count) / sum(counts)


Rows = TypeVar("Rows")
"""This process's rows of a batch, validated: token ids, or the arrays of a user's batch."""


Shards = TypeVar("Shards", covariant=True)
"""Global batch on the mesh (`on_mesh.Placed`)."""


class Batches(ABC, Generic[Rows, Shards]):
    """Global batches: which rows this process loads, validation of user batches, and their arrays on the mesh."""

    def __init__(self, grid: Grid, microbatches: int):
        self.grid, self.microbatches = grid, microbatches
        self._local: dict[int, list[int]] = {}

    @property
    @abstractmethod
    def least(self) -> int:
        """Rows of the smallest global batch."""

    @property
    def share(self) -> int:
        """Rows of the smallest global batch that this process holds."""
        return len(self.local(self.least))

    def local(self, global_batch: int) -> list[int]:
        """Return the indices, ascending, of the rows of a global batch of this size that this process's devices hold.

        Raises ``UserError`` if the batch does not divide.
        """
        # Cached: the index map is the same for every batch of this size.
        if global_batch not in self._local:
            numbers, layout = self.numbers(global_batch)
            indices = layout.addressable_devices_indices_map(numbers.shape).values()  # None for other processes
            row_numbers = {int(number) for index in indices if index is not None for number in numbers[index].flat}
            self._local[global_batch] = sorted(row_numbers)
        return self._local[global_batch]

    @abstractmethod
    def numbers(self, rows: int) -> tuple[np.ndarray, NamedSharding]:
        """Return a global batch's row indices in the shape of its arrays, microbatches first, and their layout.

        Raises ``UserError`` if the batch does not divide.
        """

    def to_mesh(self, rows: np.ndarray, global_batch: int) -> jax.Array:
        """Return this process's `rows` of a global batch as an array on the mesh, in the shape of `numbers`."""
        numbers, layout = self.numbers(global_batch)

        def shard(index: tuple[slice, ...] | None) -> np.ndarray:
            assert index is not None
            shard_numbers = numbers[index[: numbers.ndim]]
            # `rows` only has this process's rows, in ascending order: translate global indices to positions in it.
            local_rows = np.searchsorted(self.local(global_batch), shard_numbers.ravel())
            return rows[local_rows].reshape(*shard_numbers.shape, *rows.shape[1:])

        return jax.make_array_from_callback((*numbers.shape, *rows.shape[1:]), layout, shard)

    @abstractmethod
    def read(self, batch: object, *, counts: bool = False) -> Rows:
        """Validate a batch and return it as NumPy arrays.

        Raises ``UserError`` for a batch of another form, or, if `counts`, for one without targets.
        """

    @abstractmethod
    def rows(self, batch: Rows) -> int:
        """Return the number of rows of a batch."""

    @abstractmethod
    def filled(self, batch: Rows, rows: int) -> Rows:
        """Return the batch padded to `rows` with rows that do not count."""

    @abstractmethod
    def shard(self, batch: Rows) -> Shards:
        """Return this process's rows of a global batch as arrays on the mesh, microbatches first."""


class TokenBatches(Batches[np.ndarray, jax.Array]):
    """Global batches of token ids [sequences, seq + 1], which a `models.protocol.Model` takes."""

    def __init__(self, grid: Grid, microbatches: int, *, packed: bool):
        super().__init__(grid, microbatches)
        self._packed = packed

    def numbers(self, rows: int) -> tuple[np.ndarray, NamedSharding]:  # noqa: D102
        self.grid.shape.check_batch(rows, self.microbatches)
        return np.arange(rows).reshape(self.microbatches, -1), NamedSharding(self.grid.mesh, P(None, BATCH_AXES))

    @property
    def least(self) -> int:  # noqa: D102
        return self.grid.shape.batch_shards * self.microbatches

    def read(self, batch: object, *, counts: bool = False) -> NDArray[np.int32]:
        """Return token ids [sequences, seq + 1] as NumPy array; raises ``UserError`` for anything else."""
        ids = token_ids_of(batch)
        # Only a single process sees the full batch; with several, the targets may be in another one's rows.
        if counts and self.grid.size == 1 and len(ids) and not counted_targets(ids, packed=self._packed).any():
            rows = "packed rows" if self._packed else "rows of ids from 0"
            raise UserError("batch", ids.shape, f"{rows} with at least one target that counts")
        return ids

    def rows(self, batch: np.ndarray) -> int:
        """Return the number of sequences."""
        return len(batch)

    def filled(self, batch: np.ndarray, rows: int) -> np.ndarray:
        """Return the batch padded to `rows` with sequences without targets."""
        return pad_batch(batch, rows)

    def global_rows(self, batch: np.ndarray) -> int:
        """Return the number of sequences in the global batch, given this process's [sequences, seq + 1].

        Raises ``UserError`` for any other shape or an indivisible number of sequences.
        """
        if batch.ndim != 2 or len(batch) == 0 or len(batch) % self.share:
            accepted = f"[sequences, seq_len + 1] token ids, sequences in a multiple of {self.share}"
            raise UserError("batch", batch.shape, accepted)
        return len(batch) // self.share * self.least

    def shard(self, batch: np.ndarray) -> jax.Array:
        """Return [microbatches, global_batch / microbatches, seq + 1] on the mesh from this process's sequences."""
        return self.to_mesh(batch.astype(np.int32, copy=False), self.global_rows(batch))


class RowChoice(Protocol):
    """Choice of how a user's loss runs (`any_flax/modules/proof.py`)."""

    facts: dict[str, object]
    """The choice and its reason, as stored in a checkpoint's manifest; after loading, those of the loaded run."""

    def changes(self, step: int, params: Weights, carried: Params, batch: object) -> bool:
        """Choose before a step; return True if the job's `build` returns another program from now on."""

    def evaluates_at_once(
        self, loss: Callable[..., object] | None, params: Weights, carried: Params, batch: object
    ) -> bool:
        """Return True if an evaluation by a loss (None: the job's) must see all rows of a batch at once."""


class Engine(Protocol):
    """Runs the steps of a model on a grid; implemented by `SpmdEngine` and `PipelineEngine`.

    Every process of the run makes the same calls, except for `params`, `opt_state` and `memory`.
    """

    grid: Grid
    steps_done: int
    heartbeat: Heartbeat | None
    """Detects that other processes of the run have stopped; None if not watched."""
    stores: Mapping[int, ParamStore[Any]]
    """Parameter stores of this process's ranks of the pipe (rank 0 without a pipeline)."""

    @property
    def parts(self) -> SplitModule:
        """Shapes and layouts of all parameters of the full model, under the model's names."""

    def merged(self, params: Params) -> object:
        """Return the user's model with these parameters and its current remaining state."""

    @property
    def params(self) -> Params:
        """This process's float32 weights by name."""

    @property
    def opt_state(self) -> optax.OptState:
        """Optimizer state for `params`; in a pipeline, by rank of the pipe."""

    def state(self) -> State:
        """Return the state that this process's JAX world saves, by checkpoint name; each array is in one world only.

        The next step donates these arrays. Those stored in another form are `LazyArray`s (see `ParamStore`).
        """

    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return global shapes of the full model's state, without padding of the vocabulary."""

    def load(self, read: Callable[[State], State], should_load: Callable[[str], bool] = lambda name: True) -> None:
        """Replace the arrays whose names pass `should_load` by those `read` returns for their abstract arrays.

        The old arrays are freed first, so that the devices never hold two copies.
        """

    def finite(self) -> bool:
        """Return True if this process's weights and optimizer state are finite; waits for them."""

    def memory(self) -> dict[int, dict[str, Any]]:
        """Return bytes per device: planned by formula, counted, and of the compiled step once it has run.

        By this process's ranks of the pipe (0 without a pipeline); see `memory.report.report`.
        """

    def saving(self) -> AbstractContextManager[Callable[[str], None]]:
        """Return a context for long work between steps, so that peers do not consider this process stuck."""

    def explain(self, sequences: int) -> list[str]:
        """Return lines of text on how a step of `sequences` runs."""

    def write_timeline(self, directory: Path) -> list[Path]:
        """Write a timeline of the last steps; return the pictures, none without a pipeline."""

    def close(self) -> None:
        """End background threads and channels; results of the last step stay readable."""


class BatchEngine(Engine, Protocol[Rows]):
    """Engine with its steps, for batches of one form."""

    @property
    def batches(self) -> Batches[Rows, object]:
        """Layout and validation of global batches."""

    def step(self, batch: Rows) -> StepMetrics:
        """Run one optimizer step on this process's rows of a global batch, as returned by `Batches.read`."""

    def mean_loss(self, batch: Rows) -> tuple[jax.Array | float, jax.Array | float]:
        """Return the mean loss over a batch's counted targets, without dropout, and their number over all processes.

        Both are host or device numbers.
        """

    def compiled_step(self, batch: Rows) -> jax.stages.Compiled | None:
        """Return the compiled program of a step on a batch; None for a pipeline, whose step is many programs."""
