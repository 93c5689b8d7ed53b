"""Key/value cache of a layer: arrays [slots, kv_heads, capacity, features], updated in place.

The token at position p is stored at place p modulo the capacity, so a model with a window keeps a ring of the window's
tokens. Slots are sharded over `data`, heads over `y`, and over `x` too if the model's attention splits heads there.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint

from axonn_jax.core.backend.workarounds import unfused_write

LayerCache = tuple[jax.Array, ...]
Caches = list[LayerCache]

CHUNK = 512
"""Largest number of prompt tokens that pass the model at once."""
ROW_MAJOR = Layout(major_to_minor=(0, 1, 2, 3))
"""Layout of tokens written to a cache; without it XLA's GPU compiler transposes the full cache to suit a product."""
_LEAST = 64
_LEAST_CHUNK = 16


def chunks(tokens: int, ring: int) -> list[int]:
    """Return the chunk lengths for a prompt of `tokens` tokens: powers of two from 16 to 512.

    There is a program for each length, so few lengths mean few compilations.
    """
    most = min(CHUNK, ring)
    full, tail = divmod(tokens, most)
    return [most] * full + ([_power(tail, _LEAST_CHUNK)] if tail else [])


def bucket(tokens: int) -> int:
    """Return the smallest capacity for `tokens` tokens: a power of two up to 512, above that a multiple of 512.

    Every chunk length up to the capacity divides it, so that no chunk wraps around the ring.
    """
    return -(-tokens // CHUNK) * CHUNK if tokens > CHUNK else _power(tokens, _LEAST)


def _power(number: int, least: int) -> int:
    """Return the smallest power of two not below both; `least` is a power of two."""
    return max(least, 1 << (number - 1).bit_length())


def grown(arrays: LayerCache, capacity: int) -> LayerCache:
    """Return a layer's arrays padded to a larger capacity; no token may have been overwritten yet."""
    return tuple(jnp.pad(a, ((0, 0), (0, 0), (0, capacity - a.shape[2]), (0, 0))) for a in arrays)


def tokens_to_write(arrays: LayerCache, new: LayerCache, places: jax.Array, active: jax.Array) -> LayerCache:
    """Return the tokens to write, [slots, kv_heads, 1, features]: new ones of active slots, else the cached ones."""

    # An idle slot must not be overwritten: it may hold a prompt that other slots copy.
    def select(array: jax.Array, token: jax.Array) -> jax.Array:
        size = (1, array.shape[1], 1, array.shape[3])
        cached = [lax.dynamic_slice(array, (slot, 0, places[slot], 0), size) for slot in range(array.shape[0])]
        tokens = jnp.where(active[:, None, None, None], token.astype(array.dtype), jnp.concatenate(cached))
        return with_layout_constraint(tokens, ROW_MAJOR)

    return tuple(select(array, token) for array, token in zip(arrays, new, strict=True))


def append(arrays: LayerCache, new: LayerCache, places: jax.Array) -> LayerCache:
    """Write one token per slot, [slots, kv_heads, 1, features], to its place, [slots]."""

    def write_token(array: jax.Array, token: jax.Array) -> jax.Array:
        for slot in range(array.shape[0]):  # on CPUs a scatter is a slower loop of the same writes
            at = (slot, 0, places[slot], 0)
            array = lax.dynamic_update_slice(array, token[slot : slot + 1].astype(array.dtype), at)
        return array

    # With a single slot or head, XLA fuses the write with the product that reads the cache.
    single = 1 in arrays[0].shape[:2]
    write = unfused_write(write_token, places[0] >= 0) if single else write_token
    return tuple(write(array, token) for array, token in zip(arrays, new, strict=True))


def insert(arrays: LayerCache, new: LayerCache, slot: jax.Array, start: jax.Array, valid: jax.Array) -> LayerCache:
    """Write a chunk of a slot's tokens.

    Args:
        arrays: The layer's cache.
        new: Arrays [1, kv_heads, chunk, features].
        slot: Slot to write to.
        start: Position of the first token, a multiple of the chunk, which must divide the capacity.
        valid: Number of tokens to write, from the first.
    """

    def write_chunk(array: jax.Array, chunk: jax.Array) -> jax.Array:
        at = (slot, 0, start % array.shape[2], 0)
        previous = lax.dynamic_slice(array, at, chunk.shape)
        counts = jnp.arange(chunk.shape[2])[:, None] < valid
        return lax.dynamic_update_slice(array, jnp.where(counts, chunk.astype(array.dtype), previous), at)

    return tuple(write_chunk(array, chunk) for array, chunk in zip(arrays, new, strict=True))


def positions(count: jax.Array, capacity: int) -> jax.Array:
    """Return the position of the token at each place, [..., capacity], of `count` [...] written; negative if none."""
    last = count[..., None] - 1
    return last - (last - jnp.arange(capacity)) % capacity
