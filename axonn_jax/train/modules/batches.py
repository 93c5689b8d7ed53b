"""Global batches of any pytree of arrays with rows in front."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jax.tree_util import keystr, tree_flatten_with_path, tree_map_with_path

from axonn_jax.backend.traits import convolves_slowly_in_loops
from axonn_jax.errors import UserError
from axonn_jax.grid import Grid
from axonn_jax.tensor.parallelize.convolution import convolves
from axonn_jax.tensor.params import copied
from axonn_jax.tensor.specs import Replicated, is_replicated
from axonn_jax.train.engines.engine import Batches
from axonn_jax.train.modules.apart import ROW_AXES


class TreeBatches(Batches):
    """Global batches: trees whose arrays have the same rows in front, but for those marked by `replicated`.

    A replica's part of a microbatch lies over `z` where its rows divide, else each device of `z` has all of it.
    """

    def __init__(self, grid: Grid, microbatches: int):
        super().__init__(grid, microbatches)
        self.replicas = grid.shape.data
        apart = grid.mesh.local_mesh.shape["z"] < grid.shape.z
        self._parts = grid.shape.z if apart else 1
        """Devices of `z`, where a process has some of them only: rows then divide, as it has others than its peers."""

    @property
    def least(self) -> int:
        """Rows of the smallest global batch: one a replica and microbatch, or a part of `z` in another process."""
        return self.replicas * self.microbatches * self._parts

    def at_once(self) -> "TreeBatches":
        """Return the form of batches without microbatches."""
        return TreeBatches(self.grid, 1)

    def numbers(self, rows: int) -> tuple[np.ndarray, NamedSharding]:
        """[microbatches, replicas, rows of a replica]."""
        if rows % self.least or rows <= 0:
            z = f" * z = {self._parts} *" if self._parts > 1 else " ="
            accepted = f"a multiple of data * microbatches{z} {self.replicas} * {self.microbatches}"
            raise UserError("global batch", rows, accepted)
        numbers = np.arange(rows).reshape(self.microbatches, self.replicas, -1)
        over = ROW_AXES if numbers.shape[2] % self.grid.shape.z == 0 else None
        return numbers, NamedSharding(self.grid.mesh, P(None, "data", over))

    def read(self, batch: Any, *, counts: bool = False) -> Any:
        """Return a batch as numpy's, or as it is on devices.

        Raises ``UserError`` where its arrays have no rows, or other numbers of them.
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
        """Return the rows of a batch."""
        return next(len(leaf) for leaf in jax.tree.leaves(batch, is_leaf=is_replicated) if not is_replicated(leaf))

    def all_rows(self, batch: Any) -> int:
        """Return the rows of a batch in all processes."""
        return self.rows(batch) // self.share * self.least

    def filled(self, batch: Any, rows: int) -> Any:
        """Return the batch, of any number of rows in a run of one process; raises ``UserError`` for one that does not
        divide over processes."""
        if self.ragged(batch) and jax.process_count() > 1:
            raise UserError("evaluate", f"{self.rows(batch)} rows", f"a multiple of {self.share} rows in this process")
        return batch

    def ragged(self, batch: Any) -> bool:
        """True if the rows of a batch do not divide over replicas and microbatches."""
        return self.rows(batch) % self.share != 0

    def first(self, batch: Any, share: float) -> Any:
        """Return about this share of the rows of every part, the first ones; all where processes divide a part."""
        total = self.all_rows(batch)
        part = total // (self.replicas * self.microbatches)
        kept = max(min(part, self.grid.shape.z), int(part * share))
        if kept >= part or self._parts > 1:
            return batch
        at = [at for at, number in enumerate(self.local(total)) if number % part < kept]
        return jax.tree.map(lambda leaf: leaf if is_replicated(leaf) else leaf[at], batch, is_leaf=is_replicated)

    def shard(self, batch: Any) -> Any:
        """Return arrays [microbatches, replicas, rows, ...] on the mesh; replicated ones as they are."""
        have, share = self.rows(batch), self.share
        if have % share:
            raise UserError("batch", f"{have} rows", f"a multiple of {share} rows in this process")
        rows = self.all_rows(batch)
        numbers, layout = self.numbers(rows)

        def placed(leaf: Any) -> jax.Array:
            if isinstance(leaf, jax.Array):
                return jax.device_put(leaf.reshape(*numbers.shape, *leaf.shape[1:]), layout)
            return self.placed(leaf, rows)

        return self._each(batch, placed)

    def shard_ragged(self, batch: Any) -> Any:
        """Return arrays [1, 1, rows, ...], whole on every device."""
        everywhere = NamedSharding(self.grid.mesh, P())
        return self._each(batch, lambda leaf: copied(leaf[None, None], everywhere))

    def _each(self, batch: Any, place: Callable[[Any], Any]) -> Any:
        everywhere = NamedSharding(self.grid.mesh, P())

        def placed(leaf: Any) -> Any:
            if is_replicated(leaf):
                return Replicated(jax.tree.map(lambda value: copied(value, everywhere), leaf.value))
            return place(leaf)

        return jax.tree.map(placed, batch, is_leaf=is_replicated)


def _without_rows(path: Any, marked: Replicated) -> Replicated:
    """Return arrays without rows as they are on a device or numpy's; raises ``UserError`` for what is none."""

    def array(inner: Any, value: Any) -> Any:
        return value if isinstance(value, jax.Array) else _array((*path, *inner), value, rows=False)

    return Replicated(tree_map_with_path(array, marked.value))


def _array(path: Any, value: Any, *, rows: bool = True) -> Any:
    on_devices = isinstance(value, jax.Array) and jax.process_count() == 1
    try:
        array = value if on_devices else np.asarray(value)
    except Exception as error:  # from objects that turn into arrays, or uneven lists
        raise UserError(f"batch{keystr(path)}", type(value).__name__, "an array with rows in front") from error
    keys = on_devices and jnp.issubdtype(array.dtype, jax.dtypes.prng_key)
    if (rows and array.ndim == 0) or (not keys and array.dtype.kind in "OSUMm"):
        accepted = "an array of numbers with rows in front; ax.replicated(value) for one without rows"
        raise UserError(f"batch{keystr(path)}", f"{array.dtype} of shape {array.shape}", accepted)
    if on_devices:
        return array
    dtype = jax.dtypes.canonicalize_dtype(array.dtype)
    if array.dtype.kind in "iu" and dtype != array.dtype and array.size:
        bounds = np.iinfo(dtype)
        for extreme in (array.min(), array.max()):
            if not bounds.min <= extreme <= bounds.max:
                raise UserError(f"batch{keystr(path)}", extreme, f"numbers that {dtype} holds")
    return array.astype(dtype, copy=False)


def rows_of(batch: Any) -> list[jax.Array]:
    """The arrays of a batch that have rows, in order."""
    return [leaf for leaf in jax.tree.leaves(batch, is_leaf=is_replicated) if not is_replicated(leaf)]


def with_rows(batch: Any, rows: list[jax.Array]) -> Any:
    """The batch as its loss takes it, with other arrays in place of those that have rows."""
    leaves, structure = jax.tree.flatten(batch, is_leaf=is_replicated)
    given = iter(rows)
    return jax.tree.unflatten(structure, [leaf.value if is_replicated(leaf) else next(given) for leaf in leaves])


def each_microbatch(add: Callable[[Any, Any], tuple[Any, Any]], carry: Any, microbatches: Any) -> tuple[Any, Any]:
    """Return `lax.scan`'s results, without a loop for one microbatch, and where convolutions would be slow in it."""
    count = len(jax.tree.leaves(microbatches)[0])

    def part(at: int) -> Any:
        return jax.tree.map(lambda value: value[at], microbatches)

    slow = convolves_slowly_in_loops(jax.default_backend())
    if count > 1 and not (slow and convolves(jax.make_jaxpr(add)(carry, part(0)).jaxpr)):
        return lax.scan(add, carry, microbatches)
    results = []
    for at in range(count):
        carry, result = add(carry, part(at))
        results.append(result)
    return carry, jax.tree.map(lambda *values: jnp.stack(values), *results)
