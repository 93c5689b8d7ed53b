"""LayerNorm and RMSNorm over features that are sharded."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P

from axonn_jax.tensor.collectives import FEATURE_AXIS, all_reduce, axis_size
from axonn_jax.tensor.params import constant_param


def layer_norm(
    x: jax.Array, scale: jax.Array | None, shift: jax.Array | None, eps: float, axis: str = FEATURE_AXIS
) -> jax.Array:
    """Normalises [..., features/G] over features split over `axis`; float32 inside, returned in `x`'s dtype.

    Collective: one all-reduce over `axis` of three float32 a row (and one in the backward). Each shard's mean and
    centred sum of squares are combined (Chan et al. 1979), which on one shard is the two-pass variance.
    """
    h = x.astype(jnp.float32)
    stats = _moments(h) / axis_size(axis)
    mean, centred, mean_squared = jnp.split(all_reduce(stats, axis), 3, -1)
    variance = centred + (mean_squared - jnp.square(mean))
    return _normalise(h, mean, lax.rsqrt(variance + eps), scale, shift).astype(x.dtype)


def rms_norm(x: jax.Array, scale: jax.Array | None, eps: float, axis: str = FEATURE_AXIS) -> jax.Array:
    """Divides [..., features/G] by the root mean square over features split over `axis`; float32 inside.

    Collective: one all-reduce over `axis` of one float32 a row each way.
    """
    h = x.astype(jnp.float32)
    local = jnp.mean(jnp.square(h), -1, keepdims=True) / axis_size(axis)
    h = h * lax.rsqrt(all_reduce(local, axis) + eps)
    return (h if scale is None else h * scale.astype(h.dtype)).astype(x.dtype)


class LayerNorm(nnx.Module):
    """Normalises to zero mean and unit variance over features split over `x`, then scales and shifts."""

    def __init__(self, features: int, *, eps: float):
        self.eps = eps
        self.scale = constant_param((features,), 1.0, P(FEATURE_AXIS))
        self.shift = constant_param((features,), 0.0, P(FEATURE_AXIS))

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., features/Gx] -> same; collectives as in `layer_norm`."""
        return layer_norm(x, self.scale.get_value(), self.shift.get_value(), self.eps)


# Kept for the backward pass are the input and numbers a row; the rest is computed again from them.
@jax.checkpoint
def _moments(h: jax.Array) -> jax.Array:
    mean = jnp.mean(h, -1, keepdims=True)
    centred = jnp.mean(jnp.square(h - mean), -1, keepdims=True)
    return jnp.concatenate([mean, centred, jnp.square(mean)], -1)


@jax.checkpoint
def _normalise(
    h: jax.Array, mean: jax.Array, factor: jax.Array, scale: jax.Array | None, shift: jax.Array | None
) -> jax.Array:
    h = (h - mean) * factor
    h = h if scale is None else h * scale.astype(h.dtype)
    return h if shift is None else h + shift.astype(h.dtype)


class RMSNorm(nnx.Module):
    """Divides by the root mean square over features split over `x`, then scales."""

    def __init__(self, features: int, *, eps: float):
        self.eps = eps
        self.scale = constant_param((features,), 1.0, P(FEATURE_AXIS))

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., features/Gx] -> same; collectives as in `rms_norm`."""
        return rms_norm(x, self.scale.get_value(), self.eps)
