"""Activations of a block in bytes for each token of a microbatch on a device; no jax.

Kept activations are read from the declaration. Memory at work and in waiting tasks of a pipeline depends on the
schedule of a backward pass, which no declaration states: they are formulas, held against compiled programs by the
tests.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

from axonn_jax.core.adapters.config import LoraConfig
from axonn_jax.core.experts.declare import elements_of
from axonn_jax.core.experts.shape import ExpertShape, MoeConfig
from axonn_jax.core.models.block_comm import ALL_REDUCE, BlockComm
from axonn_jax.core.models.config import ModelShape
from axonn_jax.core.models.declared.transformer import halves
from axonn_jax.core.ops.costs import operations, saved_bytes
from axonn_jax.core.ops.language import FLOAT32, Attend, merge_parts
from axonn_jax.core.ops.layers import Place
from axonn_jax.core.options import Activations, AttentionKernel
from axonn_jax.planning.declared.adapters import adapted


@dataclass(frozen=True)
class BlockBytes:
    """Bytes of one block for each token of a microbatch on a device."""

    entry: float
    """Input of the block."""
    saved: float
    """Bytes from forward to backward, on the device; the input is part of it."""
    working: float
    """Additional bytes while the backward pass runs."""
    recomputed: float = 0.0
    """Part of `working` that is recomputed: all of a block but `saved`."""
    host: float = 0.0
    """Bytes from forward to backward, on the host."""
    shown: float = 0.0
    """Part of `saved` that a pipeline stage recomputes with elementwise operations."""
    waiting: float = 0.0
    """Both operands of every product, held from the input gradient to a deferred weight gradient in a pipeline."""
    released: float = 0.0
    """Part of the activations that a pipeline stage saves under `none` and only the input gradient reads."""
    spare: float = 0.0
    """Excess of the MLP half's `working` over the attention half's."""


@dataclass(frozen=True)
class _SecondHalf:
    """Elements of a block's second half for each token of a microbatch on a device."""

    wide: float
    """Results of the matmuls that read its input."""
    inner: float
    """Input of its last matmul."""
    working: float
    """Additional elements while its backward pass runs, on both sides of the widest operation."""
    tokens: float = 0.0
    """Gathered or exchanged tokens, in addition to the stream."""


def block_activations(
    shape: ModelShape, x: int, y: int, item: int, policy: Activations, attention: AttentionKernel = "cudnn",
    comm: BlockComm = ALL_REDUCE, *, layer: int = 0, expert: int = 1, training: MoeConfig = MoeConfig(),  # noqa: B008
    lora: LoraConfig = LoraConfig(),  # noqa: B008
) -> BlockBytes:  # fmt: skip
    """Return the activations of a block.

    `offload` keeps the block's input on the host. A stream whose sequence is split over `y` is whole where matmuls read
    it: gathered once more in the backward pass, or there once where the block is computed again. Halves of a block that
    gather read the whole stream, and have less between their matmuls.

    Args:
        shape: Sizes of the model.
        x: Devices along `x`, which splits the features of the stream.
        y: Devices along `y`, which splits the features between two matmuls.
        item: Bytes of an element in the compute dtype.
        policy: Activation policy.
        attention: Attention kernel.
        comm: Communication of blocks with the stream.
        layer: Number of the block.
        expert: Devices along `expert`.
        training: Dispatch of experts.
        lora: Adapters, which alone are trained if there are any.
    """
    at = Place(expert, 1, y, x, shape.seq_len, item, comm.sequence_split)
    block = adapted(merge_parts(halves(shape, layer, at, comm, training, attention=attention)), shape, lora, layer)
    split = comm.sequence_split and y > 1
    stream = shape.hidden / x
    part = stream / y if split else stream
    entry = part * item

    def saved(setting: str) -> float:
        return saved_bytes(block, setting, at.tokens, item, {"expert": expert, "z": 1, "y": y, "x": x}, entry)

    moe = shape.moe
    if moe is not None and moe.is_routed(layer):
        second = _of_experts(shape, moe, at, training, comm)
    else:
        second = _of_mlp(shape, x, y, comm)
    spread, over = (comm.attention, comm.mlp), x * y if comm.attention else y
    scores = next(op for op in operations(block) if isinstance(op, Attend))
    width, qkv, copies = scores.heads * scores.head_dim, scores.elements, scores.copies / item
    # Features of the stream that each half reads: all of them where the half gathers its input.
    ends = [shape.hidden if gathers else stream for gathers in spread]
    # Each half needs the stream, its branch, and both sides of its widest operation. The halves' backward passes run
    # one after the other, so only the larger half counts.
    sides = [(part + ends[0] + 2 * (qkv + copies)) * item, (part + second.working) * item]
    gradients = max(sides)
    spare = gradients - sides[0]
    if split and policy == "none":
        gradients += stream * item  # gathered again
    # Deferred weight gradients read the norms' inputs, and the gradients of what both halves add to the stream, before
    # and after these are gathered again.
    added = 2 * part if split and shape.bias == "all" else 0.0
    waiting = (2 * part + sum(ends) + added + qkv + second.wide + width + second.inner + 2 * second.tokens) * item
    if policy == "none":
        # Rotated queries and keys are handed over in addition to the projections that they come from.
        rotated = (shape.heads + shape.kv_heads) * shape.head_dim / over if shape.positions == "rope" else 0.0
        shown = part * (2 - sum(spread)) + second.inner - rotated
        released = (qkv + rotated + copies) * item + (scores.scores if attention != "xla" else 0.0)
        return BlockBytes(
            entry, saved("none"), gradients, shown=shown * item, waiting=waiting, released=released, spare=spare
        )
    full = saved("none") + (2 * (stream - part) * item if split else 0.0)
    # Offload has two blocks' inputs in transfer at the same time.
    if policy == "offload":
        return BlockBytes(entry, 0.0, full + gradients + 2 * entry, full, entry, waiting=waiting, spare=spare)
    recomputed = full - (saved(policy) - entry)
    return BlockBytes(entry, saved(policy), recomputed + gradients, recomputed, waiting=waiting, spare=spare)


def _of_mlp(shape: ModelShape, x: int, y: int, comm: BlockComm) -> _SecondHalf:
    """Return the elements of a feed-forward layer that all tokens pass."""
    inner = shape.ffn / (x * y if comm.mlp else y)
    wide = shape.mlp_inputs * inner
    return _SecondHalf(wide, inner, (shape.hidden if comm.mlp else shape.hidden / x) + 2 * wide)


def _of_experts(shape: ModelShape, moe: ExpertShape, at: Place, training: MoeConfig, comm: BlockComm) -> _SecondHalf:
    """Return the elements of router and experts.

    `gather`: the tokens of all of `expert`, with all features; results and gradients of tokens add up in float32, and
    nothing of the experts' width is kept (`experts.grouped`). `capacity`: slots, and of each all widths. Experts that
    all tokens take are one more feed-forward layer.
    """
    scores, inner, tokens = elements_of(at, moe, shape.hidden, training)
    wide = shape.mlp_inputs * inner
    shared = moe.shared * moe.ffn / (at.yx if comm.mlp else at.y)
    gated = shape.mlp_inputs * shared
    if training.drops:
        working = 2 * moe.per_token * training.slack * shape.hidden + 2 * wide
    else:
        working = at.expert * shape.hidden * (1 + FLOAT32 / at.item) + (shape.hidden / at.x if tokens else 0.0)
    return _SecondHalf(wide + gated + scores / at.item, inner + shared, working + 2 * gated, tokens)


def mean_block(kinds: Sequence[tuple[BlockBytes, int]]) -> BlockBytes:
    """Return the mean of the kept bytes of blocks and the most of the bytes at work; kinds come with their number."""
    if len(kinds) == 1:
        return kinds[0][0]
    layers = sum(count for _, count in kinds)
    largest = max((block for block, _ in kinds), key=lambda block: block.working)
    mean = {f.name: sum(getattr(block, f.name) * count for block, count in kinds) / layers for f in fields(BlockBytes)}
    return BlockBytes(**mean | {name: getattr(largest, name) for name in ("working", "recomputed", "spare")})
