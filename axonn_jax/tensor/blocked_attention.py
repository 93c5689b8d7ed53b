"""Causal attention in blocks, small enough for a CPU's cache or an accelerator's memory, forward and backward.

The plain form writes and reads whole [heads, seq, seq] arrays about ten times a layer; two ranks on one socket then
share the memory bus more than they share work, and for long sequences an accelerator has no room. Here a chunk of heads
and a block of queries are taken at a time, keys after the block's last query are left out, and the backward computes
the scores again. Source: FlashAttention (Dao et al. 2022), algorithms 1 and 4, without their tiling over keys.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from axonn_jax.tensor.attention_forms import Tiles

Arrays = tuple[jax.Array, ...]


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def blocked_attention(q: jax.Array, k: jax.Array, v: jax.Array, tiles: Tiles) -> jax.Array:
    """Causal softmax attention of [heads, seq, head_dim] arrays (batch and heads as one dim); no collectives."""
    return _in_chunks(_forward, tiles, q, k, v)[0]


def _forward_rule(q: jax.Array, k: jax.Array, v: jax.Array, tiles: Tiles) -> tuple[jax.Array, Arrays]:
    out, log_sum = _in_chunks(_forward, tiles, q, k, v)
    return out, (q, k, v, out, log_sum)


def _backward_rule(tiles: Tiles, saved: Arrays, d_out: jax.Array) -> Arrays:
    return _in_chunks(_backward, tiles, *saved, d_out)


blocked_attention.defvjp(_forward_rule, _backward_rule)


def _in_chunks(f: Callable[..., Arrays], tiles: Tiles, *arrays: jax.Array) -> Arrays:
    """Runs `f` on chunks of the leading dim, one after the other, as many heads at a time as the tiles allow."""
    heads, seq = arrays[0].shape[:2]
    chunk = tiles.chunk(heads, seq)
    if chunk == heads:
        return f(tiles, *arrays)
    split = tuple(a.reshape(heads // chunk, chunk, *a.shape[1:]) for a in arrays)
    joined = lax.map(lambda parts: f(tiles, *parts), split)
    return tuple(a.reshape(heads, *a.shape[2:]) for a in joined)


def _dot(a: jax.Array, b: jax.Array, dim_a: int, dim_b: int) -> jax.Array:
    """Batched over heads, contracting one dim of each, summed in float32."""
    return lax.dot_general(a, b, (((dim_a,), (dim_b,)), ((0,), (0,))), preferred_element_type=jnp.float32)


def _scores(q: jax.Array, k: jax.Array, block: slice) -> jax.Array:
    """Masked scores of a block of queries against the keys up to its end, float32."""
    scores = _dot(q[:, block], k[:, : block.stop], 2, 2) * q.shape[-1] ** -0.5
    query = block.start + lax.broadcasted_iota(jnp.int32, scores.shape, 1)
    return jnp.where(query >= lax.broadcasted_iota(jnp.int32, scores.shape, 2), scores, -jnp.inf)


def _forward(tiles: Tiles, q: jax.Array, k: jax.Array, v: jax.Array) -> Arrays:
    out, log_sum = [], []
    for block in tiles.blocks(q.shape[1]):
        scores = _scores(q, k, block)
        top = jnp.max(scores, -1, keepdims=True)
        weights = jnp.exp(scores - top)
        total = jnp.sum(weights, -1, keepdims=True)
        out.append(_dot(weights.astype(v.dtype), v[:, : block.stop], 2, 1) / total)
        log_sum.append(top + jnp.log(total))
    return jnp.concatenate(out, 1).astype(q.dtype), jnp.concatenate(log_sum, 1)


def _backward(
    tiles: Tiles, q: jax.Array, k: jax.Array, v: jax.Array, out: jax.Array, log_sum: jax.Array, d_out: jax.Array
) -> Arrays:
    delta = jnp.sum(out.astype(jnp.float32) * d_out.astype(jnp.float32), -1, keepdims=True)
    d_q: list[jax.Array] = []
    d_k = d_v = None
    for block in reversed(list(tiles.blocks(q.shape[1]))):  # the last reaches every key, so it starts the sums
        weights = jnp.exp(_scores(q, k, block) - log_sum[:, block])
        d_here = d_out[:, block]
        d_scores = weights * (_dot(d_here, v[:, : block.stop], 2, 2) - delta[:, block]) * q.shape[-1] ** -0.5
        d_scores, weights = d_scores.astype(q.dtype), weights.astype(q.dtype)
        d_q.insert(0, _dot(d_scores, k[:, : block.stop], 2, 1))
        keys, values = _dot(d_scores, q[:, block], 1, 1), _dot(weights, d_here, 1, 1)
        d_k = keys if d_k is None else d_k.at[:, : block.stop].add(keys)
        d_v = values if d_v is None else d_v.at[:, : block.stop].add(values)
    assert d_k is not None
    assert d_v is not None
    return jnp.concatenate(d_q, 1).astype(q.dtype), d_k.astype(k.dtype), d_v.astype(v.dtype)
