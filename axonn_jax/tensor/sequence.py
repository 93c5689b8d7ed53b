"""Sequence parallelism: between matmuls the residual stream is split over `y` too, along its sequence dim.

Norms, dropout and the sums of the stream then run once, and not once on each of the devices along `y`. What a matmul
reads is gathered, what it gives is reduce-scattered: together the bytes of the all-reduces that they replace.
Source: Korthikanti et al. (arXiv 2205.05198), section on sequence parallelism.
"""

import jax
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from axonn_jax.grid import BATCH_AXES
from axonn_jax.tensor.collectives import axis_index, axis_size

SEQUENCE_AXIS = "y"
_SEQUENCE_DIM = 1  # of [batch, seq, features]


def token_axes(model: object) -> tuple[str, ...]:
    """Mesh axes that split the tokens of what a model hands from layer to layer.

    The gradient of a parameter that is not split over them is on each device a partial sum.
    """
    split = bool(getattr(model, "sequence_parallel", False))
    return (*BATCH_AXES, SEQUENCE_AXIS) if split else BATCH_AXES


def gather_sequence(x: jax.Array) -> jax.Array:
    """All-gathers a stream [batch, seq/Gy, features] along its sequence dim over `y`.

    The transpose reduce-scatters. Bytes a device on a ring, either way: `(G-1)/G * size of the result * itemsize`.
    """
    if axis_size(SEQUENCE_AXIS) == 1:
        return x
    whole = lax.all_gather(x, SEQUENCE_AXIS, axis=_SEQUENCE_DIM, tiled=True)
    return checkpoint_name(whole, f"{SEQUENCE_AXIS}_all_gather")


def scatter_sequence(partial: jax.Array) -> jax.Array:
    """Reduce-scatters partial sums [batch, seq, features] over `y` along the sequence dim; bytes as for the gather."""
    if axis_size(SEQUENCE_AXIS) == 1:
        return partial
    part = lax.psum_scatter(partial, SEQUENCE_AXIS, scatter_dimension=_SEQUENCE_DIM, tiled=True)
    return checkpoint_name(part, f"{SEQUENCE_AXIS}_reduce_scatter")


def own_sequence(whole: jax.Array, dim: int) -> jax.Array:
    """This device's part of a sequence dim that every device along `y` has whole; no collectives."""
    size = whole.shape[dim] // axis_size(SEQUENCE_AXIS)
    return lax.dynamic_slice_in_dim(whole, axis_index(SEQUENCE_AXIS) * size, size, dim)
