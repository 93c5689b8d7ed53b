"""What makes two computations of a loss comparable: random numbers alike, weights moved, gradients in a few numbers."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax import lax
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


def moved(params: Params, relative: jax.Array, absolute: jax.Array) -> Params:
    """Return parameters with noise of a part of their root mean square and of an absolute size.

    The noise is uniform and the same in every layout.
    """
    return {
        name: value + (relative * jnp.sqrt(jnp.mean(jnp.square(value))) + absolute) * _uniform(value.shape, number)
        for number, (name, value) in enumerate(sorted(params.items()))
    }


def sketches(grads: Mapping[str, jax.Array]) -> Params:
    """Return sums of each gradient's entries, with factors between -1 and 1: equal gradients have equal sums."""

    def sums(value: jax.Array) -> jax.Array:
        shape, value = value.shape, value[..., None]
        for dim, size in reversed(list(enumerate(shape))):
            value = jnp.sum(value * _uniform((size, _SUMS), dim), -2)
        return value

    return {name: sums(value) for name, value in grads.items()}


def _uniform(shape: tuple[int, ...], seed: int) -> jax.Array:
    """Return numbers between -1 and 1 by a hash of their indices."""
    bits = jnp.full(shape, seed, jnp.uint32)
    for dim in range(len(shape)):
        bits = (bits + lax.broadcasted_iota(jnp.uint32, shape, dim)) * jnp.uint32(0x9E3779B1)
        bits = (bits ^ (bits >> 15)) * jnp.uint32(0x85EBCA77)
        bits ^= bits >> 13
    return (bits >> 8).astype(jnp.float32) * 2.0**-23 - 1
