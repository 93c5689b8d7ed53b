"""Loki (Singhania et al., NeurIPS 2024): a decode step ranks keys by a few features and attends to the first ones.

An orthonormal matrix a head, the keys' principal components by decreasing variance, rotates keys and queries: no score
changes (the paper's lemma 4.1). Approximate scores use the first features alone.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.layout import with_layout_constraint

from axonn_jax.backend.repairs import on_cores
from axonn_jax.inference.attend import Attended, FullAttention, Seen, products
from axonn_jax.inference.cache import ROW_MAJOR, LayerCache, append
from axonn_jax.inference.select import compacted, largest

_CERTAIN = 3e38  # the newest token's score: it is always attended to


@dataclass(frozen=True)
class LokiAttention(FullAttention):
    """Attention to the keys that rank first by `first` features; a layer's `extra` are components [kv_heads, D, D].

    `keys` is the share of a slot's tokens, at least one; with `block` above 1 whole blocks of so many tokens are ranked
    by the best score, and read in one piece. The cache holds the first features apart from the rest, so ranking reads
    `first` contiguous features of every key, and exact scores only the rest of chosen keys: for a cache of S tokens S D
    (first/D + G keys (2 - first/D)) elements a KV head, where full attention reads 2 S D. Each of the G queries of a
    group has its own choice. Nothing is dropped from the cache. Every step is local to a head.
    """

    first: int
    keys: float
    block: int = 1
    by_head: bool | None = None
    """True if heads are read one after the other, False all at once; None: one after the other on CPUs, where
    faster."""
    name: str = "loki"
    dense_prompt: bool = True
    calibrated: bool = True

    def features(self, head_dim: int) -> tuple[tuple[int, Any], ...]:
        """First features, the rest, values."""
        return (self.first, None), (head_dim - self.first, None), (head_dim, None)

    def stored(self, k: jax.Array, v: jax.Array, extra: Any) -> LayerCache:
        """Keys turned and cut in two."""
        turned = turn(k, extra)
        return turned[..., : self.first], turned[..., self.first :], v

    def held(self, arrays: LayerCache, extra: Any) -> tuple[jax.Array, jax.Array]:
        """Keys turned back."""
        turned = jnp.concatenate(arrays[:2], -1)
        return turn(turned, jnp.swapaxes(extra, 1, 2)), arrays[2]

    def step(self, q: jax.Array, new: LayerCache, arrays: LayerCache, seen: Seen, extra: Any) -> Attended:
        """Return the softmax over the chosen keys, in float32, and the new cache."""
        turned = turn(q, extra)
        (first,) = append(arrays[:1], new[:1], seen.newest)
        ranked = products(turned[..., : self.first], first)
        chosen = self.chosen(ranked, seen)
        places, counts = compacted(chosen, self.most(first.shape[2]))
        ranked = jnp.where(seen.valid[:, None, None], ranked, -jnp.inf)
        blocks = jnp.take_along_axis(ranked.reshape(*chosen.shape, self.block), places[..., None], -2)
        blocks = jnp.where(counts[..., None], blocks, -jnp.inf)
        read: Callable[..., Attended] = _by_head if self.by_head else _at_once
        if self.by_head is None:
            read = on_cores(_by_head, _at_once)
        out, kept = read(turned[..., self.first :], blocks, places, new[1:], arrays[1:], seen.newest)
        return out.astype(q.dtype), (first, *kept)

    def chosen(self, ranked: jax.Array, seen: Seen) -> jax.Array:
        """Blocks to attend to, [slots, kv_heads, group, capacity / block] bool, by scores of all keys."""
        ranked = jnp.where(seen.valid[:, None, None], ranked, -jnp.inf)
        places = jnp.arange(ranked.shape[-1])
        ranked = jnp.where((places == seen.newest[:, None])[:, None, None], _CERTAIN, ranked)
        blocks = ranked.reshape(*ranked.shape[:-1], -1, self.block).max(-1)
        return largest(blocks, jnp.broadcast_to(self.number(seen.tokens)[:, None, None], blocks.shape[:-1]))

    def number(self, tokens: jax.Array) -> jax.Array:
        """Number of blocks chosen of so many tokens."""
        keys = jnp.maximum(jnp.floor(tokens.astype(jnp.float32) * self.keys).astype(jnp.int32), 1)
        return -(-keys // self.block)

    def most(self, capacity: int) -> int:
        """Most blocks chosen of a cache."""
        keys = int(np.float32(capacity) * np.float32(self.keys))  # as `number` has it
        return min(-(-max(keys, 1) // self.block), capacity // self.block)


def _by_head(
    rest: jax.Array, ranked: jax.Array, places: jax.Array, new: LayerCache, arrays: LayerCache, newest: jax.Array
) -> Attended:
    """One KV head of one slot after the other, for CPUs: arrays are used while in a core's cache.

    The loop writes the new token too: XLA would copy arrays only read in a loop and needed later. XLA would also copy
    arrays flattened to a single head.
    """
    slots, kv_heads, group, _, block = ranked.shape

    def one(at: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        out, *held = carry
        slot, head = at // kv_heads, at % kv_heads
        held = [
            lax.dynamic_update_slice(
                array, token[slot, head][None, None].astype(array.dtype), (slot, head, newest[slot], 0)
            )
            for array, token in zip(held, new, strict=True)
        ]
        outs = []
        for query in range(group):
            rows = (places[slot, head, query, :, None] * block + jnp.arange(block)).reshape(-1)
            tail, value = (array.at[slot, head, rows].get(mode="clip") for array in held)
            outs.append(_read(rest[slot, head, query], ranked[slot, head, query].reshape(-1), tail, value))
        return lax.dynamic_update_index_in_dim(out, jnp.stack(outs), at, 0), *held

    out = jnp.zeros((slots * kv_heads, group, arrays[1].shape[3]), jnp.float32)
    out, *kept = lax.fori_loop(0, slots * kv_heads, one, (out, *arrays))
    return out.reshape(slots, kv_heads, group, -1), tuple(kept)


def _at_once(
    rest: jax.Array, ranked: jax.Array, places: jax.Array, new: LayerCache, arrays: LayerCache, newest: jax.Array
) -> Attended:
    """All heads together, for accelerators: chosen keys are laid out for a layer, a share `keys` of its cache."""
    block, arrays = ranked.shape[-1], append(arrays, new, newest)
    slots, kv_heads, capacity, _ = arrays[0].shape
    start = (jnp.arange(slots * kv_heads) * capacity).reshape(slots, kv_heads, 1, 1)
    rows = start + (places[..., None] * block + jnp.arange(block)).reshape(*places.shape[:3], -1)
    tail, value = (
        jnp.take(array.reshape(slots * kv_heads * capacity, array.shape[3]), rows, 0, mode="clip") for array in arrays
    )
    each = jax.vmap(jax.vmap(jax.vmap(_read)))
    return each(rest, ranked.reshape(rows.shape), tail, value), arrays


def _read(rest: jax.Array, ranked: jax.Array, tail: jax.Array, value: jax.Array) -> jax.Array:
    """One query [D - first] over n chosen keys [n, D - first] whose approximate scores are `ranked` [n], float32."""
    exact = (ranked + jnp.matmul(tail, rest, preferred_element_type=jnp.float32)) * value.shape[-1] ** -0.5
    weights = jnp.exp(exact - jnp.max(exact))
    out = jnp.matmul(weights.astype(value.dtype), value, preferred_element_type=jnp.float32)
    return out / jnp.sum(weights)


def turn(x: jax.Array, components: jax.Array) -> jax.Array:
    """[slots, kv_heads, n, D] by each head's components [kv_heads, D, D]."""
    turned = jnp.einsum("bknd,kde->bkne", x, components.astype(x.dtype))
    return with_layout_constraint(turned, ROW_MAJOR)
