"""Memory of training in bytes: model state by precision and placement, activations, buffers; no jax.

Every function is a formula: numbers of parameters or tokens in, bytes out.
"""

from dataclasses import dataclass
from functools import cache
from math import ceil
from typing import Literal

from axonn_jax.models.block_comm import ALL_REDUCE, BlockComm
from axonn_jax.models.config import ModelShape
from axonn_jax.options import Activations, AttentionKernel
from axonn_jax.tensor.kernel_choice import loss_chunk, tiles

Precision = Literal["fp32", "bf16", "fp16"]
_FP32 = 4
_HALF = 2
_STREAMED_BUCKETS = 3


@dataclass(frozen=True)
class ParamBytes:
    """Bytes of weights, gradients and optimizer state, on one kind of memory."""

    weights: float = 0.0
    """Those that a step reads: in compute precision where float32 ones lie apart, else float32, cast where used."""
    gradients: float = 0.0
    """As accumulated."""
    master: float = 0.0
    """Float32 weights beside half-precision ones."""
    moments: float = 0.0
    """Adam's two."""
    positions: float = 0.0
    """Of the entries of pruned parameters that are kept."""

    @property
    def total(self) -> float:
        """All of it."""
        return self.weights + self.gradients + self.master + self.moments + self.positions


def itemsize(precision: Precision) -> int:
    """Bytes of an element in compute precision."""
    return _FP32 if precision == "fp32" else _HALF


def device_state(
    params: float,
    precision: Precision,
    *,
    accumulate: int = _FP32,
    apart: bool = False,
    offload: bool = False,
    replicas: int = 1,
) -> ParamBytes:
    """State of `params` parameters on the device.

    `accumulate` is the bytes of a gradient, `replicas` the devices that share master weights and moments between them
    (ZeRO-1; 1: none do). Master weights lie `apart` from half-precision weights, as they do where they are shared or,
    with `offload`, on the host; else the weights themselves are float32.
    """
    master, moments = _optimizer(params / replicas, precision, apart or offload or replicas > 1)
    return ParamBytes(
        weights=params * (itemsize(precision) if master else _FP32),
        gradients=params * accumulate,
        master=0.0 if offload else master,
        moments=0.0 if offload else moments,
    )


def pruned_state(
    params: float,
    density: float,
    precision: Precision,
    *,
    accumulate: int = _FP32,
    offload: bool = False,
    replicas: int = 1,
) -> ParamBytes:
    """As `device_state`, of parameters of which a share `density` is trained: dense weights, all else for that share.

    2 + 20 f bytes a parameter in half precision, 4 + 20 f in float32 (SAMO, IPDPS 23, has 2 + 24 f: it keeps
    half-precision values and a cast copy besides). Slots to spare are left out.
    """
    kept = params * density
    return ParamBytes(
        weights=params * itemsize(precision),
        gradients=kept * accumulate,
        master=0.0 if offload else kept / replicas * _FP32,
        moments=0.0 if offload else kept / replicas * 2 * _FP32,
        positions=kept * _FP32,
    )


def host_state(params: float, precision: Precision, *, offload: bool = False, replicas: int = 1) -> ParamBytes:
    """State of `params` parameters on the host: with offload moments and, of half-precision weights, masters."""
    if not offload:
        return ParamBytes()
    master, moments = _optimizer(params / replicas, precision, apart=True)
    return ParamBytes(master=master, moments=moments)


def _optimizer(params: float, precision: Precision, apart: bool) -> tuple[float, float]:
    """Bytes of master weights and of Adam's moments."""
    return (params * _FP32 if apart and precision != "fp32" else 0.0), params * 2 * _FP32


def streamed_state(bucket: float, precision: Precision) -> float:
    """Device bytes of the buckets of an offloaded update: one arriving, one being updated, one on its way back."""
    return _STREAMED_BUCKETS * host_state(bucket, precision, offload=True).total


@dataclass(frozen=True)
class BlockBytes:
    """What one block keeps for its backward pass, in bytes for each token of a microbatch on a device."""

    entry: float
    """Its input."""
    kept: float
    """From forward to backward, on the device; the input is part of it."""
    working: float
    """More while its backward pass runs."""
    again: float = 0.0
    """Of that, what was computed again: all of a block but what is kept."""
    host: float = 0.0
    """From forward to backward, on the host."""
    shown: float = 0.0
    """Of what is kept, what elementwise operations give from the rest: a pipeline's stage computes it again."""
    waiting: float = 0.0
    """From input gradient to weight gradient, where a pipeline computes them apart: both operands of every product."""
    released: float = 0.0
    """Of what a pipeline's stage keeps under `none`, what only the input gradient reads."""
    spare: float = 0.0
    """Of what is more at work, what the MLP's half needs beyond attention's."""


@dataclass(frozen=True)
class FeedForwardUse:
    """What a block's second half keeps and works with, in elements for each token of a microbatch on a device."""

    wide: float
    """Results of the matmuls that read its input."""
    inner: float
    """What its last matmul reads."""
    working: float
    """More while its backward pass runs, on both sides of the widest operation."""
    reduced: float
    """Of what is wide, or in its place, what communication over `x` gave."""
    tokens: float = 0.0
    """What was gathered or exchanged, beside the stream."""


def dense_use(shape: ModelShape, x: int, y: int, comm: BlockComm = ALL_REDUCE) -> FeedForwardUse:
    """Elements of a feed-forward layer that all tokens pass."""
    inner = shape.ffn / (x * y if comm.mlp else y)
    wide = shape.mlp_inputs * inner
    read = shape.hidden if comm.mlp else shape.hidden / x
    return FeedForwardUse(wide, inner, read + 2 * wide, shape.hidden if comm.mlp else wide)


def block_activations(
    shape: ModelShape,
    x: int,
    y: int,
    item: int,
    policy: Activations,
    attention: AttentionKernel = "cudnn",
    comm: BlockComm = ALL_REDUCE,
    feed: FeedForwardUse | None = None,
) -> BlockBytes:
    """Activations of a block on a grid of `x` and `y`, `item` bytes an element; `feed` is its second half's.

    The residual stream is split over `x`, what is between two matmuls over `y`. `none` keeps what every operation's
    gradient reads; `full` the block's input; `dots` the results of its matmuls too, but for the last, which no gradient
    reads; `save_collectives` those of them that were all-reduced; `offload` keeps the input on the host. Attention of
    whole scores keeps them and their softmax; in blocks, keys and values for every head, and its result by heads too.

    A stream whose sequence is split over `y` too is whole where matmuls read it: gathered once more in the backward
    pass, or there once where the block is computed again. Halves of a block that gather read the whole stream, and have
    less between their matmuls.
    """
    feed = feed or dense_use(shape, x, y, comm)
    spread, over = (comm.attention, comm.mlp), x * y if comm.attention else y
    split = comm.sequence_split and y > 1
    stream, width = shape.hidden / x, shape.heads * shape.head_dim / over
    scores = 2 * shape.heads / over * shape.seq_len if attention == "xla" else 0.0
    statistics = shape.heads / over * _FP32 if attention != "xla" else 0.0
    wide = (shape.qkv_width / over, feed.wide)
    repeated = 2 * (shape.heads - shape.kv_heads) * shape.head_dim / over
    copies = width + repeated if attention == "blocked" else 0.0
    part = stream / y if split else stream
    read = part if policy == "none" else stream
    reads = [shape.hidden if one else read for one in spread]
    # Both inputs of norms, both normalised streams, queries to values, attention's result, the MLP's two widths.
    # The scale of an RMSNorm has its gradient from the stream before it, which is kept too.
    normed = (shape.heads + shape.kv_heads) * shape.head_dim / over if shape.qk_norm else 0.0
    everything = normed + (2 if shape.norm == "layernorm" else 4) * part + sum(reads) + sum(wide) + width
    everything += feed.inner + feed.tokens
    whole = (everything + scores + copies) * item + statistics
    entry = part * item
    # Of the residual stream and of a branch; of the widest operation, on both of its sides.
    ends = [shape.hidden if one else stream for one in spread]
    halves = [(part + ends[0] + 2 * (wide[0] + copies)) * item, (part + feed.working) * item]
    gradients = max(halves)
    spare = gradients - halves[0]
    if split and policy == "none":
        gradients += stream * item  # gathered again
    # Inputs of the norms; gradients of what both halves add to the stream, before and after they are gathered again.
    added = 2 * part if split and shape.bias == "all" else 0.0
    waiting = (2 * part + sum(ends) + added + sum(wide) + width + feed.inner + 2 * feed.tokens) * item
    # Queries and keys with positions are handed over beside what they were made of.
    rotated = (shape.heads + shape.kv_heads) * shape.head_dim / over if shape.positions == "rope" else 0.0
    if policy == "none":
        shown = (2 if shape.norm == "layernorm" else 4) * part - 2 * part + read * (2 - sum(spread))
        shown += feed.inner - rotated
        released = (shape.qkv_width / over + rotated + copies) * item + statistics
        return BlockBytes(entry, whole, gradients, shown=shown * item, waiting=waiting, released=released, spare=spare)
    if policy == "full":
        return BlockBytes(entry, entry, whole + gradients, whole, waiting=waiting, spare=spare)
    if policy == "offload":  # two inputs are under way
        return BlockBytes(entry, 0.0, whole + gradients + 2 * entry, whole, entry, waiting=waiting, spare=spare)
    if policy == "dots":
        matmuls = sum(wide) + (shape.hidden if comm.attention else stream)  # the latter before it is reduced
    else:
        reduced = (shape.hidden if comm.attention else wide[0]) + feed.reduced
        matmuls = (reduced if x > 1 else 0.0) + (part if y > 1 or comm.attention else 0.0) + feed.tokens
    again = whole - matmuls * item
    return BlockBytes(entry, entry + matmuls * item, again + gradients, again, waiting=waiting, spare=spare)


@cache
def scores_bytes(kernel: AttentionKernel, platform: str, heads: int, seq: int) -> float:
    """Bytes of scores at work in a backward pass over so many heads, those of all sequences together.

    Blocks are taken a chunk of heads at a time, but those of a chunk do not wait for each other, and XLA starts them
    all: their float32 scores are there at once, on CPUs beside as many gradients. Whole scores are a block's, by token.
    """
    if kernel != "blocked":
        return 0.0
    sizes = tiles(platform, seq)
    return (8 if platform == "cpu" else 4) * float(sizes.chunk(heads, seq) * sizes.computed(seq))


def head_activations(shape: ModelShape, x: int, columns: int, item: int, tokens: int) -> float:
    """Bytes of a microbatch's `tokens` at the head: logits, exponentials and gradient in float32, and the stream.

    `columns` are those of a device's part of the padded vocabulary.
    Where the loss runs in parts of the tokens: a part's logits and their gradient, the float32 sum of the weight's
    gradient (and the same scaled, where it is not added to a lookup's), and the stream's gradient besides.
    """
    stream = shape.hidden / x * item
    part = loss_chunk(tokens, columns)
    if part == tokens:
        return tokens * (3 * columns * _FP32 + 2 * stream)
    weight = shape.hidden / x * columns * _FP32 * (1 if shape.tied else 2)
    return 2 * part * columns * _FP32 + weight + 3 * tokens * stream


def gathered_weights(params: float, item: int) -> float:
    """Bytes of a block's weights gathered over `z`, `params` before the split over it, and of their gradients."""
    return 2 * params * item


def bucket_buffers(params: float, bucket: float, accumulate: int = _FP32) -> float:
    """A bucket of gradients beside its reduced copy."""
    return 2 * accumulate * min(params, bucket)


def balanced_blocks(layers: int, head: float, pipe: int) -> tuple[float, float]:
    """Blocks of the busiest rank and of the last one, which also has the head, `head` blocks long.

    Stages are cut at halves of blocks.
    """
    usual = ceil(2 * (layers + head) / pipe) / 2
    last = max(0.0, min(int(2 * (usual - head)) / 2, layers - (pipe - 1) * 0.5))
    return max(ceil(2 * (layers - last) / (pipe - 1)) / 2, 0.5), last
