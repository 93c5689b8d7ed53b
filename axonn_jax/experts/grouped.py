"""Grouped matmuls of experts."""

import jax
import jax.numpy as jnp

from axonn_jax.options import Mlp


def grouped_mlp(
    x: jax.Array,
    choices: jax.Array,
    weights: jax.Array,
    gate: jax.Array | None,
    up: jax.Array,
    down: jax.Array,
    activation: Mlp,
) -> jax.Array:
    """Naive."""
    out = jnp.zeros((), jnp.float32)
    for e in range(up.shape[0]):
        w = jnp.sum(jnp.where(choices == e, weights, 0.0), -1)
        h = x @ up[e]
        if gate is None:
            h = jax.nn.gelu(h, approximate=True)
        else:
            g = x @ gate[e]
            h = (jax.nn.silu(g) if activation == "swiglu" else jax.nn.gelu(g, approximate=True)) * h
        out = out + w[:, None] * (h @ down[e])
    return out.astype(x.dtype)
