"""Key of random numbers that do not depend on the shape in which they are drawn."""

import jax
import jax.numpy as jnp
from jax.extend.random import define_prng_impl


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
