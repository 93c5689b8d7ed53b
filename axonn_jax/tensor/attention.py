"""Causal self-attention with heads sharded over `y`."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from axonn_jax import compat
from axonn_jax.tensor.attention_forms import AttentionKernel, Tiles, choose_form, tiles
from axonn_jax.tensor.blocked_attention import blocked_attention
from axonn_jax.tensor.linear import Linear, TensorAxis, read_stream


def rotary(x: jax.Array, theta: float) -> jax.Array:
    """Rotates features [batch, seq, heads, head_dim] by position (RoFormer, eq. 34; halves layout as in Llama)."""
    half = x.shape[-1] // 2
    # numpy in float64: a float32 power would cost the low bits of the angle at far positions
    frequencies = theta ** -(np.arange(half, dtype=np.float64) / half)
    angles = np.outer(np.arange(x.shape[1], dtype=np.float64), frequencies)
    cos = jnp.asarray(np.cos(angles), jnp.float32)[None, :, None, :]
    sin = jnp.asarray(np.sin(angles), jnp.float32)[None, :, None, :]
    first, second = x[..., :half].astype(jnp.float32), x[..., half:].astype(jnp.float32)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1)
    return turned.astype(x.dtype)


def _blocked(q: jax.Array, k: jax.Array, v: jax.Array, sizes: Tiles) -> jax.Array:
    """`blocked_attention` on [batch, seq, heads, head_dim], each KV head repeated for its queries."""
    batch, seq, heads, head_dim = q.shape
    group = heads // k.shape[2]

    def heads_first(a: jax.Array, repeat: int) -> jax.Array:
        a = jnp.repeat(a, repeat, axis=2) if repeat > 1 else a
        return a.transpose(0, 2, 1, 3).reshape(batch * heads, seq, head_dim)

    out = blocked_attention(heads_first(q, 1), heads_first(k, group), heads_first(v, group), sizes)
    return out.reshape(batch, heads, seq, head_dim).transpose(0, 2, 1, 3)


def causal_attention(q: jax.Array, k: jax.Array, v: jax.Array, kernel: AttentionKernel | Tiles = "auto") -> jax.Array:
    """Softmax attention of each token over itself and the tokens before it, on local heads; no collectives.

    Shapes: `q` [batch, seq, heads, head_dim], `k` and `v` [batch, seq, kv_heads, head_dim] -> like `q`. The form is
    that of `attention_forms.choose_form` on the default backend's device; `Tiles` are the blocked one in such sizes.
    """
    if isinstance(kernel, Tiles):
        return _blocked(q, k, v, kernel)
    device = compat.attention_device(jax.local_devices()[0], alone=not compat.varying_axes(q))
    form = choose_form(kernel, device, q.dtype.name, q.shape[-1], q.shape[1])
    if form.kernel == "blocked":
        return _blocked(q, k, v, tiles(device.platform, q.shape[1]))
    if form.kernel == "splash":
        return _splash(q, k, v)
    implementation: Any = form.kernel
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=implementation)


def _splash(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    import tokamax

    return tokamax.dot_product_attention(q, k, v, is_causal=True, implementation="mosaic_tpu")  # type: ignore[no-any-return]


class Attention(nnx.Module):
    """Grouped-query self-attention: heads over `y`, the fused projection's columns ordered by KV head.

    A KV head's columns are its queries, its key, its value, side by side; so a `y` shard holds whole groups and
    the stored layout is the same on every grid. With `spread` heads are over `y` and `x`.
    """

    def __init__(
        self,
        hidden: int,
        heads: int,
        kv_heads: int,
        *,
        bias: bool,
        std: float,
        out_std: float,
        rope_theta: float | None,
        kernel: AttentionKernel | Tiles,
        key: jax.Array,
        sequence_parallel: bool = False,
        spread: bool = False,
    ):
        self.head_dim, self.group = hidden // heads, heads // kv_heads
        self.rope_theta, self.kernel = rope_theta, kernel
        self.sequence_parallel, self.spread = sequence_parallel, spread
        key_in, key_out = jax.random.split(key)
        width = (heads + 2 * kv_heads) * self.head_dim

        def linear(out: int, in_axis: TensorAxis, std: float, key: jax.Array) -> Linear:
            layout = {"sequence_parallel": sequence_parallel, "spread": spread}
            return Linear(hidden, out, in_axis=in_axis, bias=bias, std=std, key=key, **layout)

        self.qkv = linear(width, "x", std, key_in)
        self.out = linear(hidden, "y", out_std, key_out)

    def __call__(self, x: jax.Array, *, again: bool = False) -> jax.Array:
        """[batch, seq, hidden/Gx] -> same; collectives are those of its two `Linear` layers.

        With sequence parallelism `x` and the result are [batch, seq/Gy, hidden/Gx]; `again` is for `read_stream`.
        """
        (qkv,) = read_stream((self.qkv,), x, split=self.sequence_parallel, again=again, spread=self.spread)
        batch, seq, _ = qkv.shape
        qkv = qkv.reshape(batch, seq, -1, self.group + 2, self.head_dim)
        q = qkv[..., : self.group, :].reshape(batch, seq, -1, self.head_dim)
        k, v = qkv[..., self.group, :], qkv[..., self.group + 1, :]
        if self.rope_theta is not None:
            q, k = rotary(q, self.rope_theta), rotary(k, self.rope_theta)
        attended = causal_attention(q, k, v, self.kernel)
        return self.out(attended.reshape(batch, seq, -1))
