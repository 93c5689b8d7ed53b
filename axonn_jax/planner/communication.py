"""Communication of a training step, collective by collective, from formulas (DESIGN section 4).

Counted is one program: forward, backward and optimizer of a model on one 4D mesh. Beside the algebra, three rules:

* A weight that is gathered outside of recomputation depends on nothing but parameters, so the compiler gathers it once
  a step, not once a microbatch (XLA's loop-invariant code motion); recomputed gathers stay with their microbatch, and
  so do those of scanned layers, unless the program itself gathers once a step.
* A tied table is gathered once for embedding and head, and the sum of its two gradients is reduce-scattered once.
* Recomputation leaves out what the backward pass does not read: the all-reduce of a block's last matmul, and all of
  embedding, final norm, head and loss, which are outside of the blocks.

With the stream split along its sequence over `y`, what a matmul reads is all-gathered and its dX reduce-scattered,
what is added to it is reduce-scattered and its gradient all-gathered, each half the bytes of an all-reduce. Blocks
gather once more in the backward pass, under `none` too, where only the part is kept till then.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from math import prod
from typing import Literal

from axonn_jax.grid import GridShape
from axonn_jax.models.block_comm import ALL_REDUCE, BlockComm
from axonn_jax.models.config import ModelShape
from axonn_jax.options import Activations, ReshardAfter
from axonn_jax.planner.machines.network import CollectiveKind, ring_bytes

Phase = Literal["forward", "recompute", "backward", "update"]

_LAST = "blocks.mlp.down"  # of a block: recomputation leaves its all-reduce out
_FLOAT32 = 4
_DATA, _Z, _Y, _X = "data", "z", "y", "x"


@dataclass(frozen=True)
class StepSpec:
    """A training step whose communication is asked for."""

    shape: ModelShape
    """The model."""
    grid: GridShape
    """The mesh; `pipe` is 1."""
    sequences: int
    """Sequences a step over all devices, a multiple of data * z * microbatches."""
    microbatches: int = 1
    """Parts the step runs in, one after the other."""
    itemsize: int = _FLOAT32
    """Bytes of an element of activations and gathered weights (2: bf16); norms and loss have 4."""
    activations: Activations = "none"
    """What the backward pass computes again; `full`, `dots` and `offload` communicate the same, `save_collectives`
    only gathers again."""
    scanned: bool = False
    """Whether layers are a loop's body (`tensor.scan_layers`): their weights are then gathered for every microbatch."""
    gather: ReshardAfter = "forward"
    """When gathered weights are let go: after `forward` they are gathered again in recomputation; with several
    microbatches `step` gathers, and reduce-scatters sums of gradients, once a step."""
    comm: BlockComm = ALL_REDUCE
    """How blocks communicate with the residual stream."""
    accumulate: int = _FLOAT32
    """Bytes of an element of gradients on their way over `z` (`memory.accumulate`)."""

    @property
    def rows(self) -> int:
        """Tokens of a microbatch on a device."""
        return self.sequences // (self.microbatches * self.grid.batch_shards) * self.shape.seq_len

    @property
    def vocab(self) -> int:
        """Rows of the table, padded to divide over `y` and `z`."""
        return self.shape.padded_vocab(self.grid.y * self.grid.z)

    @property
    def once(self) -> bool:
        """Whether gradients are reduce-scattered over `z` once a step, and so weights gathered once."""
        return self.gather == "step" and self.microbatches > 1


@dataclass(frozen=True)
class Predicted:
    """One collective of the algorithm."""

    name: str
    """Which layer it belongs to; those of all blocks together are one entry."""
    phase: Phase
    """Which part of a step it belongs to."""
    kind: CollectiveKind
    """What it does."""
    axes: tuple[str, ...]
    """Mesh axes larger than one that it runs over, slowest first."""
    group: int
    """Devices in a group: the product of the axes."""
    whole: int
    """Bytes of the whole buffer: gathered, or to be reduced."""
    times: int
    """Runs in a step."""

    @property
    def over(self) -> str:
        """The axes joined by `*`."""
        return "*".join(self.axes)

    @property
    def bytes(self) -> Fraction:
        """Bytes a device sends in a step, on a ring."""
        return self.times * ring_bytes(self.kind, self.whole, self.group)


@dataclass(frozen=True)
class _Matmul:
    """A linear layer: features in over `in_axis`, out over the other."""

    name: str
    features_in: int
    features_out: int
    in_axis: str
    bias: bool = False
    joins_next: bool = False
    """It has the next layer's input: its dX is added to that layer's, and not all-reduced for itself."""
    spread: bool = False
    """Its inner features are split over `y` and `x`: `features_out` where it reads the stream, else `features_in`."""


def predict(work: StepSpec) -> tuple[Predicted, ...]:
    """Every collective of a step over a group larger than one; needs neither jax nor a device.

    Raises ``UserError`` where model or batch do not divide over the grid.
    """
    work.shape.check_grid(work.grid, sequence_split=work.comm.sequence_split)
    work.comm.check(work.shape, work.grid)
    work.grid.check_batch(work.sequences, work.microbatches)
    return tuple(sent for sent in (*predict_microbatch(work), *predict_update(work)) if sent.group > 1)


def predict_microbatch(work: StepSpec) -> Iterator[Predicted]:
    """Yields what comes before the update of a step that divides over its grid, groups of one device included."""
    shape, again = work.shape, work.activations != "none"
    head = _Matmul("head", shape.hidden, work.vocab, _X)
    yield from _embedding(work)
    for matmul in block_matmuls(shape, work.comm):
        yield from _weight(work, matmul, shape.layers, again)
        yield from (_spread if matmul.spread else _matmul)(work, matmul, shape.layers, again)
    for name in ("blocks.attention_norm", "blocks.mlp_norm"):
        yield from _norm(work, name, shape.layers, again)
    for name in ("q_norm", "k_norm") if shape.qk_norm else ():  # the gradient of a weight that all heads have
        over = () if work.comm.sequence_split else (_Y, _X) if work.comm.attention else (_Y,)
        each = shape.layers * work.microbatches
        yield _one(work, f"blocks.{name}", "backward", "all-reduce", over, shape.head_dim * _FLOAT32, each)
    yield from _norm(work, "norm", 1, False)
    if not shape.tied:  # else it goes with the embedding
        yield from _weight(work, head, 1, False)
    yield from _matmul(work, head, 1, False)
    # Cross-entropy: the largest logit of a token, then the sum of exponentials beside the target's logit.
    yield _one(work, "loss", "forward", "all-reduce", (_Y,), work.rows * _FLOAT32, work.microbatches)
    yield _one(work, "loss", "forward", "all-reduce", (_Y,), 2 * work.rows * _FLOAT32, work.microbatches)


def block_matmuls(shape: ModelShape, comm: BlockComm = ALL_REDUCE) -> tuple[_Matmul, ...]:
    """The linear layers of a block; `x` and `y` swap roles from one to the next."""
    up = _Matmul("blocks.mlp.up", shape.hidden, shape.ffn, _X, shape.bias == "all", spread=comm.mlp)
    width, heads = shape.heads * shape.head_dim, comm.attention
    gate = replace(up, name="blocks.mlp.gate", joins_next=True)
    return (
        _Matmul("blocks.attention.qkv", shape.hidden, shape.qkv_width, _X, shape.bias != "none", spread=heads),
        _Matmul("blocks.attention.out", width, shape.hidden, _Y, shape.bias == "all", spread=heads),
        *((gate, up) if shape.mlp_inputs == 2 else (up,)),
        _Matmul("blocks.mlp.down", shape.ffn, shape.hidden, _Y, shape.bias == "all", spread=comm.mlp),
    )


def _one(
    work: StepSpec, name: str, phase: Phase, kind: CollectiveKind, axes: tuple[str, ...], whole: int, times: int
) -> Predicted:
    live = tuple(axis for axis in axes if _size(work, axis) > 1)
    return Predicted(name, phase, kind, live, _size(work, *axes), whole, times)


def _size(work: StepSpec, *axes: str) -> int:
    return prod(int(getattr(work.grid, axis)) for axis in axes)


def _weight(work: StepSpec, layer: _Matmul, count: int, again: bool) -> Iterator[Predicted]:
    """Z: all-gather W, reduce-scatter dW, (Gz-1)/Gz k n e/(Gx Gy) each."""
    weight = layer.features_in * layer.features_out * work.itemsize // _size(work, _X, _Y)
    each = count * work.microbatches
    gathers = each if work.scanned and not work.once and layer.name != "head" else count
    yield _one(work, layer.name, "forward", "all-gather", (_Z,), weight, gathers)
    if again and work.gather == "forward":
        yield _one(work, layer.name, "recompute", "all-gather", (_Z,), weight, each)
    yield _scatter(work, layer.name, weight, count)


def _matmul(work: StepSpec, layer: _Matmul, count: int, again: bool) -> Iterator[Predicted]:
    """What a linear layer communicates of activations.

    In-axis: all-reduce Y, 2 (Gin-1)/Gin m n e/Gout. Out-axis: all-reduce dX, 2 (Gout-1)/Gout m k e/Gin, once for layers
    that share X. A split stream is gathered before the first and reduce-scattered after the last; gradients likewise.
    """
    reads, adds = (work.comm.sequence_split and layer.in_axis == axis for axis in (_X, _Y))
    x, y = (_X, _Y) if layer.in_axis == _X else (_Y, _X)
    each = count * work.microbatches
    result = work.rows * layer.features_out * work.itemsize // _size(work, y)
    operand = work.rows * layer.features_in * work.itemsize // _size(work, x)
    reduction: CollectiveKind = "reduce-scatter" if adds else "all-reduce"
    yield _one(work, layer.name, "forward", reduction, (x,), result, each)
    if again and layer.name != _LAST and work.activations != "save_collectives":
        yield _one(work, layer.name, "recompute", reduction, (x,), result, each)
    if adds:
        yield _one(work, layer.name, "backward", "all-gather", (x,), result, each)
    if not layer.joins_next:
        if reads:
            yield _one(work, layer.name, "forward", "all-gather", (y,), operand, each)
        if reads and layer.name != "head":
            yield _one(work, layer.name, "recompute", "all-gather", (y,), operand, each)
        yield _one(work, layer.name, "backward", "reduce-scatter" if reads else "all-reduce", (y,), operand, each)


def _spread(work: StepSpec, layer: _Matmul, count: int, again: bool) -> Iterator[Predicted]:
    """The same of a layer with inner features over `y` and `x`.

    A layer that reads the stream has it all-gathered over `x`, (Gx-1)/Gx m k e, once for layers that share it; dX is
    reduce-scattered over `x` and then all-reduced over `y`, 2 (Gy-1)/Gy m k e/Gx. Of one that adds to the stream the
    other way around: Y is reduce-scattered, then all-reduced, and dY all-gathered.
    """
    if layer.joins_next:
        return
    each = count * work.microbatches
    reads = layer.in_axis == _X
    row = work.rows * (layer.features_in if reads else layer.features_out) * work.itemsize
    repeated = again and layer.name != _LAST and work.activations != "save_collectives"
    phases: tuple[Phase, ...] = ("forward", "recompute") if repeated else ("forward",)
    for phase in ("backward",) if reads else phases:
        yield _one(work, layer.name, phase, "reduce-scatter", (_X,), row, each)
        yield _one(work, layer.name, phase, "all-reduce", (_Y,), row // _size(work, _X), each)
    for phase in phases if reads else ("backward",):
        yield _one(work, layer.name, phase, "all-gather", (_X,), row, each)


def _scatter(work: StepSpec, name: str, weight: int, count: int) -> Predicted:
    """The reduce-scatter of gradients of `count` weights of so many bytes: of every microbatch, or of their sums."""
    times = count if work.once else count * work.microbatches
    return _one(work, name, "backward", "reduce-scatter", (_Z,), weight // work.itemsize * work.accumulate, times)


def _norm(work: StepSpec, name: str, count: int, again: bool) -> Iterator[Predicted]:
    """LayerNorm: three float32 numbers a token forward, two backward (mean and factor); RMSNorm: one each way."""
    token = work.rows // (work.grid.y if work.comm.sequence_split else 1) * _FLOAT32
    repeated: tuple[Phase, ...] = ("recompute",) if again and work.activations != "save_collectives" else ()
    for phase in ("forward", *repeated, "backward"):
        numbers = 1 if work.shape.norm != "layernorm" else 2 if phase == "backward" else 3
        yield _one(work, name, phase, "all-reduce", (_X,), numbers * token, count * work.microbatches)


def _embedding(work: StepSpec) -> Iterator[Predicted]:
    """Table over (y, z) x x: gathered over z, rows of the y shards added; learned positions over z x x: gathered."""
    shape, item = work.shape, work.itemsize
    table = work.vocab * shape.hidden * item // _size(work, _X, _Y)
    stream = work.rows * shape.hidden * item // _size(work, _X)
    yield _one(work, "embedding", "forward", "all-gather", (_Z,), table, 1)
    reduction: CollectiveKind = "reduce-scatter" if work.comm.sequence_split else "all-reduce"
    yield _one(work, "embedding", "forward", reduction, (_Y,), stream, work.microbatches)
    if work.comm.sequence_split:
        yield _one(work, "embedding", "backward", "all-gather", (_Y,), stream, work.microbatches)
    yield _scatter(work, "embedding", table, 1)
    if shape.positions == "learned":
        positions = shape.seq_len * shape.hidden * item // _size(work, _X)
        yield _one(work, "positions", "forward", "all-gather", (_Z,), positions, 1)
        yield _scatter(work, "positions", positions, 1)


def predict_update(work: StepSpec) -> Iterator[Predicted]:
    """Yields what comes once a step, groups of one device included.

    Gradients in float32, over `data`, and over `z` too where a parameter is replicated there; with the sequence split
    over `y` as well: norms, biases added to the stream, positions. Buckets change the number of messages, not their
    bytes. Then the mean loss and the global norm, a scalar each.
    """
    shape = work.shape
    over = (_DATA, _Z, _Y) if work.comm.sequence_split else (_DATA, _Z)

    def reduced(name: str, elements: int, split: tuple[str, ...], count: int) -> Predicted:
        axes = tuple(axis for axis in over if axis not in split)
        return _one(work, name, "update", "all-reduce", axes, elements * _FLOAT32 // _size(work, *split), count)

    yield reduced("embedding", work.vocab * shape.hidden, (_X, _Y, _Z), 1)
    if shape.positions == "learned":
        yield reduced("positions", shape.seq_len * shape.hidden, (_X, _Z), 1)
    for layer in block_matmuls(shape, work.comm):
        yield reduced(layer.name, layer.features_in * layer.features_out, (_X, _Y, _Z), shape.layers)
        if layer.bias:
            split = (_X,) if layer.in_axis == _Y else (_Y, _X) if layer.spread else (_Y,)
            yield reduced(f"{layer.name}.bias", layer.features_out, split, shape.layers)
    yield reduced("blocks.attention.norms", shape.head_dim, (), 2 * shape.layers * shape.qk_norm)
    vectors = shape.norm_params() // shape.hidden  # a message each: a scale, and the bias of a LayerNorm
    yield reduced("blocks.norms", shape.hidden, (_X,), 2 * vectors * shape.layers)
    yield reduced("norm", shape.hidden, (_X,), vectors)
    if not shape.tied:
        yield reduced("head", shape.hidden * work.vocab, (_X, _Y, _Z), 1)
    yield _one(work, "mean loss", "update", "all-reduce", (_DATA, _Z), _FLOAT32, 1)
    yield _one(work, "global norm", "update", "all-reduce", (_Z, _Y, _X), _FLOAT32, 1)
