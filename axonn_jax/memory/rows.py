"""Parts of a device's parameters as one row of numbers, and back: what a bucket's programs read and write."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from axonn_jax.memory.flat import Bucket, Span


def cut(local: jax.Array, span: Span) -> jax.Array:
    """A span of a local array, with as many dims: optimizers may tell matrices from vectors by them."""
    return local.reshape(-1)[span.start : span.stop].reshape((1,) * (local.ndim - 1) + (-1,) * bool(local.ndim))


def cut_row(row: jax.Array, span: Span, dims: int) -> jax.Array:
    """A span of a bucket's row, with so many dims."""
    return row[span.at : span.at + span.size].reshape((1,) * (dims - 1) + (-1,) * bool(dims))


def row(bucket: Bucket, pieces: Mapping[str, jax.Array]) -> jax.Array:
    """A bucket's row of numbers, from the spans of its parameters."""
    return jnp.concatenate([pieces[name].reshape(-1) for name in bucket.names])
