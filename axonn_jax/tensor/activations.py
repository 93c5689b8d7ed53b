"""Activation functions of feed-forward layers."""

import jax
import jax.numpy as jnp

from axonn_jax.options import Mlp


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
