"""The 4D-sharded matmul: Agarwal's algorithm as a Flax layer."""

from collections.abc import Sequence
from typing import Literal

import jax
from flax import nnx
from jax.sharding import PartitionSpec as P

from axonn_jax.tensor.collectives import Gathered, axis_size, gather_weight, reduce_sum, vary
from axonn_jax.tensor.matmul import PLAIN, MatmulLayouts, matmul
from axonn_jax.tensor.params import constant_param, normal_param
from axonn_jax.tensor.sequence import SEQUENCE_AXIS, gather_sequence, scatter_sequence

TensorAxis = Literal["x", "y"]


def other(axis: TensorAxis) -> TensorAxis:
    """The axis that swaps roles with `axis` in the next layer."""
    return "y" if axis == "x" else "x"


def matmul_4d(
    x: jax.Array,
    kernel: jax.Array | Gathered,
    in_axis: TensorAxis,
    layouts: MatmulLayouts = PLAIN,
    *,
    scattered: bool = False,
) -> jax.Array:
    """`Y = X W` on local shards: rows over `data` and `z`, contraction over `in_axis`, columns over the other.

    Shapes: `x` [..., k/Gin], `kernel` [k/(Gin Gz), n/Gout] -> [..., n/Gout]. The kernel is cast to `x`'s dtype
    before it travels; `layouts` says how products are computed. Collectives (DESIGN section 4): forward all-gather of W
    over `z` and all-reduce of Y over `in_axis`; backward all-reduce of dX over the other axis and reduce-scatter of
    dW over `z`. A result that is `scattered` is reduce-scattered along the sequence dim of [batch, seq, n/Gout]
    (`tensor.sequence`).
    Source: AxoNN 4D (arXiv 2305.13525), section on the 3D-parallel fully connected layer.
    """
    w = gather_weight(kernel, x.dtype)
    x = vary(x, (other(in_axis),))
    rows = x.reshape(-1, x.shape[-1])  # 2-D: batched operands cost the CPU backend a tenth of a step
    y = matmul(rows, w, layouts).reshape(*x.shape[:-1], w.shape[1])
    return scatter_sequence(y) if scattered else reduce_sum(y, in_axis)


class Linear(nnx.Module):
    """A linear layer whose input features are split over `in_axis` and output features over the other axis.

    With `sequence_parallel` its side towards the residual stream, whose features `x` splits, has the sequence split
    over `y` (`tensor.sequence`).
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        in_axis: TensorAxis,
        bias: bool,
        std: float,
        key: jax.Array,
        sequence_parallel: bool = False,
    ):
        self.in_axis: TensorAxis = in_axis
        self.sequence_parallel = sequence_parallel
        self.layouts = PLAIN
        out_axis = other(in_axis)
        self.kernel = normal_param(key, (in_features, out_features), std, P((in_axis, "z"), out_axis))
        self.bias = constant_param((out_features,), 0.0, P(out_axis)) if bias else None

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., in/Gin] -> [..., out/Gout]; collectives as in `matmul_4d`, before them the gather of a split stream."""
        if self.sequence_parallel and self.in_axis == "x":
            x = gather_sequence(x)
        return self.on_whole(x, self.kernel.get_value())

    def on_whole(self, x: jax.Array, kernel: jax.Array | Gathered) -> jax.Array:
        """As a call, on an input with its whole sequence, with a kernel in place of the layer's own."""
        scattered = self.sequence_parallel and self.in_axis == "y"
        y = matmul_4d(x, kernel, self.in_axis, self.layouts, scattered=scattered)
        return y if self.bias is None else y + self.bias.get_value().astype(y.dtype)


def read_stream(layers: Sequence[Linear], x: jax.Array, *, split: bool, again: bool) -> list[jax.Array]:
    """What layers make of the residual stream; the backward pass adds their dX before it is reduced, once for all.

    The sequence of a stream that is `split` over `y` is gathered once for all, and where it is gathered `again` in the
    backward pass only the part is kept until then. Other collectives as in `matmul_4d`.
    """
    if not split:
        x = vary(x, ("y",))
        return [layer(x) for layer in layers]
    # Gathered before: what the backward pass gathers again is the stream, and not the weights.
    kernels = [Gathered(gather_weight(layer.kernel.get_value(), x.dtype)) for layer in layers]

    def read(x: jax.Array) -> list[jax.Array]:
        whole = gather_sequence(x)
        return [layer.on_whole(whole, kernel) for layer, kernel in zip(layers, kernels, strict=True)]

    return (jax.checkpoint(read) if again and axis_size(SEQUENCE_AXIS) > 1 else read)(x)
