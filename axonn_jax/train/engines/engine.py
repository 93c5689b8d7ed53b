"""The `Engine` protocol: `SpmdEngine` (one compiled program) and `PipelineEngine` (stages as tasks)."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from axonn_jax.checkpoint.naming import State
from axonn_jax.distributed.heartbeat import Heartbeat
from axonn_jax.errors import UserError
from axonn_jax.grid import BATCH_AXES, Grid
from axonn_jax.models.packed import counted_targets, pad_batch
from axonn_jax.state.param_store import ParamStore
from axonn_jax.tensor.params import Params, SplitModule
from axonn_jax.tensor.weight_gather import Weights
from axonn_jax.train.engines.step import StepMetrics


def token_ids_of(batch: Any) -> np.ndarray[Any, np.dtype[np.int32]]:
    """A batch [sequences, seq + 1] as numpy's: of an array of any library, torch's too, or of lists of whole numbers.

    Raises ``UserError`` where it is no such thing: other numbers are not rounded, and nothing is cut to 32 bits.
    """
    accepted = "[sequences, seq_len + 1] token ids: whole numbers of 32 bits, as an array or as lists of one length"
    try:
        ids = np.asarray(batch)
    except Exception as error:  # from objects that turn into arrays, or uneven lists
        raise UserError("batch", type(batch).__name__, accepted) from error
    if ids.dtype.kind not in "iu":
        raise UserError("batch", f"{type(batch).__name__} of {ids.dtype}", accepted)
    if ids.ndim != 2 or ids.shape[1] < 2:
        raise UserError("batch", ids.shape, accepted)
    bounds, extremes = np.iinfo(np.int32), (ids.min(initial=0), ids.max(initial=0))
    for extreme in extremes:
        if not bounds.min <= extreme <= bounds.max:
            raise UserError("batch", f"{type(batch).__name__} with {extreme}", accepted)
    return ids.astype(np.int32, copy=False)


def mean_by_count(values: Sequence[Any], counts: Sequence[float]) -> float:
    """Return the mean of numbers of batches, each by what its batch counts.

    Raises ``UserError`` where nothing counts.
    """
    if not any(counts):
        raise UserError("evaluate", "no targets", "at least one target that counts")
    return sum(float(v) * count for v, count in zip(values, counts, strict=True) if count) / sum(counts)


class Batches(ABC):
    """Global batches: rows of one that this process loads, checks of what a user hands in, and their arrays."""

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
        """Return the numbers of the rows of a global batch of so many that this process's devices hold, ascending.

        Raises ``UserError`` where the batch does not divide.
        """
        if global_batch not in self._local:
            numbers, layout = self.numbers(global_batch)
            here = layout.addressable_devices_indices_map(numbers.shape).values()  # None: of other processes
            own = {int(number) for index in here if index is not None for number in numbers[index].flat}
            self._local[global_batch] = sorted(own)
        return self._local[global_batch]

    @abstractmethod
    def numbers(self, rows: int) -> tuple[np.ndarray, NamedSharding]:
        """Return the numbers of a global batch's rows as its arrays have them, microbatches first, and their layout.

        Raises ``UserError`` where the batch does not divide.
        """

    def placed(self, rows: Any, global_batch: int) -> jax.Array:
        """Return this process's rows of an array of a global batch on the mesh, in the shape of `numbers`."""
        numbers, layout = self.numbers(global_batch)

        def shard(index: tuple[slice, ...] | None) -> np.ndarray:
            assert index is not None
            chosen = numbers[index[: numbers.ndim]]
            at = np.searchsorted(self.local(global_batch), chosen.ravel())
            return rows[at].reshape(*chosen.shape, *rows.shape[1:])  # type: ignore[no-any-return]

        return jax.make_array_from_callback((*numbers.shape, *rows.shape[1:]), layout, shard)

    @abstractmethod
    def read(self, batch: Any, *, counts: bool = False) -> Any:
        """Return a batch as numpy's, checked.

        Raises ``UserError`` for one of another form, or if it must be one that `counts`, without a target.
        """

    @abstractmethod
    def rows(self, batch: Any) -> int:
        """Return the rows of a batch, of any number of rows."""

    @abstractmethod
    def filled(self, batch: Any, rows: int) -> Any:
        """Return the batch with rows added that do not count."""

    @abstractmethod
    def shard(self, batch: Any) -> Any:
        """Return this process's rows of a global batch as arrays on the mesh, microbatches first."""


class TokenBatches(Batches):
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

    def read(self, batch: Any, *, counts: bool = False) -> np.ndarray[Any, np.dtype[np.int32]]:
        """Return token ids [sequences, seq + 1] as numpy's; raises ``UserError`` for something else."""
        ids = token_ids_of(batch)
        if counts and self.grid.size == 1 and len(ids) and not counted_targets(ids, packed=self._packed).any():
            rows = "packed rows" if self._packed else "rows of ids from 0"
            raise UserError("batch", ids.shape, f"{rows} with at least one target that counts")
        return ids

    def rows(self, batch: np.ndarray) -> int:
        """Return the number of sequences."""
        return len(batch)

    def filled(self, batch: np.ndarray, rows: int) -> np.ndarray:
        """Return the batch with sequences without targets added."""
        return pad_batch(batch, rows)

    def whole(self, batch: np.ndarray) -> int:
        """Sequences of the global batch of which this process's are [sequences, seq + 1].

        Raises ``UserError`` for any other shape, or number of sequences.
        """
        if batch.ndim != 2 or len(batch) == 0 or len(batch) % self.share:
            accepted = f"[sequences, seq_len + 1] token ids, sequences in a multiple of {self.share}"
            raise UserError("batch", batch.shape, accepted)
        return len(batch) // self.share * self.least

    def shard(self, batch: np.ndarray) -> jax.Array:
        """Make [microbatches, global_batch / microbatches, seq + 1] on the mesh from this process's sequences."""
        return self.placed(batch.astype(np.int32, copy=False), self.whole(batch))


class RowChoice(Protocol):
    """Choice of the way in which a user's loss runs (`train/modules/proof.py`)."""

    facts: dict[str, Any]
    """The choice and its reason, as a checkpoint's manifest has them; of a loaded checkpoint those of its run."""

    def changes(self, step: int, params: Weights, carried: Params, batch: Any) -> bool:
        """Choose the way before a step; True if the job's `build` gives another program from now on."""

    def evaluates_at_once(self, loss: Any, params: Weights, carried: Params, batch: Any) -> bool:
        """Return whether an evaluation by a loss (None: the job's) must see all rows of a batch at once."""


class Engine(Protocol):
    """Steps of a model on a grid; `SpmdEngine` and `PipelineEngine` are the two.

    Every process of the run makes the same calls, but for `params`, `opt_state` and `memory`.
    """

    grid: Grid
    steps_done: int
    heartbeat: Heartbeat | None
    """Attention to the other processes of the run; None without."""
    stores: Mapping[int, ParamStore[Any]]
    """Stores of all state by rank of the pipe, of the ranks here (0 without a pipeline)."""

    @property
    def batches(self) -> Batches:
        """Form of global batches."""

    @property
    def parts(self) -> SplitModule:
        """The whole model taken apart: shapes and layouts of all parameters under the model's own names."""

    def merged(self, params: Params) -> Any:
        """Return the user's model with these parameters, and the rest of its state as it is now."""

    @property
    def params(self) -> Params:
        """The float32 weights that this process holds, by name."""

    @property
    def opt_state(self) -> Any:
        """The optimizer's state for `params`; of a pipeline by rank of the pipe."""

    def step(self, batch: Any) -> StepMetrics:
        """Run one optimizer step on this process's rows of a global batch, as `Batches.read` gives them."""

    def mean_loss(self, batch: Any) -> tuple[Any, Any]:
        """The mean loss over the targets of a batch that count, without dropout, and their number over all processes.

        Numbers of a host or a device.
        """

    def state(self) -> State:
        """State that this process's jax world saves: live arrays by names without the grid, each once in the whole run.

        The next step takes them over; an array that is not held whole is in a form of its own (`ParamStore`).
        """

    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        """Global shapes of the whole model's state, without padding of the vocabulary."""

    def load(self, read: Callable[[State], State], wanted: Callable[[str], bool] = lambda name: True) -> None:
        """Replace the arrays whose names are `wanted` by those that `read` makes for their shapes, types and layouts.

        The old arrays are freed first, so that the devices never hold two copies.
        """

    def finite(self) -> bool:
        """True if weights and optimizer state are finite numbers, as far as this process sees; waits for them."""

    def memory(self) -> dict[int, dict[str, Any]]:
        """Bytes of one device: planned by formula, counted, and of the compiled step once it has run.

        By rank of the pipe, of the ranks here (0 without a pipeline); see `memory.report.report`.
        """

    def compiled_step(self, batch: Any) -> jax.stages.Compiled | None:
        """The compiled program of a step on such a batch; None of a pipeline, whose step is many programs."""

    def saving(self) -> AbstractContextManager[Callable[[str], None]]:
        """Return a context for long work between steps, which keeps peers from taking this process for stuck."""

    def explain(self, sequences: int) -> list[str]:
        """Lines for people on how a step of so many sequences runs."""

    def write_timeline(self, directory: Path) -> list[Path]:
        """Write the measurements of the last steps; return the pictures, none without a pipeline."""

    def close(self) -> None:
        """End background threads and channels; results of the last step stay readable."""
