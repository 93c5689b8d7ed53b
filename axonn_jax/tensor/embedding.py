"""Token and position embeddings with a sharded table, and the tied projection onto the vocabulary."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P

from axonn_jax.tensor.collectives import axis_size, gather_weight, reduce_sum, shard_offset, vary
from axonn_jax.tensor.params import normal_param


class Embedding(nnx.Module):
    """A table [vocab, hidden]: vocabulary over `y` and once more over `z`, features over `x`."""

    def __init__(self, vocab: int, hidden: int, *, std: float, key: jax.Array):
        self.table = normal_param(key, (vocab, hidden), std, P(("y", "z"), "x"))

    def __call__(self, ids: jax.Array, dtype: jnp.dtype) -> jax.Array:
        """Looks up global token ids [...] -> [..., hidden/Gx] in `dtype`.

        Collectives: all-gather of the table over `z`, all-reduce of the result over `y` (each `y` shard adds the
        rows it holds); backward a reduce-scatter of the table's gradient over `z`.
        """
        table = gather_weight(self.table.get_value(), dtype)
        if axis_size("y") == 1:
            return jnp.take(table, ids, axis=0, mode="clip")
        local = ids - shard_offset("y", table.shape[0])
        held = (local >= 0) & (local < table.shape[0])
        rows = jnp.take(table, jnp.where(held, local, 0), axis=0, mode="clip")
        return reduce_sum(jnp.where(held[..., None], rows, jnp.zeros((), dtype)), "y")

    def attend(self, h: jax.Array) -> jax.Array:
        """Scores of every token, [..., hidden/Gx] -> [..., vocab/Gy], against the (tied) table.

        Collectives: all-gather of the table over `z`, all-reduce of the scores over `x`; backward an all-reduce of
        dX over `y` and a reduce-scatter over `z`.
        """
        table = gather_weight(self.table.get_value(), h.dtype)
        h = vary(h, ("y",))
        rows = h.reshape(-1, h.shape[-1])
        scores = lax.dot_general(rows, table, (((1,), (1,)), ((), ())))
        return reduce_sum(scores.reshape(*h.shape[:-1], table.shape[0]), "x")


class PositionEmbedding(nnx.Module):
    """A learned table [seq_len, hidden]: positions over `z` (gathered for use), features over `x`."""

    def __init__(self, seq_len: int, hidden: int, *, std: float, key: jax.Array):
        self.table = normal_param(key, (seq_len, hidden), std, P("z", "x"))

    def __call__(self, length: int, dtype: jnp.dtype) -> jax.Array:
        """The first `length` positions, [length, hidden/Gx]; collective: all-gather over `z`."""
        return gather_weight(self.table.get_value(), dtype)[:length]
