"""Global batches that are pytrees of arrays with a leading axis of rows."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jax.tree_util import keystr, tree_flatten_with_path, tree_map_with_path

from axonn_jax.any_flax.modules.loss_model import ROW_AXES
from axonn_jax.any_flax.parallelize.convolution import convolves
from axonn_jax.core.backend.traits import convolves_slowly_in_loops
from axonn_jax.core.engines.engine import Batches
from axonn_jax.core.errors import UserError
from axonn_jax.core.grid import Grid
from axonn_jax.core.tensor.params import copied
from axonn_jax.core.tensor.specs import Replicated, is_replicated

Tree = Any
"""Pytree of arrays, as a user's loss takes it; Python has no type for all pytrees."""


class TreeBatches(Batches[Tree, Tree]):
    """Global batches: pytrees whose arrays share a leading axis of rows, except for those marked by `replicated`.

    The rows of a replica's microbatch are sharded over `z` if they divide evenly, and replicated over `z` otherwise.
    """

    def __init__(self, grid: Grid, microbatches: int):
        super().__init__(grid, microbatches)
        self.replicas = grid.shape.data
        z_spans_processes = grid.mesh.local_mesh.shape["z"] < grid.shape.z
        self._part_count = grid.shape.z if z_spans_processes else 1
        """Parts into which rows must divide along `z`: its size if it spans processes, as these hold different rows."""

    @property
    def least(self) -> int:
        """Rows of the smallest global batch: one per replica, microbatch and part of `z`."""
        return self.replicas * self.microbatches * self._part_count

    def at_once(self) -> "TreeBatches":
        """Return the layout of batches without microbatches."""
        return TreeBatches(self.grid, 1)

    def numbers(self, rows: int) -> tuple[np.ndarray, NamedSharding]:
        """Return the row numbers of a batch as [microbatches, replicas, rows of a replica], and their sharding.

        Raises:
            UserError: The rows do not divide evenly.
        """
        if rows % self.least or rows <= 0:
            z = f" * z = {self._part_count} *" if self._part_count > 1 else " ="
            accepted = f"a multiple of data * microbatches{z} {self.replicas} * {self.microbatches}"
            raise UserError("global batch", rows, accepted)
        numbers = np.arange(rows).reshape(self.microbatches, self.replicas, -1)
        over = ROW_AXES if numbers.shape[2] % self.grid.shape.z == 0 else None
        return numbers, NamedSharding(self.grid.mesh, P(None, "data", over))

    def read(self, batch: Any, *, counts: bool = False) -> Any:
        """Convert a batch to numpy arrays; arrays on devices stay there.

        Raises:
            UserError: The arrays have no leading axis of rows, or different numbers of rows.
        """
        leaves, structure = tree_flatten_with_path(batch, is_leaf=is_replicated)
        arrays: list[Any] = [_without_rows(path, v) if is_replicated(v) else _array(path, v) for path, v in leaves]
        rows = {keystr(path): len(a) for (path, _), a in zip(leaves, arrays, strict=True) if not is_replicated(a)}
        if len(set(rows.values())) != 1 or 0 in rows.values():
            shown = ", ".join(f"{path}: {count}" for path, count in rows.items()) or "no array"
            accepted = "a tree of arrays with the same rows in front; ax.replicated(array) for one without rows"
            raise UserError("batch", shown, accepted)
        return jax.tree.unflatten(structure, arrays)

    def rows(self, batch: Any) -> int:
        """Return this process's number of rows of a batch."""
        return next(len(leaf) for leaf in jax.tree.leaves(batch, is_leaf=is_replicated) if not is_replicated(leaf))

    def all_rows(self, batch: Any) -> int:
        """Return the number of rows of a batch in all processes."""
        return self.rows(batch) // self.share * self.least

    def filled(self, batch: Any, rows: int) -> Any:
        """Return the batch unchanged: a single process evaluates any number of rows.

        Raises:
            UserError: The rows do not divide over several processes.
        """
        if self.ragged(batch) and jax.process_count() > 1:
            raise UserError("evaluate", f"{self.rows(batch)} rows", f"a multiple of {self.share} rows in this process")
        return batch

    def ragged(self, batch: Any) -> bool:
        """Return whether the rows of a batch do not divide over replicas and microbatches."""
        return self.rows(batch) % self.share != 0

    def first(self, batch: Any, share: float) -> Any:
        """Return about this share of the rows of every part, its first ones; all rows if a part spans processes."""
        total = self.all_rows(batch)
        part = total // (self.replicas * self.microbatches)
        # Keep a row for every device of `z`, if a part has as many.
        count = max(min(part, self.grid.shape.z), int(part * share))
        if count >= part or self._part_count > 1:
            return batch
        at = [at for at, number in enumerate(self.local(total)) if number % part < count]
        return jax.tree.map(lambda leaf: leaf if is_replicated(leaf) else leaf[at], batch, is_leaf=is_replicated)

    def shard(self, batch: Any) -> Any:
        """Return arrays [microbatches, replicas, rows, ...] on the mesh; replicated arrays keep their shape.

        Raises:
            UserError: This process's rows do not divide evenly.
        """
        have, share = self.rows(batch), self.share
        if have % share:
            raise UserError("batch", f"{have} rows", f"a multiple of {share} rows in this process")
        rows = self.all_rows(batch)
        numbers, layout = self.numbers(rows)

        def to_mesh(leaf: Any) -> jax.Array:
            if isinstance(leaf, jax.Array):
                return jax.device_put(leaf.reshape(*numbers.shape, *leaf.shape[1:]), layout)
            return self.to_mesh(leaf, rows)

        return self._map_rows(batch, to_mesh)

    def shard_ragged(self, batch: Any) -> Any:
        """Return arrays [1, 1, rows, ...], replicated on every device."""
        everywhere = NamedSharding(self.grid.mesh, P())
        return self._map_rows(batch, lambda leaf: copied(leaf[None, None], everywhere))

    def _map_rows(self, batch: Any, place: Callable[[Any], Any]) -> Any:
        everywhere = NamedSharding(self.grid.mesh, P())

        def to_mesh(leaf: Any) -> Any:
            if is_replicated(leaf):
                return Replicated(jax.tree.map(lambda value: copied(value, everywhere), leaf.value))
            return place(leaf)

        return jax.tree.map(to_mesh, batch, is_leaf=is_replicated)


def _without_rows(path: Any, marked: Replicated) -> Replicated:
    """Convert a value marked as replicated to numpy arrays; arrays on devices stay there."""

    def array(inner: Any, value: Any) -> Any:
        return value if isinstance(value, jax.Array) else _array((*path, *inner), value, rows=False)

    return Replicated(tree_map_with_path(array, marked.value))


def _array(path: Any, value: Any, *, rows: bool = True) -> Any:
    on_devices = isinstance(value, jax.Array) and jax.process_count() == 1
    try:
        array = value if on_devices else np.asarray(value)
    except Exception as error:  # uneven lists, or an object whose __array__ raises anything
        raise UserError(f"batch{keystr(path)}", type(value).__name__, "an array with rows in front") from error
    keys = on_devices and jnp.issubdtype(array.dtype, jax.dtypes.prng_key)
    if (rows and array.ndim == 0) or (not keys and array.dtype.kind in "OSUMm"):
        accepted = "an array of numbers with rows in front; ax.replicated(value) for one without rows"
        raise UserError(f"batch{keystr(path)}", f"{array.dtype} of shape {array.shape}", accepted)
    if on_devices:
        return array
    # jax silently wraps 64-bit integers around to 32 bits, which would corrupt token ids or labels.
    dtype = jax.dtypes.canonicalize_dtype(array.dtype)
    if array.dtype.kind in "iu" and dtype != array.dtype and array.size:
        bounds = np.iinfo(dtype)
        for extreme in (array.min(), array.max()):
            if not bounds.min <= extreme <= bounds.max:
                raise UserError(f"batch{keystr(path)}", extreme, f"numbers that {dtype} holds")
    return array.astype(dtype, copy=False)


def rows_of(batch: Any) -> list[jax.Array]:
    """Return the arrays of a batch that have rows, in order."""
    return [leaf for leaf in jax.tree.leaves(batch, is_leaf=is_replicated) if not is_replicated(leaf)]


def with_rows(batch: Any, rows: list[jax.Array]) -> Any:
    """Return the batch as its loss expects it, with other arrays in place of those that have rows."""
    leaves, structure = jax.tree.flatten(batch, is_leaf=is_replicated)
    arrays = iter(rows)
    return jax.tree.unflatten(structure, [leaf.value if is_replicated(leaf) else next(arrays) for leaf in leaves])


def scan_microbatches(add: Callable[[Any, Any], tuple[Any, Any]], carry: Any, microbatches: Any) -> tuple[Any, Any]:
    """Return the results of `lax.scan` over microbatches, unrolled where a loop does not pay.

    Args:
        add: Function of (carry, microbatch) that returns (carry, output).
        carry: Initial carry.
        microbatches: Tree of arrays, [microbatches, ...].
    """
    count = len(jax.tree.leaves(microbatches)[0])

    def part(at: int) -> Any:
        return jax.tree.map(lambda value: value[at], microbatches)

    # XLA's CPU backend runs convolutions in a loop many times slower, so unroll them there.
    slow = convolves_slowly_in_loops(jax.default_backend())
    if count > 1 and not (slow and convolves(jax.make_jaxpr(add)(carry, part(0)).jaxpr)):
        return lax.scan(add, carry, microbatches)
    results = []
    for at in range(count):
        carry, result = add(carry, part(at))
        results.append(result)
    return carry, jax.tree.map(lambda *values: jnp.stack(values), *results)
