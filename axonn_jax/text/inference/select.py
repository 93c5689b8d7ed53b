"""Selection of exactly the k largest scores of a row, the first of equal ones, by bisection of a threshold.

`lax.top_k` sorts full rows on GPUs, and takes several times as long on CPUs for a k of hundreds.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax


def ordered(x: jax.Array) -> jax.Array:
    """Return int32 numbers that order like the float32 numbers."""
    # IEEE floats order like sign-magnitude integers: flipping the lower bits of negatives makes it two's complement.
    bits = lax.bitcast_convert_type(x, jnp.int32)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def bisected(
    low: jax.Array, high: jax.Array, is_below: Callable[[jax.Array], jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """Return neighbouring int32 numbers from `low` to `high`: the first one `is_below`, the second one is not."""

    def halve(_: jax.Array, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds
        middle = (low >> 1) + (high >> 1) + (low & high & 1)  # without overflow
        below = is_below(middle)
        return jnp.where(below, middle, low), jnp.where(below, high, middle)

    return lax.fori_loop(0, 32, halve, (low, high))


def largest(scores: jax.Array, k: jax.Array) -> jax.Array:
    """Return the mask [..., n] of the `k` [...] largest of each row of float32 scores [..., n]; 1 <= k <= n."""
    places, k = ordered(scores), k[..., None]
    low = jnp.full((*scores.shape[:-1], 1), -(2**31), jnp.int32)
    high = jnp.max(places, -1, keepdims=True) + 1
    # At least k scores are at or above the threshold, fewer than k above it: the first of the equal ones fill up.
    threshold, _ = bisected(low, high, lambda at: jnp.sum(places >= at, -1, keepdims=True, dtype=jnp.int32) >= k)
    above, equal = places > threshold, places == threshold
    missing = k - jnp.sum(above, -1, keepdims=True, dtype=jnp.int32)
    return above | (equal & (jnp.cumsum(equal.astype(jnp.int32), -1) <= missing))


def compacted(mask: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
    """Return the indices [..., size] of True in `mask` [..., n], in order, and which of them are valid."""
    rows = mask.reshape(-1, mask.shape[-1])
    rank = jnp.cumsum(rows.astype(jnp.int32), -1)
    target = jnp.where(rows, rank - 1, size)
    places = jnp.broadcast_to(jnp.arange(rows.shape[1], dtype=jnp.int32), rows.shape)
    empty = jnp.zeros((rows.shape[0], size), jnp.int32)
    order = empty.at[jnp.arange(rows.shape[0])[:, None], target].set(places, mode="drop", unique_indices=True)
    counts = jnp.arange(size) < rank[:, -1:]
    return tuple(a.reshape(*mask.shape[:-1], size) for a in (order, counts))  # type: ignore[return-value]
