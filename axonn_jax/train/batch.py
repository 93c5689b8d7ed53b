"""Rows of a global batch: which a process needs, how they become one sharded array, and an evaluation's batches."""

import jax
import numpy as np
from jax.sharding import NamedSharding

from axonn_jax.data.loader import Loader
from axonn_jax.errors import UserError
from axonn_jax.tensor.counted import without_targets


def local_rows(sharding: NamedSharding, global_batch: int, microbatches: int) -> list[int]:
    """Global row numbers that this process's devices hold, in ascending order.

    Row `m * (global_batch / microbatches) + r` is sequence `r` of microbatch `m`.
    """
    per_microbatch = global_batch // microbatches
    index_map = sharding.addressable_devices_indices_map((microbatches, per_microbatch, 1))
    held: set[int] = set()
    for index in index_map.values():
        assert index is not None  # None stands for devices of other processes
        held.update(range(*index[1].indices(per_microbatch)))
    return [m * per_microbatch + r for m in range(microbatches) for r in sorted(held)]


def place(
    batch: np.ndarray, rows: list[int], global_batch: int, microbatches: int, sharding: NamedSharding
) -> jax.Array:
    """Makes [microbatches, global_batch / microbatches, seq + 1] on the mesh from this process's rows of it.

    Raises ``UserError`` where the number of rows is not the number this process holds.
    """
    if batch.ndim != 2 or batch.shape[0] != len(rows):
        raise UserError("batch", batch.shape, f"[{len(rows)}, seq_len + 1] token ids: this process's rows")
    per_microbatch, width = global_batch // microbatches, batch.shape[1]
    where = {row: position for position, row in enumerate(rows)}

    def shard(index: tuple[slice, ...] | None) -> np.ndarray:
        assert index is not None
        sequences = range(*index[1].indices(per_microbatch))
        chosen = [[where[m * per_microbatch + r] for r in sequences] for m in range(microbatches)]
        return batch[np.asarray(chosen)].astype(np.int32)

    return jax.make_array_from_callback((microbatches, per_microbatch, width), sharding, shard)


def held_out(loader: Loader, most: int, global_batch: int) -> tuple[list[np.ndarray], int]:
    """The evaluation's batches, the first of the held-out split and at most so many, and their samples.

    Each sample is there once; behind the last of the split a batch is filled up. They are read once, and `loader`
    closed.
    """
    batches = [next(loader) for _ in range(min(most, -(-loader.num_samples // global_batch)))]
    loader.close()
    for number, batch in enumerate(batches):
        behind = np.array(loader.samples(number), dtype=int) >= loader.num_samples
        batches[number] = without_targets(batch, behind)
    return batches, min(most * global_batch, loader.num_samples)
