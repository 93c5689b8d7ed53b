"""Causal self-attention with heads sharded over `y`, and the forms in which it is computed."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from axonn_jax import compat
from axonn_jax.ops.layers import Comm
from axonn_jax.options import AttentionKernel, Bias
from axonn_jax.tensor.collectives import SEQUENCE_AXIS, axis_size
from axonn_jax.tensor.kernel_choice import Tiles, choose_form, tiles
from axonn_jax.tensor.linear import Linear, column_parallel
from axonn_jax.tensor.norm import HeadNorm


class Rotation(NamedTuple):
    """Rotary embedding: angles by which pairs of features turn from one token to the next."""

    frequencies: tuple[float, ...]
    """Radians per token of each pair; head_dim/2 numbers."""
    amplitude: float = 1.0
    """Factor on rotated features."""


class Documents(NamedTuple):
    """Documents in rows [batch, seq] that hold several."""

    numbers: jax.Array
    """Number of each token's document in its row, int32."""
    positions: jax.Array
    """Position of each token in its document, int32."""


Held = TypeVar("Held")
Attend = Callable[[jax.Array, jax.Array, jax.Array], tuple[jax.Array, Held]]
"""Attention function: queries, keys and values -> attended values, and state that the function keeps, as a cache."""


class Angles(NamedTuple):
    """Cosines and sines of each token's angles, both [batch or 1, seq, 1, head_dim/2] float32."""

    cos: jax.Array
    sin: jax.Array


def angles(rotation: Rotation, length: int, positions: jax.Array | None = None) -> Angles:
    """Angles of tokens at `positions` [batch, seq], all below `length`; left out, of those at 0 to `length` - 1."""
    radians = np.outer(np.arange(length, dtype=np.float64), np.array(rotation.frequencies))

    def of_tokens(table: np.ndarray[Any, Any]) -> jax.Array:
        values = jnp.asarray(rotation.amplitude * table, jnp.float32)
        return values[None, :, None, :] if positions is None else jnp.take(values, positions, axis=0)[:, :, None, :]

    return Angles(of_tokens(np.cos(radians)), of_tokens(np.sin(radians)))


def rotary(x: jax.Array, by: Angles) -> jax.Array:
    """Rotate features [batch, seq, heads, head_dim] (RoFormer, eq. 34; halves layout as in Llama)."""
    half = x.shape[-1] // 2
    first, second = x[..., :half].astype(jnp.float32), x[..., half:].astype(jnp.float32)
    turned = jnp.concatenate([first * by.cos - second * by.sin, second * by.cos + first * by.sin], -1)
    return turned.astype(x.dtype)


def _blocked(
    q: jax.Array, k: jax.Array, v: jax.Array, sizes: Tiles, window: int, numbers: jax.Array | None
) -> jax.Array:
    """`blocked_attention` on [batch, seq, heads, head_dim], each KV head repeated for its queries."""
    batch, seq, heads, head_dim = q.shape
    group = heads // k.shape[2]

    def heads_first(a: jax.Array, repeat: int) -> jax.Array:
        a = jnp.repeat(a, repeat, axis=2) if repeat > 1 else a
        return a.transpose(0, 2, 1, 3).reshape(batch * heads, seq, head_dim)

    rows = None if numbers is None else jnp.repeat(numbers, heads, axis=0)
    out = blocked_attention(heads_first(q, 1), heads_first(k, group), heads_first(v, group), sizes, window, rows)
    return out.reshape(batch, heads, seq, head_dim).transpose(0, 2, 1, 3)


def causal_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    kernel: AttentionKernel | Tiles = "auto",
    window: int = 0,
    numbers: jax.Array | None = None,
) -> jax.Array:
    """Softmax attention of each token over itself and the tokens before it, on local heads; no collectives.

    Shapes: `q` [batch, seq, heads, head_dim], `k` and `v` [batch, seq, kv_heads, head_dim] -> like `q`. A token sees
    `window` tokens, itself included, or with 0 all, and of these only such with its own number in `numbers`
    [batch, seq] (`Documents`). The form is that of `kernel_choice.choose_form` on the default
    backend's device; `Tiles` are the blocked one in such sizes.
    """
    if isinstance(kernel, Tiles):
        return _blocked(q, k, v, kernel, window, numbers)
    device = compat.attention_device(jax.local_devices()[0], alone=not compat.varying_axes(q))
    form = choose_form(kernel, device, q.dtype.name, q.shape[-1], q.shape[1], window, packed=numbers is not None)
    if form.kernel == "blocked":
        return _blocked(q, k, v, tiles(device.platform, q.shape[1]), window, numbers)
    if form.kernel == "splash":
        return _splash(q, k, v)
    implementation: Any = form.kernel
    before = (window - 1, 0) if window else None
    same = None if numbers is None else (numbers[:, :, None] == numbers[:, None, :])[:, None]
    return jax.nn.dot_product_attention(
        q, k, v, mask=same, is_causal=True, local_window_size=before, implementation=implementation
    )


def _splash(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    import tokamax

    return tokamax.dot_product_attention(q, k, v, is_causal=True, implementation="mosaic_tpu")  # type: ignore[no-any-return]


# Blocked attention. The plain form writes and reads whole [heads, seq, seq] arrays about ten times a layer; two ranks
# on one socket then share the memory bus more than they share work, and for long sequences an accelerator has no
# room. Here a chunk of heads and a block of queries are taken at a time, keys that none of the block's queries sees are
# left out, and the backward computes the scores again. Source: FlashAttention (Dao et al. 2022), algorithms 1 and 4,
# without their tiling over keys.
Arrays = tuple[jax.Array, ...]
Saved = tuple[jax.Array | None, Arrays]


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def blocked_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, tiles: Tiles, window: int = 0, numbers: jax.Array | None = None
) -> jax.Array:
    """Causal softmax attention of [heads, seq, head_dim] arrays (batch and heads as one dim); no collectives.

    `window` and `numbers` [heads, seq] are as for `causal_attention`.
    """
    return _in_chunks(partial(_forward, window), tiles, numbers, q, k, v)[0]


def _forward_rule(
    q: jax.Array, k: jax.Array, v: jax.Array, tiles: Tiles, window: int, numbers: jax.Array | None
) -> tuple[jax.Array, Saved]:
    out, log_sum = _in_chunks(partial(_forward, window), tiles, numbers, q, k, v)
    return out, (numbers, (q, k, v, out, log_sum))


def _backward_rule(tiles: Tiles, window: int, saved: Saved, d_out: jax.Array) -> tuple[jax.Array | None, ...]:
    numbers, arrays = saved
    return (*_in_chunks(partial(_backward, window), tiles, numbers, *arrays, d_out), None)


blocked_attention.defvjp(_forward_rule, _backward_rule)


def _in_chunks(f: Callable[..., Arrays], tiles: Tiles, numbers: jax.Array | None, *arrays: jax.Array) -> Arrays:
    """Run `f` on chunks of the leading dim, one after the other, as many heads at a time as the tiles allow."""
    heads, seq = arrays[0].shape[:2]
    chunk = tiles.chunk(heads, seq)
    if chunk == heads:
        return f(tiles, numbers, *arrays)
    split = jax.tree.map(lambda a: a.reshape(heads // chunk, chunk, *a.shape[1:]), (numbers, *arrays))
    joined = lax.map(lambda parts: f(tiles, *parts), split)
    return tuple(a.reshape(heads, *a.shape[2:]) for a in joined)


def _dot(a: jax.Array, b: jax.Array, dim_a: int, dim_b: int) -> jax.Array:
    """Batched over heads, contracting one dim of each, summed in float32."""
    return lax.dot_general(a, b, (((dim_a,), (dim_b,)), ((0,), (0,))), preferred_element_type=jnp.float32)


def _seen(block: slice, window: int) -> slice:
    """The keys that a block of queries sees some of."""
    return slice(max(0, block.start - window + 1) if window else 0, block.stop)


def _scores(q: jax.Array, k: jax.Array, block: slice, window: int, numbers: jax.Array | None) -> jax.Array:
    """Return masked scores of a block of queries against the keys that some of them see, float32."""
    seen = _seen(block, window)
    scores = _dot(q[:, block], k[:, seen], 2, 2) * q.shape[-1] ** -0.5
    query = block.start + lax.broadcasted_iota(jnp.int32, scores.shape, 1)
    key = lax.broadcasted_iota(jnp.int32, scores.shape, 2)
    visible = query >= key
    if window:
        visible = (query >= key + seen.start) & (query < key + seen.start + window)
    if numbers is not None:
        visible &= numbers[:, block, None] == numbers[:, None, seen]
    return jnp.where(visible, scores, -jnp.inf)


def _forward(window: int, tiles: Tiles, numbers: jax.Array | None, q: jax.Array, k: jax.Array, v: jax.Array) -> Arrays:
    out, log_sum = [], []
    for block in tiles.blocks(q.shape[1]):
        scores = _scores(q, k, block, window, numbers)
        top = jnp.max(scores, -1, keepdims=True)
        weights = jnp.exp(scores - top)
        total = jnp.sum(weights, -1, keepdims=True)
        out.append(_dot(weights.astype(v.dtype), v[:, _seen(block, window)], 2, 1) / total)
        log_sum.append(top + jnp.log(total))
    return jnp.concatenate(out, 1).astype(q.dtype), jnp.concatenate(log_sum, 1)


def _backward(
    window: int,
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
    for block in reversed(list(tiles.blocks(q.shape[1]))):  # the last one's end is that of the keys: it starts the sums
        seen = _seen(block, window)
        weights = jnp.exp(_scores(q, k, block, window, numbers) - log_sum[:, block])
        d_here = d_out[:, block]
        d_scores = weights * (_dot(d_here, v[:, seen], 2, 2) - delta[:, block]) * q.shape[-1] ** -0.5
        d_scores, weights = d_scores.astype(q.dtype), weights.astype(q.dtype)
        d_q.insert(0, _dot(d_scores, k[:, seen], 2, 1))
        keys, values = _dot(d_scores, q[:, block], 1, 1), _dot(weights, d_here, 1, 1)
        if d_k is None or d_v is None:
            unseen = ((0, 0), (seen.start, 0), (0, 0))
            d_k, d_v = (jnp.pad(a, unseen) if seen.start else a for a in (keys, values))
            continue
        d_k, d_v = d_k.at[:, seen].add(keys), d_v.at[:, seen].add(values)
    assert d_k is not None
    assert d_v is not None
    return jnp.concatenate(d_q, 1).astype(q.dtype), d_k.astype(k.dtype), d_v.astype(v.dtype)


class Attention(nnx.Module):
    """Grouped-query self-attention: heads over `y`, the fused projection's columns ordered by KV head.

    A KV head's columns are its queries, its key, its value, side by side; so a `y` shard holds whole groups and
    the stored layout is the same on every grid. With `comm` "gather" heads are over `y` and `x`. `norm_eps` is that of
    the norms of queries and keys, None without them.
    """

    def __init__(
        self,
        hidden: int,
        heads: int,
        kv_heads: int,
        *,
        head_dim: int,
        bias: Bias,
        std: float,
        out_std: float,
        rotation: Rotation | None,
        norm_eps: float | None,
        window: int,
        kernel: AttentionKernel | Tiles,
        key: jax.Array,
        comm: Comm = "all_reduce",
    ):
        self.head_dim, self.group = head_dim, heads // kv_heads
        self.rotation, self.kernel, self.window = rotation, kernel, window
        key_in, key_out = jax.random.split(key)
        wide = (heads + 2 * kv_heads) * head_dim
        self.qkv = Linear(hidden, wide, in_axis="x", bias=bias != "none", std=std, key=key_in, comm=comm)
        self.q_norm = None if norm_eps is None else HeadNorm(head_dim, eps=norm_eps)
        self.k_norm = None if norm_eps is None else HeadNorm(head_dim, eps=norm_eps)
        self.out = Linear(
            heads * head_dim, hidden, in_axis="y", bias=bias == "all", std=out_std, key=key_out, comm=comm
        )

    def __call__(self, x: jax.Array, documents: Documents | None = None) -> jax.Array:
        """[batch, seq, hidden/Gx] -> same; collectives are those of its two `Linear` layers.

        With `comm` "sequence" `x` and the result are [batch, seq/Gy, hidden/Gx].
        """
        sequence = x.shape[1] * (axis_size(SEQUENCE_AXIS) if self.qkv.comm == "sequence" else 1)
        positions, numbers = (None, None) if documents is None else (documents.positions, documents.numbers)
        by = None if self.rotation is None else angles(self.rotation, sequence, positions)
        return self.merge(causal_attention(*self.project(x, by), self.kernel, self.window, numbers))

    def project(self, x: jax.Array, by: Angles | None) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Queries [batch, seq, heads, head_dim], keys and values [batch, seq, kv_heads, head_dim], local heads."""
        (qkv,) = column_parallel((self.qkv,), x)
        batch, seq, _ = qkv.shape
        qkv = qkv.reshape(batch, seq, -1, self.group + 2, self.head_dim)
        q = qkv[..., : self.group, :].reshape(batch, seq, -1, self.head_dim)
        k, v = qkv[..., self.group, :], qkv[..., self.group + 1, :]
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        return (q, k, v) if by is None else (rotary(q, by), rotary(k, by), v)

    def merge(self, attended: jax.Array) -> jax.Array:
        """Project the outputs of local heads, [batch, seq, heads, head_dim], onto the residual stream."""
        return self.out(attended.reshape(*attended.shape[:2], -1))
