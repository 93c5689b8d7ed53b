"""Loki attention (Singhania et al., NeurIPS 2024): a decode step ranks keys by a few features and attends to the best.

Keys and queries are rotated by an orthonormal matrix per head, the keys' principal components by decreasing variance,
which changes no score (lemma 4.1 of the paper). Approximate scores use only the first features.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.layout import with_layout_constraint
from jax.typing import DTypeLike

from axonn_jax.core.backend.workarounds import on_cores
from axonn_jax.text.inference.attend import Attended, FullAttention, Seen, products
from axonn_jax.text.inference.cache import ROW_MAJOR, LayerCache, append
from axonn_jax.text.inference.select import compacted, largest

_CERTAIN = 3e38  # score of the newest token, which is always attended to


@dataclass(frozen=True)
class LokiAttention(FullAttention):
    """Attention to the best keys by the first principal components; a layer's `extra` are components [kv_heads, D, D].

    Each of a group's G queries selects keys separately, and nothing is dropped from the cache. Ranking reads `first`
    features of every key; exact scores then read the remaining features of selected keys only. For a cache of S tokens,
    that is S D (first/D + G keys (2 - first/D)) elements per KV head, where full attention reads 2 S D. No collectives:
    every step is local to a head.
    """

    # The cache stores the first features separately from the remaining ones, so that ranking reads contiguous memory.

    first: int
    """Number of features that keys are ranked by."""
    keys: float
    """Share of a slot's tokens to attend to; at least one token."""
    block: int = 1
    """Tokens per block; full blocks are ranked by their best score and read in one piece."""
    by_head: bool | None = None
    """True to process heads sequentially, False all at once; None for sequentially on CPUs, where that is faster."""
    name: str = "loki"
    dense_prompt: bool = True
    calibrated: bool = True

    def features(self, head_dim: int) -> tuple[tuple[int, DTypeLike | None], ...]:
        """Return (features, dtype) of the cache's arrays: first and remaining features of keys, and values."""
        return (self.first, None), (head_dim - self.first, None), (head_dim, None)

    def stored(self, k: jax.Array, v: jax.Array, extra: Any) -> LayerCache:
        """Return keys in the PCA basis, split into first and remaining features, and values."""
        rotated = turn(k, extra)
        return rotated[..., : self.first], rotated[..., self.first :], v

    def keys_and_values(self, arrays: LayerCache, extra: Any) -> tuple[jax.Array, jax.Array]:
        """Return cached keys rotated back from the PCA basis, and values."""
        rotated = jnp.concatenate(arrays[:2], -1)
        return turn(rotated, jnp.swapaxes(extra, 1, 2)), arrays[2]

    def step(self, q: jax.Array, new: LayerCache, arrays: LayerCache, seen: Seen, extra: Any) -> Attended:
        """Attend to the selected keys, with the softmax in float32; return results and the new cache."""
        rotated = turn(q, extra)
        (first,) = append(arrays[:1], new[:1], seen.newest)
        ranked = products(rotated[..., : self.first], first)
        mask = self.select_blocks(ranked, seen)
        # Programs have static shapes: compact to the largest possible number of blocks and mask the surplus.
        places, counts = compacted(mask, self.max_blocks(first.shape[2]))
        ranked = jnp.where(seen.valid[:, None, None], ranked, -jnp.inf)
        blocks = jnp.take_along_axis(ranked.reshape(*mask.shape, self.block), places[..., None], -2)
        blocks = jnp.where(counts[..., None], blocks, -jnp.inf)
        read: Callable[..., Attended] = _by_head if self.by_head else _at_once
        if self.by_head is None:
            read = on_cores(_by_head, _at_once)
        out, tail_arrays = read(rotated[..., self.first :], blocks, places, new[1:], arrays[1:], seen.newest)
        return out.astype(q.dtype), (first, *tail_arrays)

    def select_blocks(self, ranked: jax.Array, seen: Seen) -> jax.Array:
        """Return the mask of blocks to attend to, [slots, kv_heads, group, capacity / block], by scores of all keys."""
        ranked = jnp.where(seen.valid[:, None, None], ranked, -jnp.inf)
        places = jnp.arange(ranked.shape[-1])
        ranked = jnp.where((places == seen.newest[:, None])[:, None, None], _CERTAIN, ranked)
        blocks = ranked.reshape(*ranked.shape[:-1], -1, self.block).max(-1)
        return largest(blocks, jnp.broadcast_to(self.block_count(seen.tokens)[:, None, None], blocks.shape[:-1]))

    def block_count(self, tokens: jax.Array) -> jax.Array:
        """Return the number of blocks to select, by the slots' numbers of tokens."""
        keys = jnp.maximum(jnp.floor(tokens.astype(jnp.float32) * self.keys).astype(jnp.int32), 1)
        return -(-keys // self.block)

    def max_blocks(self, capacity: int) -> int:
        """Return the largest number of blocks selected from a cache of `capacity` tokens."""
        # Rounded in float32, exactly like `block_count`: one block less here would cut off the newest token.
        keys = int(np.float32(capacity) * np.float32(self.keys))
        return min(-(-max(keys, 1) // self.block), capacity // self.block)


def _by_head(
    tail_query: jax.Array, ranked: jax.Array, places: jax.Array, new: LayerCache, arrays: LayerCache, newest: jax.Array
) -> Attended:
    """Process KV heads of slots sequentially, for CPUs, so that arrays are used while they are in a core's cache."""
    slots, kv_heads, group, _, block = ranked.shape

    # The loop also writes the new token: XLA copies arrays that a loop only reads and that are needed afterwards. It
    # would also copy arrays that are flattened to a single head.
    def attend_head(at: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        out, *cached = carry
        slot, head = at // kv_heads, at % kv_heads
        cached = [
            lax.dynamic_update_slice(
                array, token[slot, head][None, None].astype(array.dtype), (slot, head, newest[slot], 0)
            )
            for array, token in zip(cached, new, strict=True)
        ]
        outs = []
        for query in range(group):
            rows = (places[slot, head, query, :, None] * block + jnp.arange(block)).reshape(-1)
            tail, value = (array.at[slot, head, rows].get(mode="clip") for array in cached)
            outs.append(_read(tail_query[slot, head, query], ranked[slot, head, query].reshape(-1), tail, value))
        return lax.dynamic_update_index_in_dim(out, jnp.stack(outs), at, 0), *cached

    out = jnp.zeros((slots * kv_heads, group, arrays[1].shape[3]), jnp.float32)
    out, *cached = lax.fori_loop(0, slots * kv_heads, attend_head, (out, *arrays))
    return out.reshape(slots, kv_heads, group, -1), tuple(cached)


def _at_once(
    tail_query: jax.Array, ranked: jax.Array, places: jax.Array, new: LayerCache, arrays: LayerCache, newest: jax.Array
) -> Attended:
    """Process all heads at once, for accelerators; copies the selected keys, a share `keys` of the layer's cache."""
    block, arrays = ranked.shape[-1], append(arrays, new, newest)
    slots, kv_heads, capacity, _ = arrays[0].shape
    start = (jnp.arange(slots * kv_heads) * capacity).reshape(slots, kv_heads, 1, 1)
    rows = start + (places[..., None] * block + jnp.arange(block)).reshape(*places.shape[:3], -1)
    tail, value = (
        jnp.take(array.reshape(slots * kv_heads * capacity, array.shape[3]), rows, 0, mode="clip") for array in arrays
    )
    read = jax.vmap(jax.vmap(jax.vmap(_read)))
    return read(tail_query, ranked.reshape(rows.shape), tail, value), arrays


def _read(tail_query: jax.Array, ranked: jax.Array, tail: jax.Array, value: jax.Array) -> jax.Array:
    """Attend with a query [D - first] to keys [n, D - first] whose approximate scores are `ranked` [n], in float32."""
    # The approximate score is the first features' part of the exact one, so only the remaining part is computed.
    exact = (ranked + jnp.matmul(tail, tail_query, preferred_element_type=jnp.float32)) * value.shape[-1] ** -0.5
    weights = jnp.exp(exact - jnp.max(exact))
    out = jnp.matmul(weights.astype(value.dtype), value, preferred_element_type=jnp.float32)
    return out / jnp.sum(weights)


def turn(x: jax.Array, components: jax.Array) -> jax.Array:
    """Rotate [slots, kv_heads, n, D] by each head's components [kv_heads, D, D]."""
    rotated = jnp.einsum("bknd,kde->bkne", x, components.astype(x.dtype))
    return with_layout_constraint(rotated, ROW_MAJOR)
