"""LayerNorm and RMSNorm over features that are sharded."""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P

from axonn_jax.tensor.collectives import FEATURE_AXIS, all_reduce, axis_size
from axonn_jax.tensor.params import constant_param

F = TypeVar("F", bound=Callable[..., jax.Array])


def layer_norm(
    x: jax.Array,
    scale: jax.Array | None,
    shift: jax.Array | None,
    eps: float,
    axis: str = FEATURE_AXIS,
    recomputed: Callable[..., Any] = jax.checkpoint,
) -> jax.Array:
    """Normalise [..., features/G] over features split over `axis`; float32 inside, returned in `x`'s dtype.

    `recomputed` wraps functions of which the backward pass keeps the arguments alone: the input and numbers a row.
    Collective: one all-reduce over `axis` of three float32 a row (and one in the backward). Each shard's mean and
    centred sum of squares are combined (Chan et al. 1979), which on one shard is the two-pass variance.
    """
    h = x.astype(jnp.float32)
    stats = recomputed(_moments)(h) / axis_size(axis)
    mean, centred, mean_squared = jnp.split(all_reduce(stats, axis), 3, -1)
    variance = centred + (mean_squared - jnp.square(mean))
    return recomputed(_normalise)(h, mean, lax.rsqrt(variance + eps), scale, shift).astype(x.dtype)


def rms_norm(x: jax.Array, scale: jax.Array | None, eps: float, axis: str = FEATURE_AXIS) -> jax.Array:
    """Divide [..., features/G] by the root mean square over features split over `axis`; float32 inside.

    Collective: one all-reduce over `axis` of one float32 a row each way.
    """
    h = x.astype(jnp.float32)
    local = jnp.mean(jnp.square(h), -1, keepdims=True) / axis_size(axis)
    h = h * lax.rsqrt(all_reduce(local, axis) + eps)
    return (h if scale is None else h * scale.astype(h.dtype)).astype(x.dtype)


def head_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """Divide [batch, seq, heads, head_dim] by each head's root mean square, then scale; float32 inside.

    `scale` [head_dim] is all heads': its gradient is all-reduced over the axes that split heads, 4 head_dim bytes a
    microbatch.
    """
    h = x.astype(jnp.float32)
    h = h * lax.rsqrt(jnp.mean(jnp.square(h), -1, keepdims=True) + eps)
    return (h * scale.astype(h.dtype)).astype(x.dtype)


class LayerNorm(nnx.Module):
    """LayerNorm over features split over `x`: zero mean and unit variance, then scale and shift."""

    def __init__(self, features: int, *, eps: float):
        self.eps = eps
        self.scale = constant_param((features,), 1.0, P(FEATURE_AXIS))
        self.shift = constant_param((features,), 0.0, P(FEATURE_AXIS))

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., features/Gx] -> same; collectives as in `layer_norm`."""
        return layer_norm(x, self.scale.get_value(), self.shift.get_value(), self.eps)


def recomputed_in_maps(f: F) -> F:
    """Return a function that keeps its arguments alone for the backward pass and computes the rest again from them.

    The result varies over the mesh axes that the first argument varies over. As `jax.checkpoint`, which `jax.vmap` with
    `spmd_axis_name` refuses in a manual region (jax 0.10.2).
    """

    @jax.custom_vjp
    def run(*args: Any) -> jax.Array:
        return f(*args)

    def forward(*args: Any) -> tuple[jax.Array, tuple[Any, ...]]:
        return f(*args), args

    def backward(args: tuple[Any, ...], dy: jax.Array) -> Any:
        h, dy = lax.optimization_barrier((args[0], dy))  # else XLA would keep the forward pass's values
        return jax.vjp(f, h, *args[1:])[1](dy)

    run.defvjp(forward, backward)
    return run  # type: ignore[return-value]


def _moments(h: jax.Array) -> jax.Array:
    mean = jnp.mean(h, -1, keepdims=True)
    centred = jnp.mean(jnp.square(h - mean), -1, keepdims=True)
    return jnp.concatenate([mean, centred, jnp.square(mean)], -1)


def _normalise(
    h: jax.Array, mean: jax.Array, factor: jax.Array, scale: jax.Array | None, shift: jax.Array | None
) -> jax.Array:
    h = (h - mean) * factor
    h = h if scale is None else h * scale.astype(h.dtype)
    return h if shift is None else h + shift.astype(h.dtype)


class RMSNorm(nnx.Module):
    """RMSNorm over features split over `x`, scaled by `offset` plus the weight."""

    def __init__(self, features: int, *, eps: float, offset: float = 0.0):
        self.eps, self.offset = eps, offset
        self.scale = constant_param((features,), 1.0 - offset, P(FEATURE_AXIS))

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., features/Gx] -> same; collectives as in `rms_norm`."""
        scale = self.scale.get_value()
        return rms_norm(x, scale.astype(jnp.float32) + self.offset if self.offset else scale, self.eps)


class HeadNorm(nnx.Module):
    """RMSNorm over each head's features, with the same weight for all heads."""

    def __init__(self, head_dim: int, *, eps: float):
        self.eps = eps
        self.scale = constant_param((head_dim,), 1.0, P())

    def __call__(self, x: jax.Array) -> jax.Array:
        """[batch, seq, heads, head_dim] -> same; collectives as in `head_norm`."""
        return head_norm(x, self.scale.get_value(), self.eps)
