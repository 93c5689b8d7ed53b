"""Elementwise operations: activation functions, and dropout with masks independent of the grid and of microbatches."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
from jax import lax

from axonn_jax.core.grid import BATCH_AXES
from axonn_jax.core.options import Mlp
from axonn_jax.core.tensor.collectives import SEQUENCE_AXIS, axis_index, axis_size


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DropoutKey:
    """Random key for the dropout masks of a subset of a device's sequences and of a model's layers."""

    key: jax.Array
    first_layer: jax.Array | None = None
    """Offset added to layer numbers, for layers that run in place of earlier ones."""
    microbatch: jax.Array | int = 0
    """Index of the microbatch within the global batch."""
    part: int = field(default=0, metadata={"static": True})
    """Index of the part among the equal parts of this device's sequences."""
    parts: int = field(default=1, metadata={"static": True})
    """Number of equal parts of this device's sequences."""

    def fold_in(self, number: jax.Array | int) -> "DropoutKey":
        """Return the key for one of several uses, by number."""
        return replace(self, key=jax.random.fold_in(self.key, number))

    def of_layer(self, layer: jax.Array | int) -> "DropoutKey":
        """Return the key of a layer, by its number."""
        number = layer if self.first_layer is None else layer + self.first_layer
        return replace(self.fold_in(number), first_layer=None)

    def split(self, parts: int) -> list["DropoutKey"]:
        """Return keys for equal parts of the sequences, whose masks concatenate to those of this key."""
        return [replace(self, part=part, parts=parts) for part in range(parts)]

    def of_rows(self, sequences: int) -> jax.Array:
        """Return a key for each of this device's sequences; no collectives."""
        # Derived from the sequence's index in the global batch, so that the grid does not change the masks.
        shards, shard = _place(BATCH_AXES)
        microbatch = jnp.asarray(self.microbatch, jnp.int32) * shards + shard
        numbers = (microbatch * self.parts + self.part) * sequences + jnp.arange(sequences, dtype=jnp.int32)
        return jax.vmap(lambda number: jax.random.fold_in(self.key, number))(numbers)


def _place(axes: Sequence[str]) -> tuple[int, jax.Array]:
    """Return the number of shards over some axes, and the index of this device's shard."""
    shards, shard = 1, jnp.int32(0)
    for axis in axes:
        shards, shard = shards * axis_size(axis), shard * axis_size(axis) + axis_index(axis)
    return shards, shard


def dropout(
    x: jax.Array, rate: float, key: DropoutKey, *, axes: Sequence[str] = ("x",), sequence_split: bool = False
) -> jax.Array:
    """Zero entries with probability `rate` and scale the remaining ones by 1 / (1 - rate); no collectives.

    Every grid and every number of microbatches drop the same entries.

    Args:
        x: [batch, seq, features/G], or with `sequence_split` [batch, seq/Gy, features/G].
        rate: Probability of an entry to be dropped.
        key: Key of the sequences in `x`.
        axes: Axes that split features.
        sequence_split: True if the sequence is split over `y`.
    """
    # Each sequence's full mask is drawn from its index in the global batch, then this device's part sliced out. XLA
    # fuses the slice with the generator, except on CPUs.
    sequences, seq, features = x.shape
    lengths, first_token = (axis_size(SEQUENCE_AXIS), axis_index(SEQUENCE_AXIS) * seq) if sequence_split else (1, 0)
    shards, shard = _place(axes)
    sizes = (lengths * seq, shards * features)

    def drawn(row_key: jax.Array) -> jax.Array:
        return jax.random.bernoulli(row_key, 1.0 - rate, sizes)

    masks = jax.vmap(drawn)(key.of_rows(sequences))
    keep = lax.dynamic_slice(masks, (0, first_token, shard * features), x.shape)
    return jnp.where(keep, x / (1.0 - rate), jnp.zeros((), x.dtype))


def activated(kind: Mlp, gate: jax.Array | None, up: jax.Array) -> jax.Array:
    """Apply a feed-forward layer's activation function; the result is the input of its last matmul.

    Args:
        kind: Kind of the feed-forward layer.
        gate: Output of the gate projection; None for a kind without a gate (`options.mlp_inputs`).
        up: Output of the up projection, with the same shape.
    """
    if gate is None:
        return jnp.square(jax.nn.relu(up)) if kind == "relu2" else jax.nn.gelu(up, approximate=True)
    return (jax.nn.silu(gate) if kind == "swiglu" else jax.nn.gelu(gate, approximate=True)) * up


def capped(x: jax.Array, cap: float) -> jax.Array:
    """Return cap * tanh(x / cap) in float32 (the soft cap of Gemma 2), or `x` itself if the cap is 0."""
    return cap * jnp.tanh(x.astype(jnp.float32) / cap) if cap else x
