"""Declarations of the layers in `core/tensor/`: linear layers, norms, embeddings and the loss."""

from typing import Literal, NamedTuple

from axonn_jax.core.ops.language import (
    FLOAT32,
    Add,
    Attend,
    Axes,
    Chain,
    Collective,
    Layer,
    Multiply,
    Op,
    Param,
    Read,
    gather,
    reduce,
    reduce_gradient,
    scatter,
)
from axonn_jax.core.options import AttentionKernel, Norm

TensorAxis = Literal["x", "y"]
Comm = Literal["all_reduce", "gather", "sequence"]
"""Communication of a projection that reads from or adds to the residual stream.

* all_reduce: the matmul reads local features, with an all-reduce over `x`; the output is all-reduced over `y`.
* gather: inner features are split over `y` and `x`. The stream's features are gathered over `x` before the matmul; its
  output is reduce-scattered over `x` and all-reduced over `y`.
* sequence: the stream's sequence is split over `y`, gathered before the matmul and reduce-scattered after it.
"""


class Place(NamedTuple):
    """The placement of a layer: sizes of its mesh axes, and a device's part of a microbatch."""

    expert: int
    z: int
    y: int
    x: int
    tokens: int
    """Tokens of a microbatch on a device."""
    item: int
    """Bytes per element in the compute dtype."""
    sequence_split: bool = False
    """True if `y` splits the sequence of the residual stream."""

    @property
    def stream_tokens(self) -> int:
        """Tokens of the residual stream on a device."""
        return self.tokens // (self.y if self.sequence_split else 1)

    @property
    def yx(self) -> int:
        """Product of the devices along `y` and `x`."""
        return self.y * self.x


def norm(at: Place, name: str, hidden: int, kind: Norm) -> tuple[tuple[Param, ...], tuple[Op, ...]]:
    """Declare a norm of the residual stream.

    It all-reduces float32 moments over `x`: per token, three forward and two backward for a LayerNorm, and one each way
    for an RMSNorm.

    Args:
        at: Placement of the layer.
        name: Name of the layer.
        hidden: Features of the residual stream.
        kind: LayerNorm or RMSNorm.
    """
    stream = hidden / at.x / (at.y if at.sequence_split else 1)
    forward, backward = (3, 2) if kind == "layernorm" else (1, 1)
    token = at.stream_tokens * FLOAT32
    moments = Collective(name, "all-reduce", "all-reduce", ("x",), forward * token, backward * token, small=True)
    stored = Read(stream, moved=2 * stream * at.item)
    vectors = ("scale", "shift") if kind == "layernorm" else ("scale",)
    params = tuple(Param(f"{name}.{vector}", (hidden,), (("x",),)) for vector in vectors)
    return params, (moments, stored)


def attend(at: Place, heads: float, kv_heads: float, head_dim: int, seq_len: int, kernel: AttentionKernel) -> Attend:
    """Declare an attention kernel (`tensor.attention`).

    Kernels save a float32 statistic per row of scores. In addition, `blocked` saves keys and values repeated per query
    head and its result by heads; instead of statistics, `xla` saves the scores and their softmax.

    Args:
        at: Placement of the layer.
        heads: Query heads on a device.
        kv_heads: Key/value heads on a device.
        head_dim: Features of a head.
        seq_len: Tokens of a sequence.
        kernel: The kernel.
    """
    scores = 2 * heads * seq_len * at.item if kernel == "xla" else heads * FLOAT32
    # Repeating keys and values for every query head adds `heads - kv_heads` copies of each; the result is one more.
    copies = (heads + 2 * (heads - kv_heads)) * head_dim * at.item if kernel == "blocked" else 0.0
    return Attend(heads, kv_heads, head_dim, seq_len, scores, copies)


def addition(at: Place, hidden: int) -> Add:
    """Declare the addition of a branch to the residual stream, which reads both and writes their sum."""
    return Add(3 * hidden / at.x / (at.y if at.sequence_split else 1) * at.item)


def linear(
    at: Place, name: str, k: int, n: int, in_axis: TensorAxis, comm: Comm, *, bias: bool,
    columns: int | None = None, shares_input: bool = False, is_head: bool = False, tied: bool = False,
) -> tuple[tuple[Param, ...], tuple[Op, ...]]:  # fmt: skip
    """Declare `tensor.linear.Linear`: a [k/Gin, n/Gout] matmul over `in_axis`.

    Args:
        at: Placement of the layer.
        name: Name of the layer.
        k: Input features.
        n: Output features.
        in_axis: Mesh axis that splits the input features; over `x` the layer reads the residual stream.
        comm: Communication with the residual stream.
        bias: True if the layer has a bias.
        columns: Columns of the kernel, zero beyond `n`; None: `n`.
        shares_input: True if the preceding layer reads the same input, which is then communicated once.
        is_head: True for the projection onto the vocabulary, which is neither pruned nor recomputed.
        tied: True if the kernel belongs to another layer, which has gathered it already.
    """
    wide, reads_stream = n if columns is None else columns, in_axis == "x"
    out_axis: TensorAxis = "y" if reads_stream else "x"
    inside, outside = (at.x, at.y) if reads_stream else (at.y, at.x)
    kernel_bytes = k * wide * at.item // at.yx
    weight = () if tied else (gather(name, ("z",), kernel_bytes, weight_itemsize=at.item),)

    def params(kernel: tuple[Axes, ...], of_bias: Axes) -> tuple[Param, ...]:
        kernel_param = Param(f"{name}.kernel", (k, wide), kernel, prunable=not is_head)
        return (kernel_param, Param(f"{name}.bias", (n,), (of_bias,))) if bias else (kernel_param,)

    if comm == "gather":
        inner, buffer = ("y", "x"), at.tokens * (k if reads_stream else wide) * at.item
        if reads_stream:
            # Backward runs in reverse: gradients are reduce-scattered over `x` first, so the all-reduce over `y` moves
            # 1/x of the bytes.
            read = (reduce_gradient(name, ("y",), buffer // at.x), gather(name, ("x",), buffer))
            product = Multiply(at.tokens, k, wide / at.yx, shares_input=shares_input)
            return params((("z",), inner), inner), (*weight, *(() if shares_input else read), product)
        product = Multiply(at.tokens, k / at.yx, wide, shares_input=shares_input)
        add = (scatter(name, ("x",), buffer), reduce(name, ("y",), buffer // at.x))
        return params(((*inner, "z"), ()), ("x",)), (*weight, product, *add)

    entering, leaving = (at.tokens * width * at.item for width in (k // inside, wide // outside))
    split_in, split_out = (comm == "sequence" and side for side in (reads_stream, not reads_stream))
    input_op = (
        gather(name, ("y",), entering, always_repeated=not is_head)
        if split_in
        else reduce_gradient(name, (out_axis,), entering)
    )
    # The input is saved as its shard of the sequence, and the backward pass gathers the remaining tokens.
    stored = k / at.yx if split_in else None
    product = Multiply(at.tokens, k / inside, wide / outside, shares_input=shares_input, stored_inner=stored)
    output_op = scatter(name, ("y",), leaving) if split_out else reduce(name, (in_axis,), leaving)
    ops = (*weight, *(() if shares_input else (input_op,)), product, output_op)
    return params(((in_axis, "z"), (out_axis,)), (out_axis,)), ops


def embedding(at: Place, rows: int, hidden: int, positions: int) -> Layer:
    """Declare `tensor.embedding.Embedding` and, if there are positions, `PositionEmbedding`.

    Args:
        at: Placement of the layer.
        rows: Rows of the table, one per token id.
        hidden: Features of the residual stream.
        positions: Rows of the table of positions; 0 for a model without one.
    """
    stream = at.tokens * hidden * at.item // at.x
    params = [Param("embedding.table", (rows, hidden), (("y", "z"), ("x",)))]
    table = rows * hidden * at.item // at.yx
    ops: list[Op] = [gather("embedding", ("z",), table, weight_itemsize=at.item)]
    ops.append((scatter if at.sequence_split else reduce)("embedding", ("y",), stream))
    if positions:
        params.append(Param("positions.table", (positions, hidden), (("z",), ("x",))))
        ops.append(gather("positions", ("z",), positions * hidden * at.item // at.x, weight_itemsize=at.item))
    return Layer(tuple(params), (Chain(tuple(ops)),), in_block=False)


def loss(at: Place) -> tuple[Op, ...]:
    """Declare `tensor.loss`, which reduces a token's largest logit, then its sum of exponentials and target logit."""
    token = at.tokens * FLOAT32
    return reduce("loss", ("y",), token), reduce("loss", ("y",), 2 * token)
