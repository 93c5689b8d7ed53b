"""LayerNorm and RMSNorm over sharded features.

The backward pass saves only the input in its own dtype and two float32 numbers per row, and recomputes the normalized
values.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P

from axonn_jax.core import compat
from axonn_jax.core.tensor.collectives import FEATURE_AXIS, all_reduce, axis_size, mark_varying
from axonn_jax.core.tensor.params import constant_param


def layer_norm(
    x: jax.Array, scale: jax.Array | None, shift: jax.Array | None, eps: float, axis: str = FEATURE_AXIS
) -> jax.Array:
    """Normalize [..., features/G] over features split over `axis`; computes in float32, returns `x`'s dtype.

    Collectives: an all-reduce over `axis` of three float32 numbers per row forward and of two backward. The shards'
    means and centred sums of squares are combined (Chan et al. 1979), which on one shard is the two-pass variance.
    """
    return _norm(x, scale, shift, _Norm(eps, axis, centred=True))


def rms_norm(x: jax.Array, scale: jax.Array | None, eps: float, axis: str = FEATURE_AXIS) -> jax.Array:
    """Divide [..., features/G] by the root mean square over features split over `axis` ("" for none), in float32.

    Collectives: an all-reduce over `axis` of one float32 number per row, forward and backward.
    """
    return _norm(x, scale, None, _Norm(eps, axis))


class _Norm(NamedTuple):
    """Static arguments of a norm."""

    eps: float
    axis: str = ""
    """Mesh axis that splits features; "" for none."""
    centred: bool = False
    """True if the mean is subtracted."""


def _norm(x: jax.Array, scale: jax.Array | None, shift: jax.Array | None, norm: _Norm) -> jax.Array:
    params = [None if p is None else p.astype(jnp.float32) for p in (scale, shift)]
    # Inputs are marked varying over the mesh, so their cotangents are too: the scale's gradient stays a partial sum,
    # which the caller reduces.
    axes = frozenset().union(*(compat.varying_axes(a) for a in (x, *params) if a is not None))
    return _normalised(mark_varying(x, axes), *(None if p is None else mark_varying(p, axes) for p in params), norm)


class _Saved(NamedTuple):
    """Residuals for the backward pass: the operands and two float32 numbers per row."""

    x: jax.Array
    scale: jax.Array | None
    shift: jax.Array | None
    mean: jax.Array | None
    """None if it is not subtracted."""
    factor: jax.Array
    """Reciprocal of the standard deviation or of the root mean square."""


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _normalised(x: jax.Array, scale: jax.Array | None, shift: jax.Array | None, norm: _Norm) -> jax.Array:
    return _forward(x, scale, shift, norm)[0]


def _forward(x: jax.Array, scale: jax.Array | None, shift: jax.Array | None, norm: _Norm) -> tuple[jax.Array, _Saved]:
    mean, factor = _statistics(x.astype(jnp.float32), norm)
    y = _unscaled(x, mean, factor)
    y = y if scale is None else y * scale
    y = y if shift is None else y + shift
    # Without the barrier, XLA would keep this pass's float32 rows for the backward pass instead of recomputing them.
    return y.astype(x.dtype), _Saved(x, scale, shift, *lax.optimization_barrier((mean, factor)))


def _backward(norm: _Norm, saved: _Saved, dy: jax.Array) -> tuple[jax.Array | None, ...]:
    dy = dy.astype(jnp.float32)
    unscaled = _unscaled(saved.x, saved.mean, saved.factor)
    rows = tuple(range(dy.ndim - 1))
    d_scale = None if saved.scale is None else jnp.sum(dy * unscaled, rows)
    d_shift = None if saved.shift is None else jnp.sum(dy, rows)
    dy = dy if saved.scale is None else dy * saved.scale
    along, *level = _means(norm.axis, dy * unscaled, *([dy] if norm.centred else []))
    dx = saved.factor * (dy - unscaled * along - (level[0] if level else 0.0))
    return dx.astype(saved.x.dtype), d_scale, d_shift


_normalised.defvjp(_forward, _backward)


def _statistics(h: jax.Array, norm: _Norm) -> tuple[jax.Array | None, jax.Array]:
    """Return each row's mean, None if it is not subtracted, and its factor, both [..., 1]."""
    if not norm.centred:
        return None, lax.rsqrt(_means(norm.axis, jnp.square(h))[0] + norm.eps)
    mean = jnp.mean(h, -1, keepdims=True)
    mean, centred, squared = _means(norm.axis, mean, jnp.square(h - mean), jnp.square(mean))
    return mean, lax.rsqrt(centred + (squared - jnp.square(mean)) + norm.eps)


def _means(axis: str, *rows: jax.Array) -> list[jax.Array]:
    """Return each operand's mean [..., 1] over features split over `axis`; collective: one all-reduce."""
    # Concatenated, so that all means share one collective, which is bound by latency.
    means = [jnp.mean(row, -1, keepdims=True) for row in rows]
    if axis_size(axis) == 1:
        return means
    return jnp.split(all_reduce(jnp.concatenate(means, -1) / axis_size(axis), axis), len(means), -1)


def _unscaled(x: jax.Array, mean: jax.Array | None, factor: jax.Array) -> jax.Array:
    h = x.astype(jnp.float32)
    return (h if mean is None else h - mean) * factor


class LayerNorm(nnx.Module):
    """LayerNorm over features split over `x`."""

    def __init__(self, features: int, *, eps: float):
        self.eps = eps
        self.scale = constant_param((features,), 1.0, P(FEATURE_AXIS), role="norm")
        self.shift = constant_param((features,), 0.0, P(FEATURE_AXIS), role="norm")

    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalize [..., features/Gx]; collectives as in `layer_norm`."""
        return layer_norm(x, self.scale.get_value(), self.shift.get_value(), self.eps)


class RMSNorm(nnx.Module):
    """RMSNorm over features split over `axis` ("" for none, as within a head), scaled by `offset` plus the weight."""

    def __init__(self, features: int, *, eps: float, offset: float = 0.0, axis: str = FEATURE_AXIS):
        self.eps, self.offset, self.axis = eps, offset, axis
        self.scale = constant_param((features,), 1.0 - offset, P(axis) if axis else P(), role="norm")

    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalize [..., features/Gx]; collectives as in `rms_norm`.

        If heads are split, the gradient of their common weight is all-reduced over the axes that split them,
        4 head_dim bytes per microbatch.
        """
        scale = self.scale.get_value()
        return rms_norm(x, scale.astype(jnp.float32) + self.offset if self.offset else scale, self.eps, self.axis)
