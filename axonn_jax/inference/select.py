"""The k largest scores of a row: exactly so many, of equal ones the first; by halving a threshold, not by sorting.

`lax.top_k` sorts whole rows on GPUs, and takes several times as long on CPUs for a k of hundreds.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax


def ordered(x: jax.Array) -> jax.Array:
    """Integers in the order of the float32 numbers."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def bisected(
    low: jax.Array, high: jax.Array, is_below: Callable[[jax.Array], jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """The neighbouring int32 between two, of which the first `is_below` and the second is not."""

    def halve(_: jax.Array, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds
        between = (low >> 1) + (high >> 1) + (low & high & 1)  # without overflow
        below = is_below(between)
        return jnp.where(below, between, low), jnp.where(below, high, between)

    return lax.fori_loop(0, 32, halve, (low, high))


def largest(scores: jax.Array, k: jax.Array) -> jax.Array:
    """Masks of the `k` [...] largest of each row of float32 scores [..., n], as [..., n] bool; 1 <= k <= n."""
    places, k = ordered(scores), k[..., None]
    low = jnp.full((*scores.shape[:-1], 1), -(2**31), jnp.int32)
    high = jnp.max(places, -1, keepdims=True) + 1
    # at least k are at or above the threshold, fewer than k above it
    threshold, _ = bisected(low, high, lambda at: jnp.sum(places >= at, -1, keepdims=True, dtype=jnp.int32) >= k)
    above, equal = places > threshold, places == threshold
    missing = k - jnp.sum(above, -1, keepdims=True, dtype=jnp.int32)
    return above | (equal & (jnp.cumsum(equal.astype(jnp.int32), -1) <= missing))


def compacted(chosen: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
    """Return the places of True in `chosen` [..., n], in order, as [..., size] integers, and the mask of valid ones."""
    rows = chosen.reshape(-1, chosen.shape[-1])
    rank = jnp.cumsum(rows.astype(jnp.int32), -1)
    target = jnp.where(rows, rank - 1, size)
    places = jnp.broadcast_to(jnp.arange(rows.shape[1], dtype=jnp.int32), rows.shape)
    empty = jnp.zeros((rows.shape[0], size), jnp.int32)
    order = empty.at[jnp.arange(rows.shape[0])[:, None], target].set(places, mode="drop", unique_indices=True)
    counts = jnp.arange(size) < rank[:, -1:]
    return tuple(a.reshape(*chosen.shape[:-1], size) for a in (order, counts))  # type: ignore[return-value]
