"""LayerNorm and RMSNorm over features that are sharded."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P

from axonn_jax.tensor.collectives import axis_size, reduce_sum
from axonn_jax.tensor.params import constant_param

FEATURE_AXIS = "x"


class LayerNorm(nnx.Module):
    """Normalises to zero mean and unit variance over features split over `x`, then scales and shifts."""

    def __init__(self, features: int, *, eps: float):
        self.eps = eps
        self.scale = constant_param((features,), 1.0, P(FEATURE_AXIS))
        self.shift = constant_param((features,), 0.0, P(FEATURE_AXIS))

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., features/Gx] -> same; computed in float32, returned in `x`'s dtype.

        Collective: one all-reduce over `x` of three numbers a row (and one in the backward). Each shard's mean and
        centred sum of squares are combined (Chan et al. 1979), which on one shard is the two-pass variance.
        """
        h = x.astype(jnp.float32)
        stats = _moments(h) / axis_size(FEATURE_AXIS)
        mean, centred, mean_squared = jnp.split(reduce_sum(stats, FEATURE_AXIS), 3, -1)
        variance = centred + (mean_squared - jnp.square(mean))
        scale, shift = self.scale.get_value(), self.shift.get_value()
        return _normalise(h, mean, lax.rsqrt(variance + self.eps), scale, shift).astype(x.dtype)


# Kept for the backward pass are the input and numbers a row; the rest is computed again from them.
@jax.checkpoint
def _moments(h: jax.Array) -> jax.Array:
    mean = jnp.mean(h, -1, keepdims=True)
    centred = jnp.mean(jnp.square(h - mean), -1, keepdims=True)
    return jnp.concatenate([mean, centred, jnp.square(mean)], -1)


@jax.checkpoint
def _normalise(h: jax.Array, mean: jax.Array, factor: jax.Array, scale: jax.Array, shift: jax.Array) -> jax.Array:
    return (h - mean) * factor * scale + shift


class RMSNorm(nnx.Module):
    """Divides by the root mean square over features split over `x`, then scales."""

    def __init__(self, features: int, *, eps: float):
        self.eps = eps
        self.scale = constant_param((features,), 1.0, P(FEATURE_AXIS))

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., features/Gx] -> same; float32 inside; one all-reduce over `x` of one number a row each way."""
        h = x.astype(jnp.float32)
        local = jnp.mean(jnp.square(h), -1, keepdims=True) / axis_size(FEATURE_AXIS)
        h = h * lax.rsqrt(reduce_sum(local, FEATURE_AXIS) + self.eps)
        return (h * self.scale.get_value()).astype(x.dtype)
