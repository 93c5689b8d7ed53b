"""What a training step communicates, collective by collective, from formulas (DESIGN section 4).

Counted is one program: forward, backward and optimizer of a model on one 4D mesh. Beside the algebra, three rules:

* A weight that is gathered outside of recomputation depends on nothing but parameters, so the compiler gathers it once
  a step, not once a microbatch (XLA's loop-invariant code motion); recomputed gathers stay with their microbatch, and
  so do those of scanned layers, unless the program itself gathers once a step (`memory.gather`).
* A tied table is gathered once for embedding and head, and the sum of its two gradients is reduce-scattered once.
* Recomputation leaves out what the backward pass does not read: the all-reduce of a block's last matmul, and all of
  embedding, final norm, head and loss, which are outside of the blocks.

With sequence parallelism the stream is split over `y` along its sequence: what a matmul reads of it is all-gathered and
its dX reduce-scattered, what is added to it is reduce-scattered and its gradient all-gathered, each half the bytes of
an all-reduce. Blocks gather once more in the backward pass, under `none` too, where only the part is kept till then.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Literal

from axonn_jax.grid import GridShape
from axonn_jax.models.inner import PAPERS, Inner
from axonn_jax.models.shape import ModelShape
from axonn_jax.planner.ring import Kind, ring_bytes

Phase = Literal["forward", "recompute", "backward", "update"]
Recompute = Literal["none", "full", "dots", "save_collectives", "offload"]
Gather = Literal["layer", "pass", "step"]

_FLOAT32 = 4
_DATA, _Z, _Y, _X = "data", "z", "y", "x"


@dataclass(frozen=True)
class Work:
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
    activations: Recompute = "none"
    """What the backward pass computes again; `full`, `dots` and `offload` communicate the same, `save_collectives`
    only gathers again."""
    scanned: bool = False
    """Whether layers are a loop's body (`train.scan_layers`): their weights are then gathered for every microbatch."""
    gather: Gather = "layer"
    """How long gathered weights live: `layer` gathers again in recomputation, `pass` does not, and with several
    microbatches `step` gathers, and reduce-scatters sums of gradients, once a step."""
    sequence_parallel: bool = False
    """Whether the sequence of the residual stream is split over `y` (`memory.sequence_parallel`)."""
    inner: Inner = PAPERS
    """Which inner features are split over `y` and `x` (`train.inner_features`)."""
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

    @property
    def stream_rows(self) -> int:
        """Tokens of a microbatch whose residual stream a device has, between matmuls."""
        return self.rows // (self.grid.y if self.sequence_parallel else 1)


@dataclass(frozen=True)
class Predicted:
    """One collective of the algorithm."""

    name: str
    """Which layer it belongs to; those of all blocks together are one entry."""
    phase: Phase
    """Which part of a step it belongs to."""
    kind: Kind
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
    tied: bool = False
    """Its weight is the embedding table, gathered and reduce-scattered there."""
    joins_next: bool = False
    """It has the next layer's input: its dX is added to that layer's, and not all-reduced for itself."""
    spread: bool = False
    """Its inner features are split over `y` and `x`: `features_out` where it reads the stream, else `features_in`."""

    @property
    def splits_bias(self) -> tuple[str, ...]:
        """Axes that split its bias."""
        if self.spread:
            return (_Y, _X) if self.in_axis == _X else (_X,)
        return (_Y,) if self.in_axis == _X else (_X,)


def predict(work: Work) -> tuple[Predicted, ...]:
    """Every collective of a step over a group larger than one; needs neither jax nor a device.

    Raises ``UserError`` where model or batch do not divide over the grid.
    """
    work.grid.check_model(work.shape, sequence_parallel=work.sequence_parallel)
    work.inner.check(work.shape, work.grid)
    work.grid.check_batch(work.sequences, work.microbatches)
    return (*predict_microbatch(work), *predict_update(work))


def predict_microbatch(work: Work) -> tuple[Predicted, ...]:
    """Those of `predict` that come before the update, for a work that divides over its grid."""
    return tuple(one for one in _microbatch(work) if one.group > 1)


def predict_update(work: Work) -> tuple[Predicted, ...]:
    """Those of `predict` that come once a step, in its update."""
    return tuple(one for one in _update(work) if one.group > 1)


def _microbatch(work: Work) -> Iterator[Predicted]:
    shape, again = work.shape, work.activations != "none"
    head = _Matmul("head", shape.hidden, work.vocab, _X, tied=shape.tied)
    yield from _embedding(work)
    for matmul in block_matmuls(shape, work.inner):
        last = matmul.name == "blocks.mlp.down"
        yield from (_spread if matmul.spread else _matmul)(work, matmul, shape.layers, again, last=last)
    for name in ("blocks.attention_norm", "blocks.mlp_norm"):
        yield from _norm(work, name, shape.layers, again)
    yield from _norm(work, "norm", 1, False)
    yield from _matmul(work, head, 1, False, last=False)
    # Cross-entropy: the largest logit of a token, then the sum of exponentials beside the target's logit.
    yield _one(work, "loss", "forward", "all-reduce", (_Y,), work.rows * _FLOAT32, work.microbatches)
    yield _one(work, "loss", "forward", "all-reduce", (_Y,), 2 * work.rows * _FLOAT32, work.microbatches)


def block_matmuls(shape: ModelShape, inner: Inner = PAPERS) -> tuple[_Matmul, ...]:
    """The linear layers of a block; `x` and `y` swap roles from one to the next."""
    up = _Matmul("blocks.mlp.up", shape.hidden, shape.ffn, _X, shape.bias, spread=inner.mlp)
    width, heads = shape.heads * shape.head_dim, inner.attention
    gate = replace(up, name="blocks.mlp.gate", joins_next=True)
    return (
        _Matmul("blocks.attention.qkv", shape.hidden, shape.qkv_width, _X, shape.bias, spread=heads),
        _Matmul("blocks.attention.out", width, shape.hidden, _Y, shape.bias, spread=heads),
        *((gate, up) if shape.mlp == "swiglu" else (up,)),
        _Matmul("blocks.mlp.down", shape.ffn, shape.hidden, _Y, shape.bias, spread=inner.mlp),
    )


def _one(work: Work, name: str, phase: Phase, kind: Kind, axes: tuple[str, ...], whole: int, times: int) -> Predicted:
    live = tuple(axis for axis in axes if _size(work, axis) > 1)
    return Predicted(name, phase, kind, live, _size(work, *axes), whole, times)


def _size(work: Work, *axes: str) -> int:
    size = 1
    for axis in axes:
        size *= int(getattr(work.grid, axis))
    return size


def _matmul(work: Work, layer: _Matmul, count: int, again: bool, last: bool) -> Iterator[Predicted]:
    """The five collectives of a linear layer but the last, which is the update's.

    Z: all-gather W, reduce-scatter dW, (Gz-1)/Gz k n e/(Gx Gy) each. In-axis: all-reduce Y,
    2 (Gin-1)/Gin m n e/Gout. Out-axis: all-reduce dX, 2 (Gout-1)/Gout m k e/Gin, once for layers that share X. A split
    stream is gathered before the first and reduce-scattered after the last, and the other way around for gradients.
    """
    reads, adds = (work.sequence_parallel and layer.in_axis == axis for axis in (_X, _Y))
    x, y = (_X, _Y) if layer.in_axis == _X else (_Y, _X)
    each = count * work.microbatches
    weight = layer.features_in * layer.features_out * work.itemsize // _size(work, x, y)
    result = work.rows * layer.features_out * work.itemsize // _size(work, y)
    operand = work.rows * layer.features_in * work.itemsize // _size(work, x)
    if not layer.tied:  # the embedding's table is gathered and scattered there
        gathers = each if work.scanned and not work.once and layer.name != "head" else count
        yield _one(work, layer.name, "forward", "all-gather", (_Z,), weight, gathers)
    reduction: Kind = "reduce-scatter" if adds else "all-reduce"
    yield _one(work, layer.name, "forward", reduction, (x,), result, each)
    if again:
        if work.gather == "layer":
            yield _one(work, layer.name, "recompute", "all-gather", (_Z,), weight, each)
        if not last and work.activations != "save_collectives":
            yield _one(work, layer.name, "recompute", reduction, (x,), result, each)
    if adds:
        yield _one(work, layer.name, "backward", "all-gather", (x,), result, each)
    if not layer.joins_next:
        if reads:
            yield _one(work, layer.name, "forward", "all-gather", (y,), operand, each)
        if reads and layer.name != "head":
            yield _one(work, layer.name, "recompute", "all-gather", (y,), operand, each)
        yield _one(work, layer.name, "backward", "reduce-scatter" if reads else "all-reduce", (y,), operand, each)
    if not layer.tied:
        yield _scatter(work, layer.name, weight, count)


def _spread(work: Work, layer: _Matmul, count: int, again: bool, last: bool) -> Iterator[Predicted]:
    """The same of a layer with inner features over `y` and `x`.

    A layer that reads the stream has it all-gathered over `x`, (Gx-1)/Gx m k e, once for layers that share it; dX is
    reduce-scattered over `x` and then all-reduced over `y`, 2 (Gy-1)/Gy m k e/Gx. Of one that adds to the stream the
    other way around: Y is reduce-scattered, then all-reduced, and dY all-gathered.
    """
    each = count * work.microbatches
    weight = layer.features_in * layer.features_out * work.itemsize // _size(work, _X, _Y)
    reads = layer.in_axis == _X
    row = work.rows * (layer.features_in if reads else layer.features_out) * work.itemsize
    phases: tuple[Phase, ...] = ("forward", "recompute") if again else ("forward",)
    for phase in phases:
        if phase == "forward":
            gathers = each if work.scanned and not work.once else count
            yield _one(work, layer.name, phase, "all-gather", (_Z,), weight, gathers)
        elif work.gather == "layer":
            yield _one(work, layer.name, phase, "all-gather", (_Z,), weight, each)
        if layer.joins_next or (phase == "recompute" and (last or work.activations == "save_collectives")):
            continue
        yield _one(work, layer.name, phase, "all-gather" if reads else "reduce-scatter", (_X,), row, each)
        if not reads:
            yield _one(work, layer.name, phase, "all-reduce", (_Y,), row // _size(work, _X), each)
    if reads and not layer.joins_next:
        yield _one(work, layer.name, "backward", "reduce-scatter", (_X,), row, each)
        yield _one(work, layer.name, "backward", "all-reduce", (_Y,), row // _size(work, _X), each)
    if not reads:
        yield _one(work, layer.name, "backward", "all-gather", (_X,), row, each)
    yield _scatter(work, layer.name, weight, count)


def _scatter(work: Work, name: str, weight: int, count: int) -> Predicted:
    """The reduce-scatter of gradients of `count` weights of so many bytes: of every microbatch, or of their sums."""
    times = count if work.once else count * work.microbatches
    return _one(work, name, "backward", "reduce-scatter", (_Z,), weight // work.itemsize * work.accumulate, times)


def _norm(work: Work, name: str, count: int, again: bool) -> Iterator[Predicted]:
    """LayerNorm: three float32 numbers a token forward, two backward (mean and factor); RMSNorm: one each way."""
    forward, backward = (3, 2) if work.shape.norm == "layernorm" else (1, 1)
    each = count * work.microbatches
    token = work.stream_rows * _FLOAT32
    yield _one(work, name, "forward", "all-reduce", (_X,), forward * token, each)
    if again and work.activations != "save_collectives":
        yield _one(work, name, "recompute", "all-reduce", (_X,), forward * token, each)
    yield _one(work, name, "backward", "all-reduce", (_X,), backward * token, each)


def _embedding(work: Work) -> Iterator[Predicted]:
    """Table over (y, z) x x: gathered over z, rows of the y shards added; learned positions over z x x: gathered."""
    shape, item = work.shape, work.itemsize
    table = work.vocab * shape.hidden * item // _size(work, _X, _Y)
    stream = work.rows * shape.hidden * item // _size(work, _X)
    yield _one(work, "embedding", "forward", "all-gather", (_Z,), table, 1)
    if work.sequence_parallel:
        yield _one(work, "embedding", "forward", "reduce-scatter", (_Y,), stream, work.microbatches)
        yield _one(work, "embedding", "backward", "all-gather", (_Y,), stream, work.microbatches)
    else:
        yield _one(work, "embedding", "forward", "all-reduce", (_Y,), stream, work.microbatches)
    yield _scatter(work, "embedding", table, 1)
    if shape.positions == "learned":
        positions = shape.seq_len * shape.hidden * item // _size(work, _X)
        yield _one(work, "positions", "forward", "all-gather", (_Z,), positions, 1)
        yield _scatter(work, "positions", positions, 1)


def _update(work: Work) -> Iterator[Predicted]:
    """Gradients once a step, in float32: over `data`, and over `z` too where a parameter is replicated there.

    With sequence parallelism over `y` as well: norms, biases added to the stream, positions.

    Buckets change the number of messages, not their bytes: entries here are gradients. Then the mean loss and the
    global norm, a scalar each. The optimizer is elementwise on what a device holds and communicates nothing.
    """
    shape = work.shape
    norm = 2 if shape.norm == "layernorm" else 1

    def reduced(name: str, elements: int, split: tuple[str, ...], count: int) -> Predicted:
        over = (_DATA, _Z, _Y) if work.sequence_parallel else (_DATA, _Z)
        axes = tuple(axis for axis in over if axis not in split)
        return _one(work, name, "update", "all-reduce", axes, elements * _FLOAT32 // _size(work, *split), count)

    yield reduced("embedding", work.vocab * shape.hidden, (_X, _Y, _Z), 1)
    if shape.positions == "learned":
        yield reduced("positions", shape.seq_len * shape.hidden, (_X, _Z), 1)
    for layer in block_matmuls(shape, work.inner):
        yield reduced(layer.name, layer.features_in * layer.features_out, (_X, _Y, _Z), shape.layers)
        if layer.bias:
            yield reduced(f"{layer.name}.bias", layer.features_out, layer.splits_bias, shape.layers)
    yield reduced("blocks.norms", shape.hidden, (_X,), 2 * norm * shape.layers)
    yield reduced("norm", shape.hidden, (_X,), norm)
    if not shape.tied:
        yield reduced("head", shape.hidden * work.vocab, (_X, _Y, _Z), 1)
    yield _one(work, "mean loss", "update", "all-reduce", (_DATA, _Z), _FLOAT32, 1)
    yield _one(work, "global norm", "update", "all-reduce", (_Z, _Y, _X), _FLOAT32, 1)
