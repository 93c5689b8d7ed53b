"""Decoder-only transformer made of 4D-sharded layers."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P

from axonn_jax.core import compat
from axonn_jax.core.errors import UserError, typed_arguments
from axonn_jax.core.experts.layer import MixtureOfExperts
from axonn_jax.core.experts.load import Loads
from axonn_jax.core.experts.shape import MoeConfig
from axonn_jax.core.grid import BATCH_AXES, GridShape
from axonn_jax.core.models.block_comm import ALL_REDUCE, BlockComm
from axonn_jax.core.models.config import ModelShape
from axonn_jax.core.models.declared.segments import Segment, transformer_segments
from axonn_jax.core.models.packed import Residual, Stream, balance_of, ids_of, stream_of, values_of
from axonn_jax.core.models.rope import amplitude, frequencies
from axonn_jax.core.models.stacked import run_layers
from axonn_jax.core.options import AttentionKernel
from axonn_jax.core.tensor.attention import Angles, Attend, Attention, Documents, Rotation, State, angles
from axonn_jax.core.tensor.collectives import SEQUENCE_AXIS, axis_size, gather_sequence
from axonn_jax.core.tensor.elementwise import DropoutKey, activated, capped, dropout
from axonn_jax.core.tensor.embedding import Embedding, PositionEmbedding
from axonn_jax.core.tensor.kernel_choice import Tiles
from axonn_jax.core.tensor.linear import Linear, column_parallel
from axonn_jax.core.tensor.loss import VOCAB_AXIS, Projection, masked, total_loss
from axonn_jax.core.tensor.norm import LayerNorm, RMSNorm
from axonn_jax.core.tensor.params import portable_keys
from axonn_jax.core.tensor.weight_gather import gather_weight

FLOAT32 = jnp.dtype("float32")

# Local shapes: tokens [batch/(Gdata Gz), seq], residual stream [batch/(Gdata Gz), seq, hidden/Gx] (seq/Gy if it is
# split), logits [batch/(Gdata Gz), seq, vocab/Gy].

# Save only the activation's inputs for the backward pass: recomputing is cheaper than going through memory.
_activated = jax.checkpoint(activated, static_argnums=(0,))


def _norm(shape: ModelShape) -> LayerNorm | RMSNorm:
    if shape.norm == "layernorm":
        return LayerNorm(shape.hidden, eps=shape.norm_eps)
    return RMSNorm(shape.hidden, eps=shape.norm_eps, offset=1.0 if shape.norm == "rmsnorm_1p" else 0.0)


def _rotation(shape: ModelShape) -> Rotation | None:
    if shape.positions != "rope":
        return None
    # Queries and keys each take the square root of the change from 1/sqrt(head_dim) to 1/sqrt(score_dim).
    factor = amplitude(shape) * (shape.head_dim / shape.score_dim) ** 0.25
    return Rotation(tuple(frequencies(shape).tolist()), factor)


class Mlp(nnx.Module):
    """Feed-forward layer: two matmuls around an activation function, or three with a gate."""

    def __init__(self, shape: ModelShape, comm: BlockComm, *, out_std: float, key: jax.Array):
        keys = jax.random.split(key, 3)
        linear = partial(Linear, bias=shape.bias == "all", comm=comm.of(comm.mlp))
        up = partial(linear, shape.hidden, shape.ffn, in_axis="x", std=shape.init_std)
        self.kind = shape.mlp
        self.gate = up(key=keys[0]) if shape.mlp_inputs == 2 else None
        self.up = up(key=keys[1])
        self.down = linear(shape.ffn, shape.hidden, in_axis="y", std=out_std, key=keys[2])

    def __call__(self, x: jax.Array, key: DropoutKey | None = None) -> jax.Array:
        """Map [batch, seq, hidden/Gx] to the same shape; `key` drops inputs of adapters; collectives: `Linear`."""
        if self.gate is None:
            (h,) = column_parallel((self.up,), x, key)
            return self.down(_activated(self.kind, None, h), key)
        h, gate = column_parallel((self.up, self.gate), x, key)
        return self.down(_activated(self.kind, gate, h), key)


class Block(nnx.Module):
    """Pre-norm transformer block; `shape.post_norms` normalizes each branch again before it is added."""

    def __init__(
        self, shape: ModelShape, comm: BlockComm, index: int, *,
        attention: AttentionKernel | Tiles, training: MoeConfig, key: jax.Array,
    ):  # fmt: skip
        key_attention, key_mlp = jax.random.split(key)
        out_std = shape.init_std / (2 * shape.layers) ** 0.5
        self.dropout, self.sequence_split = shape.dropout, comm.sequence_split
        self.attention_norm = _norm(shape)
        self.attention = Attention(
            shape.hidden,
            shape.heads,
            shape.kv_heads,
            head_dim=shape.head_dim,
            bias=shape.bias,
            std=shape.init_std,
            out_std=out_std,
            rotation=_rotation(shape),
            norm_eps=shape.norm_eps if shape.qk_norm else None,
            rule=shape.attention_rule(index),
            kernel=attention,
            key=key_attention,
            comm=comm.of(comm.attention),
        )
        self.mlp_norm = _norm(shape)
        self.attention_post_norm = _norm(shape) if shape.post_norms else None
        self.mlp_post_norm = _norm(shape) if shape.post_norms else None
        moe, self.balance_weight = shape.experts_of(index), training.balance_weight
        self.mlp: Mlp | MixtureOfExperts
        if moe is None:
            self.mlp = Mlp(shape, comm, out_std=out_std, key=key_mlp)
            return
        wide = replace(shape, ffn=moe.shared * moe.ffn, bias="none") if moe.shared else None
        shared = None if wide is None else partial(Mlp, wide, comm, out_std=out_std)
        mixture = partial(MixtureOfExperts, shape.hidden, moe, shape.mlp, shared, std=shape.init_std, out_std=out_std)
        self.mlp = mixture(training=training, sequence_split=comm.sequence_split, key=key_mlp)

    def __call__(self, x: Stream, key: DropoutKey | None = None) -> Stream:
        """Map the stream [batch, seq, hidden/Gx] to the same shape, with dropout if a `key` is given."""
        return self.feed_forward(self.attend(x, key), key)

    def attend(self, x: Stream, key: DropoutKey | None = None, documents: Documents | None = None) -> Stream:
        """Run the first half of the block, attention."""
        if isinstance(x, Residual):
            return x._replace(values=values_of(self.attend(x.values, key, x.documents)))
        return x + self._branch(self.attention(self.attention_norm(x), documents, key), key, 0)

    def attend_by(self, attend: Attend[State], x: jax.Array, by: Angles | None) -> tuple[jax.Array, State]:
        """Run the first half with the attention function `attend`; return the output and the function's state."""
        attended, state = attend(*self.attention.project(self.attention_norm(x), by), self.attention.rule)
        return x + self._branch(self.attention.merge(attended), None, 0), state

    def feed_forward(self, x: Stream, key: DropoutKey | None = None) -> Stream:
        """Run the second half of the block, the feed-forward layer or the experts."""
        values = values_of(x)
        if isinstance(self.mlp, Mlp):
            branch, balance = self.mlp(self.mlp_norm(values), key), None
        else:
            branch, balance = self.mlp(self.mlp_norm(values), x.packing if isinstance(x, Residual) else None)
        values = values + self._branch(branch, key, 1)
        if not isinstance(x, Residual):
            return values
        more = 0.0 if x.balance is None or balance is None else self.balance_weight * balance
        return x._replace(values=values, balance=None if x.balance is None else x.balance + more)

    def _branch(self, branch: jax.Array, key: DropoutKey | None, half: int) -> jax.Array:
        norm = self.mlp_post_norm if half else self.attention_post_norm
        branch = branch if norm is None else norm(branch)
        if key is None or self.dropout == 0.0:
            return branch
        return dropout(branch, self.dropout, key.fold_in(half), sequence_split=self.sequence_split)


class Transformer(nnx.Module):
    """Decoder-only transformer; called inside a single manual region (`jax.shard_map`), or unsharded outside any.

    Args:
        shape: Sizes of the model.
        rngs: Random streams; `params` seeds the weights.
        attention: Attention kernel.
        comm: Communication of the blocks with the residual stream; parameters and results do not depend on it.
        packed: True if batches are packed rows of `models.packed`, whose documents do not attend to each other.
        moe: Dispatch and balance of experts.
    """

    layer_list = "blocks"

    @typed_arguments
    def __init__(
        self, shape: ModelShape, *, rngs: nnx.Rngs, attention: AttentionKernel | Tiles = "auto",
        comm: BlockComm = ALL_REDUCE, packed: bool = False, moe: MoeConfig = MoeConfig(),  # noqa: B008
    ):  # fmt: skip
        self.shape, self.comm, self.packed, self.moe = shape, comm, packed, moe
        self.balanced = shape.moe is not None and moe.balance_weight > 0.0
        self.reads_words = packed or shape.moe is not None
        self.vocab, self.seq_len, self.layer_period = shape.vocab, shape.seq_len, shape.layer_period
        self.drops_out = shape.dropout > 0.0
        layers, hidden, std, split = shape.layers, shape.hidden, shape.init_std, comm.sequence_split
        self.residual_spec = P(BATCH_AXES, SEQUENCE_AXIS if split else None, "x")
        self.token_axes = (*BATCH_AXES, SEQUENCE_AXIS) if split else BATCH_AXES
        # One key per block, so that a stage that holds some blocks initializes them like a process that holds all.
        keys = portable_keys(rngs.params(), layers + 3)
        # Parameters are created sharded on the context's mesh; without one, `models.vocabulary` pads the table later.
        mesh = compat.context_mesh()
        vocab = shape.padded_vocab(1 if mesh is None else mesh.shape.get("y", 1) * mesh.shape.get("z", 1))
        self.embedding = Embedding(shape.vocab, hidden, std=std, key=keys[layers], sequence_split=split, rows=vocab)
        self.positions = (
            PositionEmbedding(shape.seq_len, hidden, std=std, key=keys[layers + 1], sequence_split=split)
            if shape.positions == "learned"
            else None
        )
        block = partial(Block, shape, comm, attention=attention, training=moe)
        self.blocks = nnx.List([block(index, key=keys[index]) for index in range(layers)])
        self.norm = _norm(shape)
        head = partial(Linear, hidden, shape.vocab, in_axis="x", bias=False, comm=comm.of(False), columns=vocab)
        self.head = None if shape.tied else head(std=std, key=keys[layers + 2])

    def __call__(self, tokens: jax.Array, *, dtype: jnp.dtype = FLOAT32, key: DropoutKey | None = None) -> jax.Array:
        """Return logits [batch, seq, vocab/Gy] for token ids [batch, seq], with dropout if a `key` is given."""
        return self.logits(self._residual(tokens, dtype, key))

    def loss(
        self, tokens: jax.Array, targets: jax.Array, *, dtype: jnp.dtype = FLOAT32, key: DropoutKey | None = None
    ) -> jax.Array:
        """Return `total_loss` for token ids and targets [batch, seq]."""
        return self.total_loss(self._residual(tokens, dtype, key), targets)

    def _residual(self, tokens: jax.Array, dtype: jnp.dtype, key: DropoutKey | None) -> Stream:
        def run(block: Block, x: Stream, index: jax.Array | int) -> Stream:
            return block(x, None if key is None else key.of_layer(index))

        words = jnp.pad(tokens, ((0, 0), (0, 1))) if self.reads_words else tokens
        return run_layers(self.blocks, run, self.embed(words, dtype, key))

    def embed(self, tokens: jax.Array, dtype: jnp.dtype, key: DropoutKey | None = None) -> Stream:
        """Return the residual stream in `dtype`, for the result of `models.packed.inputs_of`."""
        if (seq := tokens.shape[1] - self.reads_words) > self.shape.seq_len:
            raise UserError("sequence length", seq, f"at most model.seq_len = {self.shape.seq_len}")
        if not self.reads_words:
            return self._embedded(tokens, dtype, key, None)
        ids, places = ids_of(tokens, packed=self.packed)
        return self.continued(self._embedded(ids, dtype, key, places), tokens)

    def counts(self, names: frozenset[str]) -> Loads | None:
        """Return the experts' loads; None if there are no `names`."""
        return Loads(names, self.moe.balance_rate) if names else None

    def continued(self, x: jax.Array, tokens: jax.Array | None) -> Stream:
        """Return the stream of a later stage: received values, plus what layers need of the batch `tokens`."""
        if tokens is None:
            return x
        return stream_of(x, tokens, packed=self.packed, experts=self.shape.moe is not None, balanced=self.balanced)

    def embed_at(self, tokens: jax.Array, positions: jax.Array, dtype: jnp.dtype) -> tuple[jax.Array, Angles | None]:
        """Return the residual stream for token ids and positions [batch, seq], and the rotary angles."""
        rotation = _rotation(self.shape)
        by = None if rotation is None else angles(rotation, self.shape.seq_len, positions)
        return self._embedded(tokens, dtype, None, positions), by

    def _embedded(
        self, tokens: jax.Array, dtype: jnp.dtype, key: DropoutKey | None, positions: jax.Array | None
    ) -> jax.Array:
        seq, split = tokens.shape[1], self.comm.sequence_split
        if seq % (parts := axis_size(SEQUENCE_AXIS) if split else 1):
            raise UserError("sequence length", seq, f"with sequence parallelism a multiple of y = {parts}")
        x = self.embedding(tokens, dtype)
        x = x * jnp.asarray(self.shape.hidden**0.5, dtype) if self.shape.embedding_scale else x
        x = x if self.positions is None else x + self.positions(seq, dtype, positions)
        if key is None or self.shape.dropout == 0.0:
            return x
        return dropout(x, self.shape.dropout, key.fold_in(self.shape.layers), sequence_split=split)

    def logits(self, x: Stream) -> jax.Array:
        """Return the logits of the local shard of the vocabulary; minus infinity in its padding."""
        h = self.norm(values_of(x))
        logits = self.embedding.attend(h) if self.head is None else self.head(h)
        return masked(capped(logits, self.shape.logits_cap), self._used(logits.shape[-1]))

    def total_loss(self, x: Stream, targets: jax.Array, weights: jax.Array | None = None) -> jax.Array:
        """Return the summed cross-entropy in nats of targets [batch, seq], a float32 scalar.

        `weights` [batch, seq] multiply the targets' losses, and get no gradient. Collectives: `tensor.loss.total_loss`.
        """
        tied = self.head is None
        weight = self.embedding.table if self.head is None else self.head.kernel
        gathered = gather_weight(weight.get_value(), x.dtype)
        used = self._used(gathered.shape[0 if tied else 1])
        projection = Projection(gathered, tied, used, self.shape.logits_cap)
        h = self.norm(values_of(x))
        total = total_loss(gather_sequence(h) if self.comm.sequence_split else h, projection, targets, weights)
        # Balance losses contribute gradients but no value, so that the reported loss stays the cross-entropy.
        balance = balance_of(x)
        return total if balance is None else total + (balance - jax.lax.stop_gradient(balance))

    def run_layer(self, layer: Block, x: Stream, key: DropoutKey | None = None) -> Stream:
        """Run a block."""
        return layer(x, key)

    def run_segment(self, number: int, x: Stream, key: DropoutKey | None = None) -> Stream:
        """Run half a block; the segments of the embedding and the head return `x` unchanged."""
        index, half = divmod(number - 1, 2)
        if not 0 <= index < len(self.blocks):
            return x
        key = None if key is None else key.of_layer(index)
        return self.blocks[index].feed_forward(x, key) if half else self.blocks[index].attend(x, key)

    @property
    def segments(self) -> tuple[Segment, ...]:
        """Segments: the embedding, both halves of every block, the head."""
        return transformer_segments(self.shape)

    def check_grid(self, grid: GridShape) -> None:
        """Raise ``UserError`` unless the model divides over the grid."""
        self.shape.check_grid(grid, sequence_split=self.comm.sequence_split)
        self.comm.check(self.shape, grid)

    def _used(self, columns: int) -> int | None:
        # Vocabulary if the `columns` of all devices include padding, else None: no mask is needed.
        return self.shape.vocab if columns * axis_size(VOCAB_AXIS) > self.shape.vocab else None
