"""Elementwise operations: activation functions, and dropout whose mask depends on neither grid nor microbatches."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
from jax import lax

from axonn_jax.grid import BATCH_AXES
from axonn_jax.options import Mlp
from axonn_jax.tensor.collectives import SEQUENCE_AXIS, axis_index, axis_size


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DropoutKey:
    """Random key for the dropout masks of some of a device's sequences, in some of a model's layers."""

    key: jax.Array
    first_layer: jax.Array | None = None
    """Number added to layer numbers, for layers that run in the place of earlier ones."""
    microbatch: jax.Array | int = 0
    """Number of the microbatch among the equal parts of the global batch's sequences."""
    part: int = field(default=0, metadata={"static": True})
    """Number of the part among the equal parts of this device's sequences."""
    parts: int = field(default=1, metadata={"static": True})
    """Number of equal parts of this device's sequences."""

    def fold_in(self, number: jax.Array | int) -> "DropoutKey":
        """Return the key of one of several uses."""
        return replace(self, key=jax.random.fold_in(self.key, number))

    def of_layer(self, layer: jax.Array | int) -> "DropoutKey":
        """Return a layer's key."""
        number = layer if self.first_layer is None else layer + self.first_layer
        return replace(self.fold_in(number), first_layer=None)

    def split(self, parts: int) -> list["DropoutKey"]:
        """Return the keys of equal parts of the sequences, whose masks together are this one's."""
        return [replace(self, part=part, parts=parts) for part in range(parts)]

    def of_rows(self, sequences: int) -> jax.Array:
        """Return a key for each of this device's sequences, from its number in the global batch; no collectives."""
        shards, shard = _place(BATCH_AXES)
        microbatch = jnp.asarray(self.microbatch, jnp.int32) * shards + shard
        numbers = (microbatch * self.parts + self.part) * sequences + jnp.arange(sequences, dtype=jnp.int32)
        return jax.vmap(lambda number: jax.random.fold_in(self.key, number))(numbers)


def _place(axes: Sequence[str]) -> tuple[int, jax.Array]:
    """Return the number of shards over some axes, and this device's shard."""
    shards, shard = 1, jnp.int32(0)
    for axis in axes:
        shards, shard = shards * axis_size(axis), shard * axis_size(axis) + axis_index(axis)
    return shards, shard


def dropout(
    x: jax.Array, rate: float, key: DropoutKey, *, axes: Sequence[str] = ("x",), sequence_split: bool = False
) -> jax.Array:
    """Zero entries of [batch, seq, features/G] with probability `rate` and scale the rest; no collectives.

    A sequence's mask is drawn from its number in the global batch, whole, and this device's part sliced out of it. So
    every grid and every number of microbatches drop the same entries. XLA fuses slice and generator, but on CPUs. With
    `sequence_split`, `x` is [batch, seq/Gy, features/G]. `axes` are those that split features.
    """
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
    """Return the input of a feed-forward layer's last matmul.

    Args:
        kind: Kind of the feed-forward layer.
        gate: Result of the gate's matmul; None for a kind without a gate (`options.mlp_inputs`).
        up: Result of the other matmul from the stream, of the same shape.
    """
    if gate is None:
        return jnp.square(jax.nn.relu(up)) if kind == "relu2" else jax.nn.gelu(up, approximate=True)
    return (jax.nn.silu(gate) if kind == "swiglu" else jax.nn.gelu(gate, approximate=True)) * up


def capped(x: jax.Array, cap: float) -> jax.Array:
    """Return cap * tanh(x / cap) in float32, between -cap and cap, as of Gemma 2; `x` itself if the cap is 0."""
    return cap * jnp.tanh(x.astype(jnp.float32) / cap) if cap else x
