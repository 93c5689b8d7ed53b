"""What makes two computations of a loss comparable: random numbers alike, weights moved, gradients in a few numbers."""

from collections.abc import Mapping
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.random import define_prng_impl

from axonn_jax.tensor.params import Params

_SUMS = 8
"""Sums that stand for a parameter's gradient."""


def _next(key: jax.Array) -> jax.Array:
    return key * jnp.uint32(1664525) + jnp.uint32(1013904223)


def _bits(key: jax.Array, width: int, shape: tuple[int, ...]) -> jax.Array:
    bits = jnp.uint32(0x40000000) | (key[0] >> 4)
    dtype = jnp.dtype(f"uint{width}")
    own = bits.astype(dtype) << (width - 32) if width > 32 else (bits >> (32 - width)).astype(dtype)
    return jnp.broadcast_to(own, shape)


_CONSTANT = define_prng_impl(
    key_shape=(1,),
    seed=lambda seed: jnp.broadcast_to(seed, (1,)).astype(jnp.uint32),
    split=lambda key, shape: jnp.broadcast_to(_next(key), (*shape, 1)),
    random_bits=_bits,
    fold_in=lambda key, number: _next(key),
    name="axonn_constant",
    tag="constant",
)


def constant_key() -> jax.Array:
    """Return a key whose draws are numbers between 1/4 and 5/16, as uniform, by the key alone.

    A tensor's entries are alike, and whoever draws until a number fits (as for a gamma distribution) comes to an end.
    """
    return jax.random.key(0, impl=_CONSTANT)


def moved(params: Params, relative: float, absolute: float) -> Params:
    """Return parameters with noise of a part of their root mean square and of an absolute size.

    The noise is the same in every layout.
    """
    return {name: _moved(value, _signs(value.shape), relative, absolute) for name, value in params.items()}


def sketches(grads: Mapping[str, jax.Array]) -> Params:
    """Return sums of each gradient's entries, each with a sign, [8]: equal gradients have equal sums."""
    return {name: _sketch(value, _signs(value.shape)) for name, value in grads.items()}


@jax.jit
def _moved(value: jax.Array, signs: list[jax.Array], relative: float, absolute: float) -> jax.Array:
    noise = jnp.ones(_SUMS)
    for each in signs:
        noise = noise[..., None, :] * each
    size = relative * jnp.sqrt(jnp.mean(jnp.square(value))) + absolute
    return value + size * jnp.mean(noise, -1) * _SUMS**0.5


@jax.jit
def _sketch(value: jax.Array, signs: list[jax.Array]) -> jax.Array:
    value = value[..., None]
    for each in reversed(signs):
        value = jnp.sum(value * each, -2)
    return value


def _signs(shape: tuple[int, ...]) -> list[np.ndarray]:
    """Return a sign for each index of every dim, [size, 8]."""
    return [_signs_along(dim, size) for dim, size in enumerate(shape)]


@cache
def _signs_along(dim: int, size: int) -> np.ndarray:
    return np.random.default_rng((size, dim)).choice(np.array([-1, 1], np.float32), (size, _SUMS))
