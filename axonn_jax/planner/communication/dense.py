"""Collectives of linear layers and norms: of weights over `z`, of activations over `x` and `y`."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from axonn_jax.models.block_comm import ALL_REDUCE, BlockComm
from axonn_jax.models.config import ModelShape
from axonn_jax.planner.communication.step import FLOAT32, Phase, Predicted, StepSpec, X, Y, Z
from axonn_jax.planner.machines.network import CollectiveKind

_LAST = ("blocks.mlp.down", "blocks.mlp.shared.down")
"""Of a block: recomputation leaves their all-reduce out."""


@dataclass(frozen=True)
class BlockMatmul:
    """A linear layer: features in over `in_axis`, out over the other."""

    name: str
    features_in: int
    features_out: int
    in_axis: str
    count: int = 1
    """How many of it the model has."""
    bias: bool = False
    joins_next: bool = False
    """It has the next layer's input: its dX is added to that layer's, and not all-reduced for itself."""
    spread: bool = False
    """Its inner features are split over `y` and `x`: `features_out` where it reads the stream, else `features_in`."""


def block_matmuls(shape: ModelShape, comm: BlockComm = ALL_REDUCE) -> tuple[BlockMatmul, ...]:
    """The linear layers of the blocks that all tokens pass; `x` and `y` swap roles from one to the next."""
    layers, heads, every = shape.layers, comm.attention, shape.bias == "all"
    routed = shape.routed_layers
    width, qkv = shape.heads * shape.head_dim, "blocks.attention.qkv"
    attention = (
        BlockMatmul(qkv, shape.hidden, shape.qkv_width, X, layers, bias=shape.bias != "none", spread=heads),
        BlockMatmul("blocks.attention.out", width, shape.hidden, Y, layers, bias=every, spread=heads),
    )
    dense = _mlp(shape, comm, "blocks.mlp", shape.ffn, layers - routed, bias=every) if routed < layers else ()
    if not shape.shared_experts or not routed:
        return (*attention, *dense)
    wide = shape.shared_experts * shape.expert_ffn
    return (*attention, *dense, *_mlp(shape, comm, "blocks.mlp.shared", wide, routed, bias=False))


def _mlp(shape: ModelShape, comm: BlockComm, name: str, ffn: int, count: int, *, bias: bool) -> tuple[BlockMatmul, ...]:
    up = BlockMatmul(f"{name}.up", shape.hidden, ffn, X, count, bias=bias, spread=comm.mlp)
    gate = (replace(up, name=f"{name}.gate", joins_next=True),) if shape.mlp_inputs == 2 else ()
    return (*gate, up, BlockMatmul(f"{name}.down", ffn, shape.hidden, Y, count, bias=bias, spread=comm.mlp))


def weight(work: StepSpec, layer: BlockMatmul, again: bool) -> Iterator[Predicted]:
    """Z: all-gather W, reduce-scatter dW, (Gz-1)/Gz k n e/(Gx Gy) each."""
    buffer = layer.features_in * layer.features_out * work.itemsize // work.size(X, Y)
    yield from gathered(work, layer.name, buffer, layer.count, again)


def gathered(work: StepSpec, name: str, buffer: int, count: int, again: bool) -> Iterator[Predicted]:
    """All-gathers over `z` of `count` weights of so many bytes, and reduce-scatters of their gradients."""
    each = count * work.microbatches
    gathers = each if work.scanned and not work.once and name != "head" else count
    yield work.row(name, "forward", "all-gather", (Z,), buffer, gathers)
    if again and work.gather == "forward":
        yield work.row(name, "recompute", "all-gather", (Z,), buffer, each)
    yield scatter(work, name, buffer, count)


def scatter(work: StepSpec, name: str, buffer: int, count: int) -> Predicted:
    """The reduce-scatter of gradients of `count` weights of so many bytes: of every microbatch, or of their sums."""
    times = count if work.once else count * work.microbatches
    return work.row(name, "backward", "reduce-scatter", (Z,), buffer // work.itemsize * work.accumulate, times)


def activations(work: StepSpec, layer: BlockMatmul, again: bool) -> Iterator[Predicted]:
    """What a linear layer communicates of activations; `again` says that its block is computed again."""
    yield from (_spread if layer.spread else _reduced)(work, layer, again)


def _reduced(work: StepSpec, layer: BlockMatmul, again: bool) -> Iterator[Predicted]:
    """The same of a layer with features over one axis in, over the other out.

    In-axis: all-reduce Y, 2 (Gin-1)/Gin m n e/Gout. Out-axis: all-reduce dX, 2 (Gout-1)/Gout m k e/Gin, once for layers
    that share X. A split stream is gathered before the first and reduce-scattered after the last; gradients likewise.
    """
    reads, adds = (work.comm.sequence_split and layer.in_axis == axis for axis in (X, Y))
    x, y = (X, Y) if layer.in_axis == X else (Y, X)
    each = layer.count * work.microbatches
    result = work.rows * layer.features_out * work.itemsize // work.size(y)
    operand = work.rows * layer.features_in * work.itemsize // work.size(x)
    reduction: CollectiveKind = "reduce-scatter" if adds else "all-reduce"
    yield work.row(layer.name, "forward", reduction, (x,), result, each)
    if again and layer.name not in _LAST and work.rereduces:
        yield work.row(layer.name, "recompute", reduction, (x,), result, each)
    if adds:
        yield work.row(layer.name, "backward", "all-gather", (x,), result, each)
    if not layer.joins_next:
        if reads:
            yield work.row(layer.name, "forward", "all-gather", (y,), operand, each)
        if reads and layer.name != "head":
            yield work.row(layer.name, "recompute", "all-gather", (y,), operand, each)
        yield work.row(layer.name, "backward", "reduce-scatter" if reads else "all-reduce", (y,), operand, each)


def _spread(work: StepSpec, layer: BlockMatmul, again: bool) -> Iterator[Predicted]:
    """The same of a layer with inner features over `y` and `x`.

    A layer that reads the stream has it all-gathered over `x`, (Gx-1)/Gx m k e, once for layers that share it; dX is
    reduce-scattered over `x` and then all-reduced over `y`, 2 (Gy-1)/Gy m k e/Gx. Of one that adds to the stream the
    other way around: Y is reduce-scattered, then all-reduced, and dY all-gathered.
    """
    if layer.joins_next:
        return
    each = layer.count * work.microbatches
    reads = layer.in_axis == X
    row = work.rows * (layer.features_in if reads else layer.features_out) * work.itemsize
    repeated = again and layer.name not in _LAST and work.rereduces
    phases: tuple[Phase, ...] = ("forward", "recompute") if repeated else ("forward",)
    for phase in ("backward",) if reads else phases:
        yield work.row(layer.name, phase, "reduce-scatter", (X,), row, each)
        yield work.row(layer.name, phase, "all-reduce", (Y,), row // work.size(X), each)
    for phase in phases if reads else ("backward",):
        yield work.row(layer.name, phase, "all-gather", (X,), row, each)


def norm(work: StepSpec, name: str, count: int, again: bool) -> Iterator[Predicted]:
    """LayerNorm: three float32 numbers a token forward, two backward (mean and factor); RMSNorm: one each way."""
    token = work.rows // (work.grid.y if work.comm.sequence_split else 1) * FLOAT32
    repeated: tuple[Phase, ...] = ("recompute",) if again and work.rereduces else ()
    for phase in ("forward", *repeated, "backward"):
        numbers = 1 if work.shape.norm != "layernorm" else 2 if phase == "backward" else 3
        yield work.row(name, phase, "all-reduce", (X,), numbers * token, count * work.microbatches)
