"""Blocked attention for any device: one block of queries and one chunk of heads at a time."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from axonn_jax.core.tensor.elementwise import capped
from axonn_jax.core.tensor.kernel_choice import EVERY_TOKEN, AttentionRule, Tiles

# The plain form reads and writes full [heads, seq, seq] arrays about ten times per layer, so two ranks on one socket
# compete for the memory bus, and long sequences exceed an accelerator's memory. Here keys that no query of a block sees
# are skipped, and the backward pass recomputes the scores. Source: FlashAttention (Dao et al. 2022), algorithms 1 and
# 4, without their tiling over keys.
Arrays = tuple[jax.Array, ...]
Saved = tuple[jax.Array | None, Arrays]


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def blocked_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    tiles: Tiles,
    rule: AttentionRule = EVERY_TOKEN,
    numbers: jax.Array | None = None,
) -> jax.Array:
    """Compute causal softmax attention block by block; no collectives.

    Args:
        q: [heads, seq, head_dim], with batch and heads merged into one dim.
        k: Like `q`.
        v: Like `q`.
        tiles: Tile sizes.
        rule: As for `tensor.attention.causal_attention`.
        numbers: Document indices [heads, seq], as for `tensor.attention.causal_attention`.

    Returns:
        Attended values with the shape of `q`.
    """
    return _in_chunks(partial(_forward, rule), tiles, numbers, q, k, v)[0]


def _forward_rule(
    q: jax.Array, k: jax.Array, v: jax.Array, tiles: Tiles, rule: AttentionRule, numbers: jax.Array | None
) -> tuple[jax.Array, Saved]:
    out, log_sum = _in_chunks(partial(_forward, rule), tiles, numbers, q, k, v)
    return out, (numbers, (q, k, v, out, log_sum))


def _backward_rule(tiles: Tiles, rule: AttentionRule, saved: Saved, d_out: jax.Array) -> tuple[jax.Array | None, ...]:
    numbers, arrays = saved
    return (*_in_chunks(partial(_backward, rule), tiles, numbers, *arrays, d_out), None)


blocked_attention.defvjp(_forward_rule, _backward_rule)


def _in_chunks(f: Callable[..., Arrays], tiles: Tiles, numbers: jax.Array | None, *arrays: jax.Array) -> Arrays:
    """Run `f` on consecutive chunks of the leading dim, with as many heads per chunk as the tiles allow."""
    heads, seq = arrays[0].shape[:2]
    chunk = tiles.chunk(heads, seq)
    if chunk == heads:
        return f(tiles, numbers, *arrays)
    split = jax.tree.map(lambda a: a.reshape(heads // chunk, chunk, *a.shape[1:]), (numbers, *arrays))
    outputs = lax.map(lambda parts: f(tiles, *parts), split)
    return tuple(a.reshape(heads, *a.shape[2:]) for a in outputs)


def _dot(a: jax.Array, b: jax.Array, dim_a: int, dim_b: int) -> jax.Array:
    """Contract one dim of each operand, batched over heads and accumulated in float32."""
    return lax.dot_general(a, b, (((dim_a,), (dim_b,)), ((0,), (0,))), preferred_element_type=jnp.float32)


def _seen(block: slice, window: int) -> slice:
    """Return the range of keys that some query of a block sees."""
    return slice(max(0, block.start - window + 1) if window else 0, block.stop)


def scaled(products: jax.Array, head_dim: int, rule: AttentionRule) -> jax.Array:
    """Return float32 scores from products of queries and keys."""
    return capped(products * head_dim**-0.5, rule.cap)


def _visible(block: slice, seen: slice, window: int, numbers: jax.Array | None) -> jax.Array:
    """Return the mask of a block of queries over the keys in `seen`, [heads or 1, block, seen] bool."""
    query = jnp.arange(block.start, block.stop)[None, :, None]
    key = jnp.arange(seen.start, seen.stop)[None, None]
    visible = query >= key
    if window:
        visible &= query < key + window
    if numbers is not None:
        visible &= numbers[:, block, None] == numbers[:, None, seen]
    return visible


def _forward(
    rule: AttentionRule, tiles: Tiles, numbers: jax.Array | None, q: jax.Array, k: jax.Array, v: jax.Array
) -> Arrays:
    out, log_sum = [], []
    for block in tiles.blocks(q.shape[1]):
        seen = _seen(block, rule.window)
        scores = scaled(_dot(q[:, block], k[:, seen], 2, 2), q.shape[-1], rule)
        scores = jnp.where(_visible(block, seen, rule.window, numbers), scores, -jnp.inf)
        top = jnp.max(scores, -1, keepdims=True)
        weights = jnp.exp(scores - top)
        total = jnp.sum(weights, -1, keepdims=True)
        out.append(_dot(weights.astype(v.dtype), v[:, seen], 2, 1) / total)
        log_sum.append(top + jnp.log(total))
    return jnp.concatenate(out, 1).astype(q.dtype), jnp.concatenate(log_sum, 1)


def _backward(
    rule: AttentionRule,
    tiles: Tiles,
    numbers: jax.Array | None,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    out: jax.Array,
    log_sum: jax.Array,
    d_out: jax.Array,
) -> Arrays:
    delta = jnp.sum(out.astype(jnp.float32) * d_out.astype(jnp.float32), -1, keepdims=True)
    d_q: list[jax.Array] = []
    d_k = d_v = None
    # In reverse, since the last block sees the keys up to the end: its sums, padded, initialize d_k and d_v.
    for block in reversed(list(tiles.blocks(q.shape[1]))):
        seen = _seen(block, rule.window)
        scores, unscaled = jax.vjp(lambda a: scaled(a, q.shape[-1], rule), _dot(q[:, block], k[:, seen], 2, 2))
        scores = jnp.where(_visible(block, seen, rule.window, numbers), scores, -jnp.inf)
        weights = jnp.exp(scores - log_sum[:, block])
        d_block = d_out[:, block]
        (d_products,) = unscaled(weights * (_dot(d_block, v[:, seen], 2, 2) - delta[:, block]))
        d_products, weights = d_products.astype(q.dtype), weights.astype(q.dtype)
        d_q.insert(0, _dot(d_products, k[:, seen], 2, 1))
        keys, values = _dot(d_products, q[:, block], 1, 1), _dot(weights, d_block, 1, 1)
        if d_k is None or d_v is None:
            unseen = ((0, 0), (seen.start, 0), (0, 0))
            d_k, d_v = (jnp.pad(a, unseen) if seen.start else a for a in (keys, values))
            continue
        d_k, d_v = d_k.at[:, seen].add(keys), d_v.at[:, seen].add(values)
    assert d_k is not None
    assert d_v is not None
    return jnp.concatenate(d_q, 1).astype(q.dtype), d_k.astype(k.dtype), d_v.astype(v.dtype)
