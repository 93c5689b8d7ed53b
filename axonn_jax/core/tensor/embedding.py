"""Token and position embeddings with sharded tables, and the tied projection onto the vocabulary."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P

from axonn_jax.core import compat
from axonn_jax.core.backend.workarounds import over_rows
from axonn_jax.core.tensor.collectives import (
    all_reduce,
    axis_size,
    gather_sequence,
    local_sequence,
    mark_varying,
    scatter_sequence,
    shard_offset,
)
from axonn_jax.core.tensor.linear import matmul
from axonn_jax.core.tensor.params import normal_param
from axonn_jax.core.tensor.weight_gather import gather_weight


def lookup(table: jax.Array, ids: jax.Array, vocab_axis: str, *, scattered: bool = False) -> jax.Array:
    """Look up rows of a table whose vocabulary is split over `vocab_axis`.

    Collective: an all-reduce of the result over `vocab_axis`, to which each shard contributes its rows; if `scattered`
    a reduce-scatter instead. Ids outside the vocabulary give zeros, or without a split the nearest row.

    Args:
        table: [vocab/G, f].
        ids: Global ids [...].
        vocab_axis: Axis that splits the vocabulary.
        scattered: True to split the result's sequence over `vocab_axis`, which must be `y`.

    Returns:
        [..., f].
    """
    if axis_size(vocab_axis) == 1:
        return _rows(table, ids)
    local = ids - shard_offset(vocab_axis, table.shape[0])
    is_local = (local >= 0) & (local < table.shape[0])
    rows = _rows(table, jnp.where(is_local, local, 0))
    rows = jnp.where(is_local[..., None], rows, jnp.zeros((), table.dtype))
    return scatter_sequence(rows) if scattered else all_reduce(rows, vocab_axis)


def _rows(table: jax.Array, ids: jax.Array) -> jax.Array:
    """Look up rows of a local table; a row's gradient is summed over all its tokens in float32."""
    if table.dtype == jnp.float32:
        return jnp.take(table, ids, axis=0, mode="clip")
    return _wide_sums(mark_varying(table, compat.varying_axes(ids)), ids)


@jax.custom_vjp
def _wide_sums(table: jax.Array, ids: jax.Array) -> jax.Array:
    return jnp.take(table, ids, axis=0, mode="clip")


def _backward(residuals: tuple[jax.Array, jax.Array], dy: jax.Array) -> tuple[jax.Array, None]:
    table, ids = residuals
    zeros = mark_varying(jnp.zeros(table.shape, jnp.float32), compat.varying_axes(dy))
    return zeros.at[ids].add(dy.astype(jnp.float32), mode="clip").astype(table.dtype), None


_wide_sums.defvjp(lambda table, ids: (_wide_sums(table, ids), (table, ids)), _backward)


def tied_logits(
    table: jax.Array, h: jax.Array, vocab_axis: str, feature_axis: str, *, transpose_limit: int = 0
) -> jax.Array:
    """Return the logits of `h` against every row of a table: [vocab/Gv, f/Gf], [..., f/Gf] -> [..., vocab/Gv].

    `transpose_limit` is as for `matmul`. Collectives: an all-reduce over `feature_axis`; backward an all-reduce of dX
    over `vocab_axis`.
    """
    h = mark_varying(h, (vocab_axis,))
    return all_reduce(
        over_rows(lambda rows: matmul(rows, table, turned=True, transpose_limit=transpose_limit), h), feature_axis
    )


class Embedding(nnx.Module):
    """Token embedding with a table [vocab, hidden], its vocabulary split over `y` and `z`, its features over `x`.

    With `sequence_split` the stream's sequence is split over `y`. If the vocabulary does not divide, the table is
    padded to `rows` rows with zeros.
    """

    def __init__(
        self,
        vocab: int,
        hidden: int,
        *,
        std: float,
        key: jax.Array,
        sequence_split: bool = False,
        rows: int | None = None,
    ):
        self.sequence_split = sequence_split
        self.transpose_limit = 0
        """Maximum number of tokens for which logits are a transposed product (`inference.cpu_kernels`)."""
        self.table = normal_param(
            key, (vocab, hidden), std, P(("y", "z"), "x"), padded=(vocab if rows is None else rows, hidden)
        )

    def __call__(self, ids: jax.Array, dtype: jnp.dtype) -> jax.Array:
        """Look up global token ids [...] -> [..., hidden/Gx] in `dtype`.

        Collectives: all-gather of the table over `z`, all-reduce of the result over `y`; backward a reduce-scatter of
        the table's gradient over `z`. A split stream is reduce-scattered over `y` instead, and its gradient gathered.
        """
        return lookup(gather_weight(self.table.get_value(), dtype), ids, "y", scattered=self.sequence_split)

    def attend(self, h: jax.Array) -> jax.Array:
        """Return the logits of every token against the (tied) table, [..., hidden/Gx] -> [..., vocab/Gy].

        Collectives: all-gather of the table over `z`, all-reduce of the logits over `x`; backward an all-reduce of
        dX over `y` and a reduce-scatter over `z`. A split stream is gathered over `y` and its dX reduce-scattered.
        """
        h = gather_sequence(h) if self.sequence_split else h
        return tied_logits(
            gather_weight(self.table.get_value(), h.dtype), h, "y", "x", transpose_limit=self.transpose_limit
        )


class PositionEmbedding(nnx.Module):
    """Learned position embedding, a table [seq_len, hidden] with positions split over `z` and features over `x`.

    With `sequence_split` each device returns its part of the positions along `y`.
    """

    def __init__(self, seq_len: int, hidden: int, *, std: float, key: jax.Array, sequence_split: bool = False):
        self.sequence_split = sequence_split
        self.table = normal_param(key, (seq_len, hidden), std, P("z", "x"))

    def __call__(self, length: int, dtype: jnp.dtype, positions: jax.Array | None = None) -> jax.Array:
        """Return the first `length` positions, [length, hidden/Gx], or those at `positions` [batch, length].

        Collective: an all-gather of the table over `z`.
        """
        table = gather_weight(self.table.get_value(), dtype)
        if positions is not None:
            return _rows(table, local_sequence(positions, 1) if self.sequence_split else positions)
        table = table[:length]
        return local_sequence(table, 0) if self.sequence_split else table
