"""The 4D-sharded matmul: Agarwal's algorithm as a Flax layer."""

from collections.abc import Sequence
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P

from axonn_jax import compat
from axonn_jax.tensor.collectives import Gathered, axis_size, gather_weight, reduce_sum, vary
from axonn_jax.tensor.features import gather_features, scatter_features
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
    spread: bool = False,
) -> jax.Array:
    """`Y = X W` on local shards: rows over `data` and `z`, contraction over `in_axis`, columns over the other.

    Shapes: `x` [..., k/Gin], `kernel` [k/(Gin Gz), n/Gout] -> [..., n/Gout]. The kernel is cast to `x`'s dtype
    before it travels; `layouts` says how products are computed. Collectives (DESIGN section 4): forward all-gather of W
    over `z` and all-reduce of Y over `in_axis`; backward all-reduce of dX over the other axis and reduce-scatter of
    dW over `z`. A result that is `scattered` is reduce-scattered along the sequence dim of [batch, seq, n/Gout]
    (`tensor.sequence`). Where inner features are `spread` over `y` and `x`, a product over `x` has the whole operand
    [..., k] and gives [..., n/(Gy Gx)] without a collective; one over `y` is reduce-scattered over `x` along its
    features first and then all-reduced, [..., k/(Gy Gx)] -> [..., n/Gx].
    Source: AxoNN 4D (arXiv 2305.13525), section on the 3D-parallel fully connected layer.
    """
    w = gather_weight(kernel, x.dtype)
    x = vary(x, (other(in_axis),))
    rows = x.reshape(-1, x.shape[-1])  # 2-D: batched operands cost the CPU backend a tenth of a step
    y = matmul(rows, w, layouts).reshape(*x.shape[:-1], w.shape[1])
    if spread:
        return y if in_axis == "x" else reduce_sum(scatter_features(y), in_axis)
    return scatter_sequence(y) if scattered else reduce_sum(y, in_axis)


def _layouts(in_axis: TensorAxis, spread: bool) -> tuple[P, P]:
    """Of a kernel and of a bias."""
    if not spread:
        return P((in_axis, "z"), other(in_axis)), P(other(in_axis))
    inner = ("y", "x")
    return (P("z", inner), P(inner)) if in_axis == "x" else (P((*inner, "z")), P("x"))


class Linear(nnx.Module):
    """A linear layer whose input features are split over `in_axis` and output features over the other axis.

    With `sequence_parallel` its side towards the residual stream, whose features `x` splits, has the sequence split
    over `y` (`tensor.sequence`). With `spread` the features of its other side are split over `y` and `x`. A layer
    that has no bias may have more `columns` than output features, which are zero.
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
        spread: bool = False,
        columns: int | None = None,
    ):
        self.in_axis: TensorAxis = in_axis
        self.sequence_parallel, self.spread = sequence_parallel, spread
        self.layouts = PLAIN
        of_kernel, of_bias = _layouts(in_axis, spread)
        padded = (in_features, out_features if columns is None else columns)
        self.kernel = normal_param(key, (in_features, out_features), std, of_kernel, padded=padded)
        self.bias = constant_param((out_features,), 0.0, of_bias) if bias else None

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., in/Gin] -> [..., out/Gout]; collectives as in `matmul_4d`, before them the gather of a split stream."""
        if self.sequence_parallel and self.in_axis == "x":
            x = gather_sequence(x)
        elif self.spread and self.in_axis == "x":
            x = gather_features(vary(x, ("y",)))
        return self.on_whole(x, self.kernel.get_value())

    def on_whole(self, x: jax.Array, kernel: jax.Array | Gathered) -> jax.Array:
        """As a call, on an input that has been gathered, with a kernel in place of the layer's own."""
        scattered = self.sequence_parallel and self.in_axis == "y"
        y = matmul_4d(x, kernel, self.in_axis, self.layouts, scattered=scattered, spread=self.spread)
        return y if self.bias is None else add_bias(y, self.bias.get_value())


def add_bias(y: jax.Array, bias: jax.Array) -> jax.Array:
    """[..., n] + [n] in the first's dtype; the bias's gradient, a sum over all tokens, adds up in float32."""
    return _plus(vary(y, compat.varying_axes(bias)), vary(bias, compat.varying_axes(y)))


@jax.custom_vjp
def _plus(y: jax.Array, bias: jax.Array) -> jax.Array:
    return y + bias.astype(y.dtype)


def _plus_forward(y: jax.Array, bias: jax.Array) -> tuple[jax.Array, jax.Array]:
    return _plus(y, bias), bias


def _plus_backward(bias: jax.Array, dy: jax.Array) -> tuple[jax.Array, jax.Array]:
    db = jnp.sum(dy, tuple(range(dy.ndim - 1)), dtype=jnp.float32)
    return dy, db.astype(bias.dtype)


_plus.defvjp(_plus_forward, _plus_backward)


def read_stream(
    layers: Sequence[Linear], x: jax.Array, *, split: bool, again: bool, spread: bool = False
) -> list[jax.Array]:
    """What layers make of the residual stream; the backward pass adds their dX before it is reduced, once for all.

    The sequence of a stream that is `split` over `y` is gathered once for all, and where it is gathered `again` in the
    backward pass only the part is kept until then. Layers with `spread` features share the gather
    over `x`. Other collectives as in `matmul_4d`.
    """
    if not split:
        x = vary(x, ("y",))
        if not spread:
            return [layer(x) for layer in layers]
        x = gather_features(x)
        return [layer.on_whole(x, layer.kernel.get_value()) for layer in layers]
    # Gathered before: what the backward pass gathers again is the stream, and not the weights.
    kernels = [Gathered(gather_weight(layer.kernel.get_value(), x.dtype)) for layer in layers]

    def read(x: jax.Array) -> list[jax.Array]:
        whole = gather_sequence(x)
        return [layer.on_whole(whole, kernel) for layer, kernel in zip(layers, kernels, strict=True)]

    return (jax.checkpoint(read) if again and axis_size(SEQUENCE_AXIS) > 1 else read)(x)
