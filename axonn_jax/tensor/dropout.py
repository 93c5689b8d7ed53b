"""Dropout whose mask does not depend on the grid."""

import jax
import jax.numpy as jnp
from jax import lax

from axonn_jax.grid import BATCH_AXES
from axonn_jax.tensor.collectives import axis_index, axis_size


def dropout(x: jax.Array, rate: float, key: jax.Array) -> jax.Array:
    """Zeroes entries of [batch, seq, features/Gx] with probability `rate` and scales the rest; no collectives.

    The mask is drawn for the global activation and this device's part sliced out of it, so every grid drops the
    same entries. XLA fuses slice and generator: only the local part is ever computed.
    """
    rows, seq, features = x.shape
    data, z, shards = (axis_size(axis) for axis in (*BATCH_AXES, "x"))
    first_row = (axis_index("data") * z + axis_index("z")) * rows
    first_feature = axis_index("x") * features
    keep = jax.random.bernoulli(key, 1.0 - rate, (data * z * rows, seq, shards * features))
    keep = lax.dynamic_slice(keep, (first_row, 0, first_feature), x.shape)
    return jnp.where(keep, x / (1.0 - rate), jnp.zeros((), x.dtype))
