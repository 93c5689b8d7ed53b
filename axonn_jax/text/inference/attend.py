"""Attention over a slot's cache: full attention, which is the base class of selective variants."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from axonn_jax.core.tensor.kernel_choice import EVERY_TOKEN, AttentionRule
from axonn_jax.core.tensor.kernels.blocked import scaled
from axonn_jax.text.inference.cache import LayerCache, append, positions

Attended = tuple[jax.Array, LayerCache]
Extras = Sequence[jax.Array | None]
"""The `extra` of every layer (`FullAttention`)."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Seen:
    """Cache places that a decode step may attend to."""

    valid: jax.Array
    """[slots, capacity] bool."""
    newest: jax.Array
    """[slots]: place of the query token."""
    tokens: jax.Array
    """[slots]: number of valid places; 0 for an idle slot, whose results are not read."""
    rule: AttentionRule = field(default=EVERY_TOKEN, metadata={"static": True})
    """Rule of the layer's attention; its window is already part of `valid`."""


class FullAttention:
    """Attention to every key, and the base class of selective variants.

    `extra` is the data that a variant has for a layer, None without any.
    """

    name: str = "full"
    dense_prompt: bool = True
    """True to process prompts in chunks, with full attention, and cache all keys; False for token by token."""
    calibrated: bool = False
    """True if every layer requires an `extra`."""

    def features(self, head_dim: int) -> tuple[tuple[int, DTypeLike | None], ...]:
        """Return (features, dtype) per array of a layer's cache, here keys and values; dtype None is the model's."""
        return (head_dim, None), (head_dim, None)

    def stored(self, k: jax.Array, v: jax.Array, extra: jax.Array | None) -> LayerCache:
        """Return the arrays to cache for keys and values [batch, kv_heads, seq, head_dim]: both unchanged."""
        return k, v

    def keys_and_values(self, arrays: LayerCache, extra: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        """Recover the model's keys and values from the cached arrays; the inverse of `stored`."""
        return arrays[0], arrays[1]

    def step(self, q: jax.Array, new: LayerCache, arrays: LayerCache, seen: Seen, extra: jax.Array | None) -> Attended:
        """Append new tokens to the cache and attend to it, with the softmax in float32.

        Args:
            q: Queries [slots, kv_heads, group, head_dim].
            new: The tokens' arrays, [slots, kv_heads, 1, features] each.
            arrays: The layer's cache.
            seen: Places to attend to.
            extra: The layer's data.

        Returns:
            Results of the shape of `q`, and the new cache.
        """
        k, v = arrays = append(arrays, new, seen.newest)
        return weighted(scores(q, k, seen.rule), seen.valid[:, None, None], v).astype(q.dtype), arrays


def scores(q: jax.Array, k: jax.Array, rule: AttentionRule = EVERY_TOKEN) -> jax.Array:
    """Return scores of [slots, kv_heads, group, d] and [slots, kv_heads, n, d]: [slots, kv_heads, group, n] float32."""
    return scaled(products(q, k), q.shape[-1], rule)


def products(q: jax.Array, k: jax.Array) -> jax.Array:
    """Return the products of queries and keys, without the scaling by 1 / sqrt(head_dim)."""
    return lax.dot_general(q, k, (((3,), (3,)), ((0, 1), (0, 1))), preferred_element_type=jnp.float32)


def weighted(scored: jax.Array, visible: jax.Array, v: jax.Array) -> jax.Array:
    """Return softmax(scores [slots, kv_heads, group, n]) @ values [slots, kv_heads, n, d], in float32."""
    masked = jnp.where(visible, scored, -jnp.inf)
    weights = jnp.exp(masked - jnp.max(masked, -1, keepdims=True))
    out = lax.dot_general(
        weights.astype(v.dtype), v, (((3,), (2,)), ((0, 1), (0, 1))), preferred_element_type=jnp.float32
    )
    return out / jnp.sum(weights, -1, keepdims=True)


def attend_chunk(q: jax.Array, new: LayerCache, old: LayerCache, start: jax.Array, rule: AttentionRule) -> jax.Array:
    """Attend from a chunk of a prompt to earlier tokens and to itself, with float32 accumulation.

    Args:
        q: Queries [1, chunk, heads, head_dim].
        new: Keys and values of the chunk, [1, kv_heads, chunk, head_dim].
        old: Keys and values in the cache, [1, kv_heads, capacity, head_dim].
        start: Number of tokens written to the cache.
        rule: Which tokens a token attends to.

    Returns:
        [1, chunk, heads, head_dim].
    """
    chunk, (kv_heads, head_dim) = q.shape[1], (new[0].shape[1], q.shape[3])
    k, v = (jnp.concatenate(pair, 2)[0] for pair in zip(old, new, strict=True))
    query = start + jnp.arange(chunk)
    key = jnp.concatenate([positions(start, old[0].shape[2]), query])
    visible = (key >= 0) & (key <= query[:, None])
    if rule.window:
        visible &= key > query[:, None] - rule.window

    def attend_head(head: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        q, k, v = (a[None, None] for a in head)
        rows = q.reshape(1, 1, -1, head_dim)
        scored = scores(rows, k, rule).reshape(1, 1, -1, chunk, k.shape[2])
        flat = jnp.where(visible, scored, -jnp.inf).reshape(1, 1, -1, k.shape[2])
        return weighted(flat, jnp.bool_(True), v)[0, 0].reshape(-1, chunk, head_dim)

    queries = q[0].reshape(chunk, kv_heads, -1, head_dim).transpose(1, 2, 0, 3)
    # One KV head at a time: the scores in memory are [group, chunk, capacity + chunk].
    out = lax.map(attend_head, (queries, k, v))  # [kv_heads, group, chunk, head_dim]
    return out.transpose(2, 0, 1, 3).reshape(1, chunk, -1, head_dim).astype(q.dtype)
