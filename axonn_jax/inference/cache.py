"""The key/value cache of a layer: arrays [slots, kv_heads, capacity, features], written in place.

A token at position p lies at p modulo the capacity: a model with a window keeps a ring of the window's tokens. Slots
lie over `data`, heads over `y`, and over `x` too if the model's attention splits heads there.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint

from axonn_jax.backend.repairs import write_apart

LayerCache = tuple[jax.Array, ...]

CHUNK = 512
"""Tokens of a prompt in one chunk through the model."""
ROW_MAJOR = Layout(major_to_minor=(0, 1, 2, 3))
"""Layout of tokens written to a cache; else XLA's GPU compiler turns the whole cache to a product's layout."""
_LEAST = 64
_LEAST_CHUNK = 16


def chunks(tokens: int, ring: int) -> list[int]:
    """Return the lengths of the programs for a prompt of so many tokens: powers of two from 16 to 512."""
    most = min(CHUNK, ring)
    full, rest = divmod(tokens, most)
    return [most] * full + ([_power(rest, _LEAST_CHUNK)] if rest else [])


def bucket(tokens: int) -> int:
    """Return the smallest capacity for so many tokens divisible by every chunk: a power of two, or a multiple of
    512."""
    return -(-tokens // CHUNK) * CHUNK if tokens > CHUNK else _power(tokens, _LEAST)


def _power(number: int, least: int) -> int:
    """Return the smallest power of two not below both; `least` is a power of two."""
    return max(least, 1 << (number - 1).bit_length())


def grown(arrays: LayerCache, capacity: int) -> LayerCache:
    """A layer's arrays with room for more tokens; none may have been overwritten yet."""
    return tuple(jnp.pad(a, ((0, 0), (0, 0), (0, capacity - a.shape[2]), (0, 0))) for a in arrays)


def tokens_to_write(arrays: LayerCache, new: LayerCache, places: jax.Array, active: jax.Array) -> LayerCache:
    """Return the tokens to write, [slots, kv_heads, 1, features]: new ones of active slots, else the cached ones.

    A slot without work may hold a prompt that others copy.
    """

    def one(array: jax.Array, token: jax.Array) -> jax.Array:
        size = (1, array.shape[1], 1, array.shape[3])
        kept = [lax.dynamic_slice(array, (slot, 0, places[slot], 0), size) for slot in range(array.shape[0])]
        chosen = jnp.where(active[:, None, None, None], token.astype(array.dtype), jnp.concatenate(kept))
        return with_layout_constraint(chosen, ROW_MAJOR)

    return tuple(one(array, token) for array, token in zip(arrays, new, strict=True))


def append(arrays: LayerCache, new: LayerCache, places: jax.Array) -> LayerCache:
    """Write one token of every slot, [slots, kv_heads, 1, features], to the slot's place, [slots]."""

    def one(array: jax.Array, token: jax.Array) -> jax.Array:
        for slot in range(array.shape[0]):  # a scatter is a loop of the same writes on CPUs, and slower
            at = (slot, 0, places[slot], 0)
            array = lax.dynamic_update_slice(array, token[slot : slot + 1].astype(array.dtype), at)
        return array

    single = 1 in arrays[0].shape[:2]  # whose write XLA fuses with the product that reads the cache
    write = write_apart(one, places[0] >= 0) if single else one
    return tuple(write(array, token) for array, token in zip(arrays, new, strict=True))


def insert(arrays: LayerCache, new: LayerCache, slot: jax.Array, start: jax.Array, valid: jax.Array) -> LayerCache:
    """Write a chunk of one slot's tokens, [1, kv_heads, chunk, features] of which the first `valid` count.

    `start` is a multiple of the chunk, which divides the capacity.
    """

    def one(array: jax.Array, chunk: jax.Array) -> jax.Array:
        at = (slot, 0, start % array.shape[2], 0)
        before = lax.dynamic_slice(array, at, chunk.shape)
        counts = jnp.arange(chunk.shape[2])[:, None] < valid
        return lax.dynamic_update_slice(array, jnp.where(counts, chunk.astype(array.dtype), before), at)

    return tuple(one(array, chunk) for array, chunk in zip(arrays, new, strict=True))


def positions(count: jax.Array, capacity: int) -> jax.Array:
    """Number of the token at each place, [..., capacity], when `count` [...] have been written; below 0: none."""
    last = count[..., None] - 1
    return last - (last - jnp.arange(capacity)) % capacity
