"""Causal self-attention with heads sharded over `y`, computed by the kernel that suits the device."""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from axonn_jax.core import compat
from axonn_jax.core.ops.layers import Comm
from axonn_jax.core.options import AttentionKernel, Bias
from axonn_jax.core.tensor.collectives import SEQUENCE_AXIS, axis_size
from axonn_jax.core.tensor.elementwise import DropoutKey
from axonn_jax.core.tensor.kernel_choice import EVERY_TOKEN, AttentionRule, Tiles, choose_form, tiles
from axonn_jax.core.tensor.kernels.blocked import blocked_attention
from axonn_jax.core.tensor.linear import Linear, column_parallel
from axonn_jax.core.tensor.norm import RMSNorm


class Rotation(NamedTuple):
    """Rotary embedding, which rotates pairs of features from one token to the next."""

    frequencies: tuple[float, ...]
    """Radians per token for each of the head_dim/2 pairs."""
    amplitude: float = 1.0
    """Factor applied to rotated features."""


class Documents(NamedTuple):
    """Boundaries of documents packed into rows, as arrays [batch, seq]."""

    numbers: jax.Array
    """Index of each token's document within its row, int32."""
    positions: jax.Array
    """Position of each token within its document, int32."""


State = TypeVar("State")
Attend = Callable[[jax.Array, jax.Array, jax.Array, AttentionRule], tuple[jax.Array, State]]
"""Attention function of queries, keys, values and the layer's rule; returns attended values and state, such as a cache.
"""


class Angles(NamedTuple):
    """Cosines and sines of each token's rotation angles, both [batch or 1, seq, 1, head_dim/2] float32."""

    cos: jax.Array
    sin: jax.Array


def angles(rotation: Rotation, length: int, positions: jax.Array | None = None) -> Angles:
    """Return the rotation angles of tokens.

    Args:
        rotation: The rotary embedding.
        length: Bound on the positions.
        positions: Positions [batch, seq], all below `length`; None for 0 to `length` - 1 in every row.
    """
    # In float64 on the host, so that angles are rounded only once, when the tables become float32.
    radians = np.outer(np.arange(length, dtype=np.float64), np.array(rotation.frequencies))

    def of_tokens(table: np.ndarray) -> jax.Array:
        values = jnp.asarray(rotation.amplitude * table, jnp.float32)
        return values[None, :, None, :] if positions is None else jnp.take(values, positions, axis=0)[:, :, None, :]

    return Angles(of_tokens(np.cos(radians)), of_tokens(np.sin(radians)))


def rotary(x: jax.Array, by: Angles) -> jax.Array:
    """Rotate features [batch, seq, heads, head_dim] (RoFormer, eq. 34), pairing the two halves as Llama does."""
    half = x.shape[-1] // 2
    first, second = x[..., :half].astype(jnp.float32), x[..., half:].astype(jnp.float32)
    turned = jnp.concatenate([first * by.cos - second * by.sin, second * by.cos + first * by.sin], -1)
    return turned.astype(x.dtype)


def _blocked(
    q: jax.Array, k: jax.Array, v: jax.Array, sizes: Tiles, rule: AttentionRule, numbers: jax.Array | None
) -> jax.Array:
    """Apply `blocked_attention` to [batch, seq, heads, head_dim], repeating each KV head for its group of queries."""
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
    """Compute causal softmax attention on local heads; no collectives.

    Args:
        q: [batch, seq, heads, head_dim].
        k: [batch, seq, kv_heads, head_dim].
        v: [batch, seq, kv_heads, head_dim].
        kernel: Kernel, as for `kernel_choice.choose_form` on the default backend's device; `Tiles` select the blocked
            kernel with these sizes.
        rule: The tokens that each token sees.
        numbers: Document index of each token, [batch, seq]; a token sees only its own document. None for one document.

    Returns:
        Attended values with the shape of `q`.
    """
    if isinstance(kernel, Tiles):
        return _blocked(q, k, v, kernel, rule, numbers)
    device = compat.attention_device(jax.local_devices()[0], single_device=not compat.varying_axes(q))
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
    import tokamax  # an optional dependency, for TPUs only

    return tokamax.dot_product_attention(q, k, v, is_causal=True, implementation="mosaic_tpu")  # type: ignore[no-any-return]


class Attention(nnx.Module):
    """Grouped-query self-attention with heads split over `y` (over `y` and `x` with `comm` "gather").

    The fused projection's columns are ordered by KV head: first its queries, then its key and its value. A shard
    therefore holds complete groups, and the stored layout is the same on every grid. `norm_eps` is the epsilon of the
    norms of queries and keys, None for no norms.
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
        """Apply attention to [batch, seq, hidden/Gx], or with `comm` "sequence" to [batch, seq/Gy, hidden/Gx].

        The result has the same shape; the collectives are those of the two `Linear` layers.
        """
        sequence = x.shape[1] * (axis_size(SEQUENCE_AXIS) if self.qkv.comm == "sequence" else 1)
        positions, numbers = (None, None) if documents is None else (documents.positions, documents.numbers)
        by = None if self.rotation is None else angles(self.rotation, sequence, positions)
        return self.merge(causal_attention(*self.project(x, by, key), self.kernel, self.rule, numbers), key)

    def project(
        self, x: jax.Array, by: Angles | None, key: DropoutKey | None = None
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return local queries [batch, seq, heads, head_dim], keys and values [batch, seq, kv_heads, head_dim]."""
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
