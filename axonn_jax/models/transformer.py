"""A decoder-only transformer made of 4D-sharded layers.

Call it inside one manual region (`jax.shard_map`). Local shapes: tokens [batch/(Gdata Gz), seq], residual stream
[batch/(Gdata Gz), seq, hidden/Gx], with sequence parallelism seq/Gy, logits [batch/(Gdata Gz), seq, vocab/Gy].
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P

from axonn_jax import compat
from axonn_jax.errors import UserError
from axonn_jax.grid import BATCH_AXES
from axonn_jax.models.inner import PAPERS, Inner
from axonn_jax.models.pieces import Piece, layer_scope, transformer_pieces
from axonn_jax.models.shape import ModelShape
from axonn_jax.models.stacked import Stacked
from axonn_jax.tensor.attention import Attention
from axonn_jax.tensor.attention_forms import AttentionKernel, Tiles
from axonn_jax.tensor.collectives import axis_size, gather_weight
from axonn_jax.tensor.dropout import WHOLE, Part, dropout
from axonn_jax.tensor.embedding import Embedding, PositionEmbedding
from axonn_jax.tensor.gather import gather_weights
from axonn_jax.tensor.linear import Linear, read_stream
from axonn_jax.tensor.loss import VOCAB_AXIS, Projection, masked, total_loss
from axonn_jax.tensor.norm import LayerNorm, RMSNorm
from axonn_jax.tensor.sequence import SEQUENCE_AXIS, gather_sequence

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

    def __init__(self, shape: ModelShape, *, out_std: float, key: jax.Array, sequence_parallel: bool, spread: bool):
        keys = jax.random.split(key, 3)
        self.sequence_parallel, self.spread = sequence_parallel, spread
        alike = {"bias": shape.bias, "sequence_parallel": sequence_parallel, "spread": spread}

        def widen(k: jax.Array) -> Linear:
            return Linear(shape.hidden, shape.ffn, in_axis="x", std=shape.init_std, key=k, **alike)

        self.gate = widen(keys[0]) if shape.mlp == "swiglu" else None
        self.up = widen(keys[1])
        self.down = Linear(shape.ffn, shape.hidden, in_axis="y", std=out_std, key=keys[2], **alike)

    def __call__(self, x: jax.Array, *, again: bool = False) -> jax.Array:
        """[batch, seq, hidden/Gx] -> same; collectives are those of its `Linear` layers, `again` as in `read_stream`.

        SwiGLU's gate and up projections have one reduction of dX over `y` between them.
        """
        layers = (self.up,) if self.gate is None else (self.up, self.gate)
        h, *gate = read_stream(layers, x, split=self.sequence_parallel, again=again, spread=self.spread)
        return self.down(_swiglu(*gate, h) if gate else _gelu(h))


class Block(nnx.Module):
    """Pre-norm transformer block: attention, then feed-forward, each added to the residual stream."""

    def __init__(
        self,
        shape: ModelShape,
        *,
        attention: AttentionKernel | Tiles,
        key: jax.Array,
        sequence_parallel: bool,
        inner: Inner,
    ):
        key_attention, key_mlp = jax.random.split(key)
        out_std = shape.init_std / (2 * shape.layers) ** 0.5
        self.dropout, self.sequence_parallel = shape.dropout, sequence_parallel
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
            sequence_parallel=sequence_parallel,
            spread=inner.attention,
        )
        self.mlp_norm = _norm(shape)
        split = sequence_parallel
        self.mlp = Mlp(shape, out_std=out_std, key=key_mlp, sequence_parallel=split, spread=inner.mlp)

    def __call__(
        self, x: jax.Array, key: jax.Array | None = None, part: Part = WHOLE, again: bool = False
    ) -> jax.Array:
        """[batch, seq, hidden/Gx] -> same; dropout where `key` is given, for the `part` of the rows that this is.

        `again` says that the backward pass gathers a split stream again (`read_stream`).
        """
        return self.feed(self.attend(x, key, part, again), key, part, again)

    def attend(self, x: jax.Array, key: jax.Array | None = None, part: Part = WHOLE, again: bool = False) -> jax.Array:
        """The first half of a block: attention, added to the residual stream."""
        return x + self._drop(self.attention(self.attention_norm(x), again=again), key, 0, part)

    def feed(self, x: jax.Array, key: jax.Array | None = None, part: Part = WHOLE, again: bool = False) -> jax.Array:
        """The second half of a block: feed-forward, added to the residual stream."""
        return x + self._drop(self.mlp(self.mlp_norm(x), again=again), key, 1, part)

    def _drop(self, branch: jax.Array, key: jax.Array | None, which: int, part: Part) -> jax.Array:
        if key is None or self.dropout == 0.0:
            return branch
        key = jax.random.fold_in(key, which)
        return dropout(branch, self.dropout, key, part, sequence_parallel=self.sequence_parallel)


def run_streams(
    block: Block, xs: Streams, key: jax.Array | None, layer: jax.Array | int, *, again: bool = False
) -> Streams:
    """Runs a block on every stream, whichever layer it is; several streams share its gathered weights.

    `again` is the block's.
    """
    if len(xs) == 1:
        return (block(xs[0], key, WHOLE, again),)
    block = gather_weights(block, xs[0].dtype)
    return tuple(block(x, key, (number, len(xs)), again) for number, x in enumerate(xs))


class Transformer(nnx.Module):
    """The model: embedding, blocks, final norm and projection onto the vocabulary.

    Every block draws its weights from a key of its own (folded with its index), so a stage that holds some of the
    blocks makes the same weights as a process that holds them all. `sequence_parallel` splits the sequence of the
    residual stream over `y` (`tensor.sequence`), `inner` how features inside blocks are; parameters and results stay.
    """

    repeats = "blocks"
    """Where the layers are that can be stacked (`models.stacked`)."""

    def __init__(
        self,
        shape: ModelShape,
        *,
        rngs: nnx.Rngs,
        attention: AttentionKernel | Tiles = "auto",
        sequence_parallel: bool = False,
        inner: Inner = PAPERS,
    ):
        root = rngs.params()
        self.shape, self.sequence_parallel, self.inner = shape, sequence_parallel, inner
        hidden, std, split = shape.hidden, shape.init_std, sequence_parallel

        def key(place: int) -> jax.Array:
            return jax.random.fold_in(root, place)

        last = shape.layers
        mesh = compat.context_mesh()  # on which parameters are born; where there is none `models.vocabulary` pads later
        rows = shape.padded_vocab(1 if mesh is None else mesh.shape.get("y", 1) * mesh.shape.get("z", 1))
        self.embedding = Embedding(shape.vocab, hidden, std=std, key=key(last), sequence_parallel=split, rows=rows)
        self.positions = (
            PositionEmbedding(shape.seq_len, hidden, std=std, key=key(last + 1), sequence_parallel=split)
            if shape.positions == "learned"
            else None
        )
        self.blocks = nnx.List(
            [Block(shape, attention=attention, key=key(i), sequence_parallel=split, inner=inner) for i in range(last)]
        )
        self.norm = _norm(shape)
        self.head = (
            None
            if shape.tied
            else Linear(
                hidden,
                shape.vocab,
                in_axis="x",
                bias=False,
                std=std,
                key=key(last + 2),
                sequence_parallel=split,
                columns=rows,
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
            split, rate = self.sequence_parallel, self.shape.dropout
            xs = [dropout(x, rate, key, (i, len(xs)), sequence_parallel=split) for i, x in enumerate(xs)]
        return tuple(xs)

    def _logits(self, embedding: Embedding, x: jax.Array) -> jax.Array:
        """Residual stream -> scores of the local vocabulary shard [batch, seq, vocab/Gy]; minus infinity beyond it."""
        found = embedding.attend(self.norm(x)) if self.head is None else self.head(self.norm(x))
        return masked(found, self._used(found.shape[-1]))

    def _used(self, columns: int) -> int | None:
        """The vocabulary, where its `columns` on all devices are more."""
        return self.shape.vocab if columns * axis_size(VOCAB_AXIS) > self.shape.vocab else None

    def _total(self, embedding: Embedding, xs: Streams, targets: jax.Array, weights: jax.Array | None) -> jax.Array:
        """The loss of residual streams, whose weight of the head is gathered once for all."""
        layer, weight = (embedding, embedding.table) if self.head is None else (self.head, self.head.kernel)
        whole = gather_weight(weight.get_value(), xs[0].dtype)
        turned = self.head is None
        projection = Projection(whole, turned, layer.layouts, self._used(whole.shape[0 if turned else 1]))

        def split(rows: jax.Array | None) -> Sequence[jax.Array | None]:
            return [None] * len(xs) if rows is None else jnp.split(rows, len(xs))

        def loss(x: jax.Array, targets: jax.Array | None, weights: jax.Array | None) -> jax.Array:
            assert targets is not None
            h = self.norm(x)
            return total_loss(gather_sequence(h) if self.sequence_parallel else h, projection, targets, weights)

        first, *others = map(loss, xs, split(targets), split(weights))
        return sum(others, first)

    def _check_length(self, tokens: jax.Array) -> None:
        if tokens.shape[1] > self.shape.seq_len:
            raise UserError("sequence length", tokens.shape[1], f"at most model.seq_len = {self.shape.seq_len}")
        parts = axis_size(SEQUENCE_AXIS) if self.sequence_parallel else 1
        if tokens.shape[1] % parts:
            raise UserError("sequence length", tokens.shape[1], f"with sequence parallelism a multiple of y = {parts}")

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """The model as a sequence: embedding, the halves of every block, the head with the loss."""
        return transformer_pieces(self.shape)

    @property
    def between(self) -> P:
        """Layout of what one piece hands to the next, [batch, seq, hidden]."""
        return P(BATCH_AXES, SEQUENCE_AXIS if self.sequence_parallel else None, "x")

    def stretch(
        self,
        first: int,
        last: int,
        x: jax.Array | None,
        tokens: jax.Array | None,
        *,
        dtype: jnp.dtype = FLOAT32,
        key: jax.Array | None = None,
        later: jax.Array | int = 0,
        weights: jax.Array | None = None,
    ) -> jax.Array:
        """Runs pieces `first` to `last - 1`; `tokens` [batch, seq + 1] is read by the first and the last piece.

        Takes and gives the residual stream, except that piece 0 takes none, and the last piece gives the sum that
        `loss` does. Blocks drop out what those `later` by so many would.
        """
        end = len(self.blocks) * 2 + 1
        if first == 0:
            assert tokens is not None
            x = self.embed(tokens[:, :-1], dtype, key)
        assert x is not None
        for piece in range(max(first, 1), min(last, end)):
            index, half = divmod(piece - 1, 2)
            block = self.blocks[index]
            key_here = None if key is None else jax.random.fold_in(key, index + later)
            with jax.named_scope(layer_scope(index)):
                x = block.attend(x, key_here) if half == 0 else block.feed(x, key_here)
        if last <= end:
            return x
        assert tokens is not None
        return self._total(self.embedding, (x,), tokens[:, 1:], weights)

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
        embedding, (x,) = self._run((tokens,), dtype, key, run_block)
        return self._logits(embedding, x)

    def _run(
        self, tokens: Streams, dtype: jnp.dtype, key: jax.Array | None, run_block: BlockFn
    ) -> tuple[Embedding, Streams]:
        """All but the head: the embedding as the head uses it, and residual streams."""
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
        return embedding, xs

    def loss(
        self,
        tokens: jax.Array,
        targets: jax.Array,
        *,
        dtype: jnp.dtype = FLOAT32,
        key: jax.Array | None = None,
        run_block: BlockFn = run_streams,
        streams: int = 1,
        weights: jax.Array | None = None,
    ) -> jax.Array:
        """Sum of the cross-entropy in nats of every target, a float32 scalar; collectives of layers and loss.

        `weights` [batch, seq] say what each target counts (left out: one); to them there is no gradient. With `streams`
        above 1 (a divisor of the local batch) the rows go through the model in as many independent parts, so that one
        part's all-reduces can run beside another's matmuls; bytes are the same, since the parts share gathered weights.
        """
        self._check_length(tokens)
        embedding, xs = self._run(tuple(jnp.split(tokens, streams)), dtype, key, run_block)
        return self._total(embedding, xs, targets, weights)
