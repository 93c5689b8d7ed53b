"""The residual stream's features, which `x` splits, gathered for a matmul and scattered behind one.

Used where a block's inner features are split over `y` and `x` together (`models.inner`): a row of the stream is then
whole in front of the matmul, and what a matmul gives is a partial sum of a whole row.
"""

import jax
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from axonn_jax.tensor.collectives import axis_size
from axonn_jax.tensor.norm import FEATURE_AXIS


def gather_features(x: jax.Array) -> jax.Array:
    """All-gathers a stream [..., features/Gx] along its features over `x`.

    The transpose reduce-scatters. Bytes a device on a ring, either way: `(G-1)/G * size of the result * itemsize`.
    """
    if axis_size(FEATURE_AXIS) == 1:
        return x
    whole = lax.all_gather(x, FEATURE_AXIS, axis=x.ndim - 1, tiled=True)
    return checkpoint_name(whole, f"{FEATURE_AXIS}_all_gather")


def scatter_features(partial: jax.Array) -> jax.Array:
    """Reduce-scatters partial sums [..., features] over `x` along the features; bytes as for the gather."""
    if axis_size(FEATURE_AXIS) == 1:
        return partial
    part = lax.psum_scatter(partial, FEATURE_AXIS, scatter_dimension=partial.ndim - 1, tiled=True)
    return checkpoint_name(part, f"{FEATURE_AXIS}_reduce_scatter")
