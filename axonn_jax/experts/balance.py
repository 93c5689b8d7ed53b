"""Balance of experts: the loss that evens out tokens per expert, and the text and targets of rows that it counts."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from axonn_jax.experts.load import counted
from axonn_jax.experts.router import Routing
from axonn_jax.experts.shape import ExpertShape
from axonn_jax.tensor.collectives import SEQUENCE_AXIS, all_reduce, axis_size, local_sequence


class Packing(NamedTuple):
    """Text and targets of a device's rows; every device along `y` has whole rows."""

    text: jax.Array
    """True for tokens of documents of which any token is trained on, [rows, seq]; all else is padding."""
    targets: jax.Array
    """Return the number of counted targets of each row, [rows] float32."""

    def here(self, *, sequence_split: bool) -> jax.Array:
        """`text` of the tokens of this device, [rows, seq/Gy] where the sequence is split; no collectives."""
        return local_sequence(self.text, 1) if sequence_split else self.text


def balance_loss(
    routing: Routing, moe: ExpertShape, sequences: int, packing: Packing | None = None, *, sequence_split: bool
) -> jax.Array:
    """Sum over the targets of local sequences of the sequence's imbalance: a float32 scalar, 1 a target if even.

    A sequence's imbalance is `sum over experts of f P`: f an expert's share of the sequence's choices times the number
    of experts, P the mean of the tokens' shares of scores (DeepSeek-V3, arXiv 2412.19437, eq. 17 to 20; over all tokens
    of a batch this is Switch's, arXiv 2101.03961, eq. 4). The sum depends on no other sequence, so neither on the grid
    nor on microbatches. Padding counts nothing. Collective: where the sequence is split, an all-reduce over `y` of 8
    bytes a sequence and expert.
    """
    counts = counted(routing.choices.reshape(sequences, -1), moe.experts)
    tokens = jnp.float32(routing.choices.shape[0] // sequences * (axis_size(SEQUENCE_AXIS) if sequence_split else 1))
    shares = routing.shares.reshape(sequences, -1, moe.experts)
    targets = tokens
    if packing is not None:
        text = packing.here(sequence_split=sequence_split)
        shares = jnp.where(text[..., None], shares, 0.0)
        tokens = jnp.maximum(jnp.sum(packing.text, axis=1, dtype=jnp.float32), 1.0)[:, None]
        targets = packing.targets[:, None]
    shares = jnp.sum(shares, axis=1)
    if sequence_split:
        counts, shares = all_reduce(jnp.stack([counts, shares]), SEQUENCE_AXIS)
    often = counts * (moe.experts / (moe.per_token * tokens))
    return jnp.sum(often * shares * (targets / tokens))
