"""Cross-entropy over a sharded vocabulary: the logits are never gathered."""

import jax
import jax.numpy as jnp
from jax import lax

from axonn_jax.tensor.collectives import reduce_max, reduce_sum, shard_offset

VOCAB_AXIS = "y"


def cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Negative log-likelihood in nats of each target, from logits split over `y`.

    Shapes: `logits` [..., vocab/Gy], `targets` [...] of global ids -> [...] float32. Collectives over `y`: an
    all-reduce (max) of one number a token and one (sum) of two numbers a token.
    Source: Megatron-LM's vocabulary-parallel loss.
    """
    logits = logits.astype(jnp.float32)
    top = reduce_max(lax.stop_gradient(jnp.max(logits, -1)), VOCAB_AXIS)
    total = _sum_exp(logits, top)
    local = targets - shard_offset(VOCAB_AXIS, logits.shape[-1])
    held = (local >= 0) & (local < logits.shape[-1])
    picked = jnp.take_along_axis(logits, jnp.where(held, local, 0)[..., None], -1, mode="clip")[..., 0]
    sums = reduce_sum(jnp.stack([total, jnp.where(held, picked - top, 0.0)]), VOCAB_AXIS)
    return jnp.log(sums[0]) - sums[1]


@jax.checkpoint
def _sum_exp(logits: jax.Array, top: jax.Array) -> jax.Array:
    """Kept for the backward pass are the logits alone, not their exponentials."""
    return jnp.sum(jnp.exp(logits - top[..., None]), -1)
