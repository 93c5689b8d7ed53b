"""Memory of training in bytes: model state by precision and placement, activations, buffers; no jax.

Every function is a formula: numbers of parameters or tokens in, bytes out. The published totals are among them, so that
they can be compared: AxoNN's 20 bytes a parameter and 4 with offload (IPDPS 22), SAMO's compressed state (IPDPS 23),
TED's bound for experts (ICS 23).
"""

from dataclasses import dataclass
from typing import Literal

from axonn_jax.models.inner import PAPERS, Inner
from axonn_jax.models.shape import ModelShape
from axonn_jax.tensor.attention_forms import AttentionKernel
from axonn_jax.tensor.chunks import loss_chunk

Precision = Literal["fp32", "bf16", "fp16"]
Policy = Literal["none", "full", "dots", "save_collectives", "offload"]
_FP32, _INT32 = 4, 4
_HALF = 2
_STREAMED_BUCKETS = 3
_OFFLOAD_BUFFERS = 4  # weight, gradient and both moments of one bucket, float32


@dataclass(frozen=True)
class State:
    """Bytes of weights, gradients and optimizer state, on one kind of memory."""

    weights: float = 0.0
    """Those that a step reads: in compute precision where float32 ones lie apart, else float32, cast where used."""
    gradients: float = 0.0
    """As accumulated."""
    master: float = 0.0
    """Float32 weights beside half-precision ones."""
    moments: float = 0.0
    """Adam's two."""

    @property
    def total(self) -> float:
        """All of it."""
        return self.weights + self.gradients + self.master + self.moments


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
) -> State:
    """State of `params` parameters on the device.

    `accumulate` is the bytes of a gradient, `replicas` the devices that share master weights and moments between them
    (ZeRO-1; 1: none do). Master weights lie `apart` from half-precision weights, as they do where they are shared or,
    with `offload`, on the host; else the weights themselves are float32.
    """
    master, moments = _optimizer(params / replicas, precision, apart or offload or replicas > 1)
    return State(
        weights=params * (itemsize(precision) if master else _FP32),
        gradients=params * accumulate,
        master=0.0 if offload else master,
        moments=0.0 if offload else moments,
    )


def host_state(params: float, precision: Precision, *, offload: bool = False, replicas: int = 1) -> State:
    """State of `params` parameters on the host: with offload moments and, of half-precision weights, masters."""
    if not offload:
        return State()
    master, moments = _optimizer(params / replicas, precision, apart=True)
    return State(master=master, moments=moments)


def _optimizer(params: float, precision: Precision, apart: bool) -> tuple[float, float]:
    """Bytes of master weights and of Adam's moments."""
    return (params * _FP32 if apart and precision != "fp32" else 0.0), params * 2 * _FP32


def streamed_state(bucket: float, precision: Precision) -> float:
    """Device bytes of the buckets of an offloaded update: one arriving, one being updated, one on its way back."""
    return _STREAMED_BUCKETS * host_state(bucket, precision, offload=True).total


def offload_buffers(bucket: float) -> float:
    """AxoNN's device buffers for an offloaded update of `bucket` elements: 16 bytes an element (IPDPS 22)."""
    return _OFFLOAD_BUFFERS * _FP32 * bucket


def axonn_state(params: float, *, offload: bool = False, bucket: float = 16_000_000) -> float:
    """AxoNN's model state on the device: 20 bytes a parameter, or 4 and the buffers of a bucket (IPDPS 22)."""
    if offload:
        return device_state(params, "fp16", accumulate=_HALF, offload=True).total + offload_buffers(bucket)
    upcast = params * _FP32  # all gradients once more in float32
    return device_state(params, "fp16", accumulate=_HALF, apart=True).total + upcast


@dataclass(frozen=True)
class SamoState:
    """SAMO's state of a pruned network in bytes: dense half weights, all else for the kept entries only."""

    weights: float
    gradients: float
    master: float
    master_gradients: float
    moments: float
    index: float
    downcast: float

    @property
    def total(self) -> float:
        """(2 + 24 f) bytes a parameter."""
        kept = self.gradients + self.master + self.master_gradients + self.moments + self.index + self.downcast
        return self.weights + kept


def samo_state(params: float, kept: float) -> SamoState:
    """State of `params` parameters of which the fraction `kept` is not pruned (IPDPS 23, section on memory)."""
    alive = params * kept
    return SamoState(
        weights=_HALF * params,
        gradients=_HALF * alive,
        master=_FP32 * alive,
        master_gradients=_FP32 * alive,
        moments=2 * _FP32 * alive,
        index=_INT32 * alive,
        downcast=_HALF * alive,
    )


def ted_state(base_params: float, experts: int, tensor: int, expert: int, devices: int) -> float:
    """TED's lower bound of state a device: experts in every second layer, ZeRO-1 in both data groups (ICS 23).

    `tensor` and `expert` are the sizes of their groups. With as many expert groups as experts this is
    `4 P (1/tensor + (experts + 2)/devices)`.
    """
    dense_replicas = devices / tensor
    expert_replicas = dense_replicas / expert
    dense = base_params * 2 / 3 / tensor
    sparse = experts * base_params / 3 / (tensor * expert)
    # Half weights and gradients, then float32 weights and moments.
    return (4 + 12 / dense_replicas) * dense + (4 + 12 / expert_replicas) * sparse


@dataclass(frozen=True)
class Block:
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


def block_activations(
    shape: ModelShape,
    x: int,
    y: int,
    item: int,
    policy: Policy,
    attention: AttentionKernel = "cudnn",
    *,
    sequence_parallel: bool = False,
    inner: Inner = PAPERS,
) -> Block:
    """Activations of a block on a grid of `x` and `y`, `item` bytes an element.

    The residual stream is split over `x`, what is between two matmuls over `y`. `none` keeps what every operation's
    gradient reads; `full` the block's input; `dots` the results of its matmuls too, but for the last, which no gradient
    reads; `save_collectives` those of them that were all-reduced; `offload` keeps the input on the host. Attention of
    whole scores keeps them and their softmax; in blocks, keys and values for every head, and its result by heads too.

    With sequence parallelism the stream is split over `y` too, but where matmuls read it: gathered once more in the
    backward pass, or there once where the block is computed again. Halves of a block with `inner` features over `x` and
    `y` read the whole stream, and have less between their matmuls.
    """
    spread = (inner.attention, inner.mlp)
    over, mlp = (x * y if one else y for one in spread)
    stream, width = shape.hidden / x, shape.heads * shape.head_dim / over
    gates = 2 if shape.mlp == "swiglu" else 1
    scores = 2 * shape.heads / over * shape.seq_len if attention == "xla" else 0.0
    statistics = shape.heads / over * _FP32 if attention != "xla" else 0.0
    wide = (shape.qkv_width / over, gates * shape.ffn / mlp)
    repeated = 2 * (shape.heads - shape.kv_heads) * shape.head_dim / over
    copies = width + repeated if attention == "blocked" else 0.0
    part = stream / y if sequence_parallel else stream
    read = part if policy == "none" else stream
    reads = [shape.hidden if one else read for one in spread]
    # Both inputs of norms, both normalised streams, queries to values, attention's result, the MLP's two widths.
    # The scale of an RMSNorm has its gradient from the stream before it, which is kept too.
    everything = (4 if shape.norm == "rmsnorm" else 2) * part + sum(reads) + sum(wide) + width + shape.ffn / mlp
    whole = (everything + scores + copies) * item + statistics
    entry = part * item
    # Of the residual stream and of a branch; of the widest operation, on both of its sides.
    ends = [shape.hidden if one else stream for one in spread]
    middles = (wide[0] + copies, wide[1])
    halves = [(part + end + 2 * middle) * item for end, middle in zip(ends, middles, strict=True)]
    gradients = max(halves)
    spare = gradients - halves[0]
    if sequence_parallel and policy == "none":
        gradients += stream * item  # gathered again
    # Inputs of the norms; gradients of what both halves add to the stream, before and after they are gathered again.
    split = 2 * part if sequence_parallel and shape.bias else 0.0
    products = (2 * part + sum(ends) + split + shape.qkv_width / over + width + (1 + gates) * shape.ffn / mlp) * item
    # Queries and keys with positions are handed over beside what they were made of.
    rotated = (shape.heads + shape.kv_heads) * shape.head_dim / over if shape.positions == "rope" else 0.0
    if policy == "none":
        shown = (4 if shape.norm == "rmsnorm" else 2) * part - 2 * part + read * (2 - sum(spread))
        shown += shape.ffn / mlp - rotated
        released = (shape.qkv_width / over + rotated + copies) * item + statistics
        return Block(entry, whole, gradients, shown=shown * item, waiting=products, released=released, spare=spare)
    if policy == "full":
        return Block(entry, entry, whole + gradients, whole, waiting=products, spare=spare)
    if policy == "offload":  # two inputs are under way
        return Block(entry, 0.0, whole + gradients + 2 * entry, whole, entry, waiting=products, spare=spare)
    if policy == "dots":
        matmuls = sum(wide) + (shape.hidden if inner.attention else stream)  # the latter before it is reduced
    else:
        kept = (shape.hidden if one else middle for one, middle in zip(spread, wide, strict=True))
        matmuls = (sum(kept) if x > 1 else 0.0) + (part if y > 1 or inner.attention else 0.0)
    again = whole - matmuls * item
    return Block(entry, entry + matmuls * item, again + gradients, again, waiting=products, spare=spare)


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
