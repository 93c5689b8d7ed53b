"""Dropout whose mask does not depend on the grid."""

import jax
import jax.numpy as jnp
from jax import lax

from axonn_jax.grid import BATCH_AXES
from axonn_jax.tensor.collectives import axis_index, axis_size
from axonn_jax.tensor.sequence import SEQUENCE_AXIS

Part = tuple[int, int]
"""(i, n): the i-th of n equal parts of this device's rows."""
WHOLE: Part = (0, 1)


def dropout(
    x: jax.Array, rate: float, key: jax.Array, part: Part = WHOLE, *, sequence_parallel: bool = False
) -> jax.Array:
    """Zeroes entries of [batch, seq, features/Gx] with probability `rate` and scales the rest; no collectives.

    The mask is drawn for the global activation and this device's part sliced out of it, so every grid drops the
    same entries. XLA fuses slice and generator: only the local part is ever computed. `x` may be a `part` of this
    device's rows. With `sequence_parallel` it is [batch, seq/Gy, features/Gx].
    """
    rows, seq, features = x.shape
    number, parts = part
    data, z, shards = (axis_size(axis) for axis in (*BATCH_AXES, "x"))
    first_row = ((axis_index("data") * z + axis_index("z")) * parts + number) * rows
    first_feature = axis_index("x") * features
    lengths, first_token = (axis_size(SEQUENCE_AXIS), axis_index(SEQUENCE_AXIS) * seq) if sequence_parallel else (1, 0)
    keep = jax.random.bernoulli(key, 1.0 - rate, (data * z * parts * rows, lengths * seq, shards * features))
    keep = lax.dynamic_slice(keep, (first_row, first_token, first_feature), x.shape)
    return jnp.where(keep, x / (1.0 - rate), jnp.zeros((), x.dtype))
