"""A decoder-only transformer made of 4D-sharded layers.

Call it inside one manual region (`jax.shard_map`). Local shapes: tokens [batch/(Gdata Gz), seq], residual stream
[batch/(Gdata Gz), seq, hidden/Gx], logits [batch/(Gdata Gz), seq, vocab/Gy].
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P

from axonn_jax.errors import UserError
from axonn_jax.grid import BATCH_AXES
from axonn_jax.models.pieces import Piece, transformer_pieces
from axonn_jax.models.shape import ModelShape
from axonn_jax.tensor.attention import Attention, AttentionKernel
from axonn_jax.tensor.dropout import dropout
from axonn_jax.tensor.embedding import Embedding, PositionEmbedding
from axonn_jax.tensor.linear import Linear
from axonn_jax.tensor.loss import cross_entropy
from axonn_jax.tensor.norm import LayerNorm, RMSNorm

FLOAT32 = jnp.dtype("float32")

BlockFn = Callable[["Block", jax.Array, jax.Array | None], jax.Array]
"""Runs a block on (residual stream, dropout key); what an activation policy wraps."""


def _norm(shape: ModelShape) -> LayerNorm | RMSNorm:
    kind = LayerNorm if shape.norm == "layernorm" else RMSNorm
    return kind(shape.hidden, eps=shape.norm_eps)


# Both keep their inputs for the backward pass and nothing in between: what they compute again is cheaper than the
# memory it would pass through.
_gelu = jax.checkpoint(lambda h: jax.nn.gelu(h, approximate=True))
_swiglu = jax.checkpoint(lambda gate, h: jax.nn.silu(gate) * h)


class Mlp(nnx.Module):
    """Two matmuls around GELU, or SwiGLU's three."""

    def __init__(self, shape: ModelShape, *, out_std: float, key: jax.Array):
        keys = jax.random.split(key, 3)

        def widen(k: jax.Array) -> Linear:
            return Linear(shape.hidden, shape.ffn, in_axis="x", bias=shape.bias, std=shape.init_std, key=k)

        self.gate = widen(keys[0]) if shape.mlp == "swiglu" else None
        self.up = widen(keys[1])
        self.down = Linear(shape.ffn, shape.hidden, in_axis="y", bias=shape.bias, std=out_std, key=keys[2])

    def __call__(self, x: jax.Array) -> jax.Array:
        """[batch, seq, hidden/Gx] -> same; collectives are those of its `Linear` layers."""
        h = self.up(x)
        return self.down(_gelu(h) if self.gate is None else _swiglu(self.gate(x), h))


class Block(nnx.Module):
    """Pre-norm transformer block: attention, then feed-forward, each added to the residual stream."""

    def __init__(self, shape: ModelShape, *, attention: AttentionKernel, key: jax.Array):
        key_attention, key_mlp = jax.random.split(key)
        out_std = shape.init_std / (2 * shape.layers) ** 0.5
        self.dropout = shape.dropout
        self.attention_norm = _norm(shape)
        self.attention = Attention(
            shape.hidden,
            shape.heads,
            shape.kv_heads,
            bias=shape.bias,
            std=shape.init_std,
            out_std=out_std,
            rope_theta=shape.rope_theta if shape.positions == "rope" else None,
            kernel=attention,
            key=key_attention,
        )
        self.mlp_norm = _norm(shape)
        self.mlp = Mlp(shape, out_std=out_std, key=key_mlp)

    def __call__(self, x: jax.Array, key: jax.Array | None = None) -> jax.Array:
        """[batch, seq, hidden/Gx] -> same; dropout where `key` is given."""
        return self.feed(self.attend(x, key), key)

    def attend(self, x: jax.Array, key: jax.Array | None = None) -> jax.Array:
        """The first half of a block: attention, added to the residual stream."""
        return x + self._drop(self.attention(self.attention_norm(x)), key, 0)

    def feed(self, x: jax.Array, key: jax.Array | None = None) -> jax.Array:
        """The second half of a block: feed-forward, added to the residual stream."""
        return x + self._drop(self.mlp(self.mlp_norm(x)), key, 1)

    def _drop(self, branch: jax.Array, key: jax.Array | None, which: int) -> jax.Array:
        if key is None or self.dropout == 0.0:
            return branch
        return dropout(branch, self.dropout, jax.random.fold_in(key, which))


def _run_block(block: Block, x: jax.Array, key: jax.Array | None) -> jax.Array:
    return block(x, key)


class Transformer(nnx.Module):
    """The model: embedding, blocks, final norm and projection onto the vocabulary.

    Every block draws its weights from a key of its own (folded with its index), so a stage that holds some of the
    blocks makes the same weights as a process that holds them all.
    """

    def __init__(self, shape: ModelShape, *, rngs: nnx.Rngs, attention: AttentionKernel = "auto"):
        key = rngs.params()
        self.shape = shape
        self.embedding = Embedding(
            shape.vocab, shape.hidden, std=shape.init_std, key=jax.random.fold_in(key, shape.layers)
        )
        self.positions = (
            PositionEmbedding(
                shape.seq_len,
                shape.hidden,
                std=shape.init_std,
                key=jax.random.fold_in(key, shape.layers + 1),
            )
            if shape.positions == "learned"
            else None
        )
        self.blocks = nnx.List(
            [Block(shape, attention=attention, key=jax.random.fold_in(key, i)) for i in range(shape.layers)]
        )
        self.norm = _norm(shape)
        self.head = (
            None
            if shape.tied
            else Linear(
                shape.hidden,
                shape.vocab,
                in_axis="x",
                bias=False,
                std=shape.init_std,
                key=jax.random.fold_in(key, shape.layers + 2),
            )
        )

    def embed(self, tokens: jax.Array, dtype: jnp.dtype, key: jax.Array | None = None) -> jax.Array:
        """Token ids [batch, seq] -> residual stream in `dtype`, which every later layer computes in."""
        if tokens.shape[1] > self.shape.seq_len:
            raise UserError("sequence length", tokens.shape[1], f"at most model.seq_len = {self.shape.seq_len}")
        x = self.embedding(tokens, dtype)
        if self.positions is not None:
            x = x + self.positions(tokens.shape[1], dtype)
        if key is not None and self.shape.dropout > 0.0:
            x = dropout(x, self.shape.dropout, jax.random.fold_in(key, self.shape.layers))
        return x

    def logits(self, x: jax.Array) -> jax.Array:
        """Residual stream -> scores of the local vocabulary shard [batch, seq, vocab/Gy]."""
        h = self.norm(x)
        return self.embedding.attend(h) if self.head is None else self.head(h)

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """The model as a sequence: embedding, the halves of every block, the head with the loss."""
        return transformer_pieces(self.shape)

    @property
    def between(self) -> P:
        """Layout of what one piece hands to the next, [batch, seq, hidden]."""
        return P(BATCH_AXES, None, "x")

    def stretch(
        self,
        first: int,
        last: int,
        x: jax.Array | None,
        tokens: jax.Array | None,
        *,
        dtype: jnp.dtype = FLOAT32,
        key: jax.Array | None = None,
    ) -> jax.Array:
        """Runs pieces `first` to `last - 1`; `tokens` [batch, seq + 1] is read by the first and the last piece.

        Takes and gives the residual stream, except that piece 0 takes none, and the last piece gives the
        cross-entropy of every target [batch, seq] float32.
        """
        end = len(self.blocks) * 2 + 1
        if first == 0:
            assert tokens is not None
            x = self.embed(tokens[:, :-1], dtype, key)
        assert x is not None
        for piece in range(max(first, 1), min(last, end)):
            index, half = divmod(piece - 1, 2)
            block = self.blocks[index]
            key_here = None if key is None else jax.random.fold_in(key, index)
            x = block.attend(x, key_here) if half == 0 else block.feed(x, key_here)
        if last <= end:
            return x
        assert tokens is not None
        return cross_entropy(self.logits(x), tokens[:, 1:])

    def __call__(
        self,
        tokens: jax.Array,
        *,
        dtype: jnp.dtype = FLOAT32,
        key: jax.Array | None = None,
        run_block: BlockFn = _run_block,
    ) -> jax.Array:
        """Token ids [batch, seq] -> logits [batch, seq, vocab/Gy]; dropout where `key` is given."""
        x = self.embed(tokens, dtype, key)
        for index, block in enumerate(self.blocks):
            x = run_block(block, x, None if key is None else jax.random.fold_in(key, index))
        return self.logits(x)

    def loss(
        self,
        tokens: jax.Array,
        targets: jax.Array,
        *,
        dtype: jnp.dtype = FLOAT32,
        key: jax.Array | None = None,
        run_block: BlockFn = _run_block,
    ) -> jax.Array:
        """Cross-entropy in nats of every target, [batch, seq] float32; collectives of the layers and the loss."""
        return cross_entropy(self(tokens, dtype=dtype, key=key, run_block=run_block), targets)
