"""Attention over a slot's cache: to all keys, the base of ways to attend to fewer."""

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from axonn_jax.inference.cache import LayerCache, append, positions
from axonn_jax.tensor.kernel_choice import EVERY_TOKEN, AttentionRule
from axonn_jax.tensor.kernels.blocked import scaled

Attended = tuple[jax.Array, LayerCache]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Seen:
    """Places of the cache visible to a decode step."""

    valid: jax.Array
    """[slots, capacity] bool."""
    newest: jax.Array
    """[slots]: place of the query's token."""
    tokens: jax.Array
    """[slots]: number of valid places; 0: the slot waits, and results are not read."""
    rule: AttentionRule = field(default=EVERY_TOKEN, metadata={"static": True})
    """Rule of the layer's attention; `valid` has its window."""


class FullAttention:
    """Attention to every key, and the base of ways to attend to fewer. `extra` is a layer's own data, if any."""

    name: str = "full"
    dense_prompt: bool = True
    """True if a prompt goes through in chunks, with full attention, and all keys stay; False: token by token."""
    calibrated: bool = False
    """True if each layer must have an `extra`."""

    def features(self, head_dim: int) -> tuple[tuple[int, Any], ...]:
        """Features and dtype (None: the model's) of each array of a layer's cache: keys and values."""
        return (head_dim, None), (head_dim, None)

    def stored(self, k: jax.Array, v: jax.Array, extra: Any) -> LayerCache:
        """Return the arrays to cache for keys and values [batch, kv_heads, seq, head_dim]: both unchanged."""
        return k, v

    def held(self, arrays: LayerCache, extra: Any) -> tuple[jax.Array, jax.Array]:
        """Return the model's keys and values from the cached arrays."""
        return arrays[0], arrays[1]

    def step(self, q: jax.Array, new: LayerCache, arrays: LayerCache, seen: Seen, extra: Any) -> Attended:
        """Put `new` tokens into the cache, and attend with queries [slots, kv_heads, group, head_dim].

        Softmax over all valid places, in float32.
        """
        k, v = arrays = append(arrays, new, seen.newest)
        return weighted(scores(q, k, seen.rule), seen.valid[:, None, None], v).astype(q.dtype), arrays


def scores(q: jax.Array, k: jax.Array, rule: AttentionRule = EVERY_TOKEN) -> jax.Array:
    """[slots, kv_heads, group, d] and [slots, kv_heads, capacity, d] -> [slots, kv_heads, group, capacity] float32."""
    return scaled(products(q, k), q.shape[-1], rule)


def products(q: jax.Array, k: jax.Array) -> jax.Array:
    """Scores of queries and keys, without the division by the root of head_dim."""
    return lax.dot_general(q, k, (((3,), (3,)), ((0, 1), (0, 1))), preferred_element_type=jnp.float32)


def weighted(scored: jax.Array, visible: jax.Array, v: jax.Array) -> jax.Array:
    """The softmax of scores [slots, kv_heads, group, n] times values [slots, kv_heads, n, d], float32."""
    masked = jnp.where(visible, scored, -jnp.inf)
    weights = jnp.exp(masked - jnp.max(masked, -1, keepdims=True))
    out = lax.dot_general(
        weights.astype(v.dtype), v, (((3,), (2,)), ((0, 1), (0, 1))), preferred_element_type=jnp.float32
    )
    return out / jnp.sum(weights, -1, keepdims=True)


def attend_chunk(q: jax.Array, new: LayerCache, old: LayerCache, start: jax.Array, rule: AttentionRule) -> jax.Array:
    """Attend with a chunk of a prompt to earlier tokens and itself: [1, chunk, heads, head_dim], float32 inside.

    `new` are the chunk's keys and values [1, kv_heads, chunk, head_dim], `old` the cache's [1, kv_heads, capacity,
    head_dim], of which `start` tokens have been written; the `rule` says which tokens a token sees. One KV head's
    queries at a time: scores are [group, chunk, capacity + chunk].
    """
    chunk, (kv_heads, head_dim) = q.shape[1], (new[0].shape[1], q.shape[3])
    k, v = (jnp.concatenate(pair, 2)[0] for pair in zip(old, new, strict=True))
    query = start + jnp.arange(chunk)
    key = jnp.concatenate([positions(start, old[0].shape[2]), query])
    visible = (key >= 0) & (key <= query[:, None])
    if rule.window:
        visible &= key > query[:, None] - rule.window

    def one(of_head: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        q, k, v = (a[None, None] for a in of_head)
        rows = q.reshape(1, 1, -1, head_dim)
        scored = scores(rows, k, rule).reshape(1, 1, -1, chunk, k.shape[2])
        flat = jnp.where(visible, scored, -jnp.inf).reshape(1, 1, -1, k.shape[2])
        return weighted(flat, jnp.bool_(True), v)[0, 0].reshape(-1, chunk, head_dim)

    queries = q[0].reshape(chunk, kv_heads, -1, head_dim).transpose(1, 2, 0, 3)
    out = lax.map(one, (queries, k, v))  # [kv_heads, group, chunk, head_dim]
    return out.transpose(2, 0, 1, 3).reshape(1, chunk, -1, head_dim).astype(q.dtype)
