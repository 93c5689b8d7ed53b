"""Causal self-attention with heads sharded over `y`, and the choice between its kernels."""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from axonn_jax import compat
from axonn_jax.ops.layers import Comm
from axonn_jax.options import AttentionKernel, Bias
from axonn_jax.tensor.collectives import SEQUENCE_AXIS, axis_size
from axonn_jax.tensor.elementwise import DropoutKey
from axonn_jax.tensor.kernel_choice import EVERY_TOKEN, AttentionRule, Tiles, choose_form, tiles
from axonn_jax.tensor.kernels.blocked import blocked_attention
from axonn_jax.tensor.linear import Linear, column_parallel
from axonn_jax.tensor.norm import RMSNorm


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
Attend = Callable[[jax.Array, jax.Array, jax.Array, AttentionRule], tuple[jax.Array, Held]]
"""Attention function: queries, keys and values, the layer's rule -> attended values, and state that the function keeps,
as a cache."""


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
    q: jax.Array, k: jax.Array, v: jax.Array, sizes: Tiles, rule: AttentionRule, numbers: jax.Array | None
) -> jax.Array:
    """`blocked_attention` on [batch, seq, heads, head_dim], each KV head repeated for its queries."""
    batch, seq, heads, head_dim = q.shape
    group = heads // k.shape[2]

    def heads_first(a: jax.Array, repeat: int) -> jax.Array:
        a = jnp.repeat(a, repeat, axis=2) if repeat > 1 else a
        return a.transpose(0, 2, 1, 3).reshape(batch * heads, seq, head_dim)

    rows = None if numbers is None else jnp.repeat(numbers, heads, axis=0)
    out = blocked_attention(heads_first(q, 1), heads_first(k, group), heads_first(v, group), sizes, rule, rows)
    return out.reshape(batch, heads, seq, head_dim).transpose(0, 2, 1, 3)


def causal_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    kernel: AttentionKernel | Tiles = "auto",
    rule: AttentionRule = EVERY_TOKEN,
    numbers: jax.Array | None = None,
) -> jax.Array:
    """Softmax attention of each token over itself and the tokens before it, on local heads; no collectives.

    Shapes: `q` [batch, seq, heads, head_dim], `k` and `v` [batch, seq, kv_heads, head_dim] -> like `q`. A token sees
    the tokens that the `rule` has, and of these only such with its own number in `numbers` [batch, seq] (`Documents`).
    The form is that of `kernel_choice.choose_form` on the default backend's device; `Tiles` are the blocked one in such
    sizes.
    """
    if isinstance(kernel, Tiles):
        return _blocked(q, k, v, kernel, rule, numbers)
    device = compat.attention_device(jax.local_devices()[0], alone=not compat.varying_axes(q))
    form = choose_form(kernel, device, q.dtype.name, q.shape[-1], q.shape[1], rule, packed=numbers is not None)
    if form.kernel == "blocked":
        return _blocked(q, k, v, tiles(device.platform, q.shape[1]), rule, numbers)
    if form.kernel == "splash":
        return _splash(q, k, v)
    implementation: Any = form.kernel
    local_window = (rule.window - 1, 0) if rule.window else None
    same = None if numbers is None else (numbers[:, :, None] == numbers[:, None, :])[:, None]
    return jax.nn.dot_product_attention(
        q, k, v, mask=same, is_causal=True, local_window_size=local_window, implementation=implementation
    )


def _splash(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    import tokamax

    return tokamax.dot_product_attention(q, k, v, is_causal=True, implementation="mosaic_tpu")  # type: ignore[no-any-return]


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
        rule: AttentionRule,
        kernel: AttentionKernel | Tiles,
        key: jax.Array,
        comm: Comm = "all_reduce",
    ):
        self.head_dim, self.group = head_dim, heads // kv_heads
        self.rotation, self.kernel, self.rule = rotation, kernel, rule
        key_in, key_out = jax.random.split(key)
        wide = (heads + 2 * kv_heads) * head_dim
        self.qkv = Linear(hidden, wide, in_axis="x", bias=bias != "none", std=std, key=key_in, comm=comm)
        self.q_norm = None if norm_eps is None else RMSNorm(head_dim, eps=norm_eps, axis="")
        self.k_norm = None if norm_eps is None else RMSNorm(head_dim, eps=norm_eps, axis="")
        self.out = Linear(
            heads * head_dim, hidden, in_axis="y", bias=bias == "all", std=out_std, key=key_out, comm=comm
        )

    def __call__(self, x: jax.Array, documents: Documents | None = None, key: DropoutKey | None = None) -> jax.Array:
        """[batch, seq, hidden/Gx] -> same; collectives are those of its two `Linear` layers.

        With `comm` "sequence" `x` and the result are [batch, seq/Gy, hidden/Gx].
        """
        sequence = x.shape[1] * (axis_size(SEQUENCE_AXIS) if self.qkv.comm == "sequence" else 1)
        positions, numbers = (None, None) if documents is None else (documents.positions, documents.numbers)
        by = None if self.rotation is None else angles(self.rotation, sequence, positions)
        return self.merge(causal_attention(*self.project(x, by, key), self.kernel, self.rule, numbers), key)

    def project(
        self, x: jax.Array, by: Angles | None, key: DropoutKey | None = None
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Queries [batch, seq, heads, head_dim], keys and values [batch, seq, kv_heads, head_dim], local heads."""
        (qkv,) = column_parallel((self.qkv,), x, key)
        batch, seq, _ = qkv.shape
        qkv = qkv.reshape(batch, seq, -1, self.group + 2, self.head_dim)
        q = qkv[..., : self.group, :].reshape(batch, seq, -1, self.head_dim)
        k, v = qkv[..., self.group, :], qkv[..., self.group + 1, :]
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        return (q, k, v) if by is None else (rotary(q, by), rotary(k, by), v)

    def merge(self, attended: jax.Array, key: DropoutKey | None = None) -> jax.Array:
        """Project the outputs of local heads, [batch, seq, heads, head_dim], onto the residual stream."""
        return self.out(attended.reshape(*attended.shape[:2], -1), key)
