"""Dropout whose mask depends neither on the grid nor on how a batch is cut."""

from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
from jax import lax

from axonn_jax.grid import BATCH_AXES
from axonn_jax.tensor.collectives import SEQUENCE_AXIS, axis_index, axis_size


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DropoutKey:
    """A random key, and whose mask it draws: that of some of a device's sequences, in some of a model's layers."""

    key: jax.Array
    first_layer: jax.Array | None = None
    """What is added to numbers of layers, where layers run in the place of others that are so far ahead of them."""
    part: int = field(default=0, metadata={"static": True})
    """Which of the equal parts of this device's sequences is dropped from."""
    parts: int = field(default=1, metadata={"static": True})
    """Number of these parts."""

    def fold_in(self, number: jax.Array | int) -> "DropoutKey":
        """Returns the key of one of several uses."""
        return replace(self, key=jax.random.fold_in(self.key, number))

    def of_layer(self, layer: jax.Array | int) -> "DropoutKey":
        """Returns a layer's key."""
        number = layer if self.first_layer is None else layer + self.first_layer
        return replace(self.fold_in(number), first_layer=None)

    def split(self, parts: int) -> list["DropoutKey"]:
        """Returns the keys of equal parts of the sequences, whose masks together are this one's."""
        return [replace(self, part=part, parts=parts) for part in range(parts)]


def dropout(x: jax.Array, rate: float, key: DropoutKey, *, sequence_split: bool = False) -> jax.Array:
    """Zeroes entries of [batch, seq, features/Gx] with probability `rate` and scales the rest; no collectives.

    The mask is drawn for the global activation and this device's part sliced out of it, so every grid drops the
    same entries. XLA fuses slice and generator: only the local part is ever computed. With `sequence_split`, `x` is
    [batch, seq/Gy, features/Gx].
    """
    sequences, seq, features = x.shape
    batch_shards, shard = 1, jnp.int32(0)
    for axis in BATCH_AXES:
        batch_shards, shard = batch_shards * axis_size(axis), shard * axis_size(axis) + axis_index(axis)
    shards = axis_size("x")
    first_sequence = (shard * key.parts + key.part) * sequences
    first_feature = axis_index("x") * features
    lengths, first_token = (axis_size(SEQUENCE_AXIS), axis_index(SEQUENCE_AXIS) * seq) if sequence_split else (1, 0)
    global_shape = (batch_shards * key.parts * sequences, lengths * seq, shards * features)
    keep = jax.random.bernoulli(key.key, 1.0 - rate, global_shape)
    keep = lax.dynamic_slice(keep, (first_sequence, first_token, first_feature), x.shape)
    return jnp.where(keep, x / (1.0 - rate), jnp.zeros((), x.dtype))
