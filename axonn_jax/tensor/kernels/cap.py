"""Soft cap of scores and logits, as in Gemma 2."""

import jax
import jax.numpy as jnp


def capped(x: jax.Array, cap: float) -> jax.Array:
    """Return cap * tanh(x / cap) in float32, which stays between -cap and cap; `x` itself if the cap is 0."""
    return cap * jnp.tanh(x.astype(jnp.float32) / cap) if cap else x
