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
from axonn_jax.models.pieces import Piece, layer_scope, transformer_pieces
from axonn_jax.models.shape import ModelShape
from axonn_jax.models.stacked import Stacked
from axonn_jax.tensor.attention import Attention, AttentionKernel
from axonn_jax.tensor.collectives import vary
from axonn_jax.tensor.dropout import WHOLE, Part, dropout
from axonn_jax.tensor.embedding import Embedding, PositionEmbedding
from axonn_jax.tensor.gather import gather_weights
from axonn_jax.tensor.linear import Linear
from axonn_jax.tensor.loss import cross_entropy
from axonn_jax.tensor.norm import LayerNorm, RMSNorm

FLOAT32 = jnp.dtype("float32")

Streams = tuple[jax.Array, ...]
"""Equal parts of a microbatch's rows, side by side: one computes while another communicates."""

BlockFn = Callable[["Block", Streams, jax.Array | None, jax.Array | int], Streams]
"""Runs a block on (residual streams, dropout key, number of the layer); what an activation policy wraps."""


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
        """[batch, seq, hidden/Gx] -> same; collectives are those of its `Linear` layers.

        SwiGLU's gate and up projections have one all-reduce of dX over `y` between them.
        """
        if self.gate is None:
            return self.down(_gelu(self.up(x)))
        x = vary(x, ("y",))  # once for both: the backward pass adds their dX before it is all-reduced
        h = self.up(x)
        return self.down(_swiglu(self.gate(x), h))


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

    def __call__(self, x: jax.Array, key: jax.Array | None = None, part: Part = WHOLE) -> jax.Array:
        """[batch, seq, hidden/Gx] -> same; dropout where `key` is given, for the `part` of the rows that this is."""
        return self.feed(self.attend(x, key, part), key, part)

    def attend(self, x: jax.Array, key: jax.Array | None = None, part: Part = WHOLE) -> jax.Array:
        """The first half of a block: attention, added to the residual stream."""
        return x + self._drop(self.attention(self.attention_norm(x)), key, 0, part)

    def feed(self, x: jax.Array, key: jax.Array | None = None, part: Part = WHOLE) -> jax.Array:
        """The second half of a block: feed-forward, added to the residual stream."""
        return x + self._drop(self.mlp(self.mlp_norm(x)), key, 1, part)

    def _drop(self, branch: jax.Array, key: jax.Array | None, which: int, part: Part) -> jax.Array:
        if key is None or self.dropout == 0.0:
            return branch
        return dropout(branch, self.dropout, jax.random.fold_in(key, which), part)


def run_streams(block: Block, xs: Streams, key: jax.Array | None, layer: jax.Array | int) -> Streams:
    """Runs a block on every stream, whichever layer it is; several streams share its gathered weights."""
    if len(xs) == 1:
        return (block(xs[0], key),)
    block = gather_weights(block, xs[0].dtype)
    return tuple(block(x, key, (number, len(xs))) for number, x in enumerate(xs))


class Transformer(nnx.Module):
    """The model: embedding, blocks, final norm and projection onto the vocabulary.

    Every block draws its weights from a key of its own (folded with its index), so a stage that holds some of the
    blocks makes the same weights as a process that holds them all.
    """

    repeats = "blocks"
    """Where the layers are that can be stacked (`models.stacked`)."""

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
        self._check_length(tokens)
        return self._embed(self.embedding, (tokens,), dtype, key)[0]

    def _embed(self, embedding: Embedding, tokens: Streams, dtype: jnp.dtype, key: jax.Array | None) -> Streams:
        xs = [embedding(part, dtype) for part in tokens]
        if self.positions is not None:
            positions = self.positions(tokens[0].shape[1], dtype)
            xs = [x + positions for x in xs]
        if key is not None and self.shape.dropout > 0.0:
            key = jax.random.fold_in(key, self.shape.layers)
            xs = [dropout(x, self.shape.dropout, key, (i, len(xs))) for i, x in enumerate(xs)]
        return tuple(xs)

    def logits(self, x: jax.Array) -> jax.Array:
        """Residual stream -> scores of the local vocabulary shard [batch, seq, vocab/Gy]."""
        return self._logits(self.embedding, (x,))[0]

    def _logits(self, embedding: Embedding, xs: Streams) -> Streams:
        if self.head is None:
            return tuple(embedding.attend(self.norm(x)) for x in xs)
        head = gather_weights(self.head, xs[0].dtype) if len(xs) > 1 else self.head
        return tuple(head(self.norm(x)) for x in xs)

    def _check_length(self, tokens: jax.Array) -> None:
        if tokens.shape[1] > self.shape.seq_len:
            raise UserError("sequence length", tokens.shape[1], f"at most model.seq_len = {self.shape.seq_len}")

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
            with jax.named_scope(layer_scope(index)):
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
        run_block: BlockFn = run_streams,
    ) -> jax.Array:
        """Token ids [batch, seq] -> logits [batch, seq, vocab/Gy]; dropout where `key` is given."""
        self._check_length(tokens)
        return self._scores((tokens,), dtype, key, run_block)[0]

    def _scores(self, tokens: Streams, dtype: jnp.dtype, key: jax.Array | None, run_block: BlockFn) -> Streams:
        # Gathered once for all of its uses, whose gradients are then added before they are reduce-scattered.
        shared = len(tokens) > 1 or self.head is None
        embedding = gather_weights(self.embedding, dtype) if shared else self.embedding
        xs = self._embed(embedding, tokens, dtype, key)

        def run(block: Block, xs: Streams, index: jax.Array | int) -> Streams:
            return run_block(block, xs, None if key is None else jax.random.fold_in(key, index), index)

        blocks: nnx.List[Block] | Stacked = self.blocks
        if isinstance(blocks, Stacked):
            xs = blocks.run(run, xs)
        else:
            for index, block in enumerate(blocks):
                xs = run(block, xs, index)
        return self._logits(embedding, xs)

    def loss(
        self,
        tokens: jax.Array,
        targets: jax.Array,
        *,
        dtype: jnp.dtype = FLOAT32,
        key: jax.Array | None = None,
        run_block: BlockFn = run_streams,
        streams: int = 1,
    ) -> jax.Array:
        """Cross-entropy in nats of every target, [batch, seq] float32; collectives of the layers and the loss.

        With `streams` above 1 (a divisor of the local batch) the rows go through the model in as many independent
        parts, so that one part's all-reduces can run beside another's matmuls; bytes are the same, since the parts
        share gathered weights.
        """
        self._check_length(tokens)
        scores = self._scores(tuple(jnp.split(tokens, streams)), dtype, key, run_block)
        losses = [cross_entropy(s, part) for s, part in zip(scores, jnp.split(targets, streams), strict=True)]
        return jnp.concatenate(losses) if streams > 1 else losses[0]
