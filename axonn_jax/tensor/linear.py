"""The 4D-sharded matmul: Agarwal's algorithm as a Flax layer."""

from typing import Literal

import jax
from flax import nnx
from jax.sharding import PartitionSpec as P

from axonn_jax.tensor.collectives import Gathered, gather_weight, reduce_sum, vary
from axonn_jax.tensor.matmul import PLAIN, MatmulLayouts, matmul
from axonn_jax.tensor.params import constant_param, normal_param

TensorAxis = Literal["x", "y"]


def other(axis: TensorAxis) -> TensorAxis:
    """The axis that swaps roles with `axis` in the next layer."""
    return "y" if axis == "x" else "x"


def matmul_4d(
    x: jax.Array, kernel: jax.Array | Gathered, in_axis: TensorAxis, layouts: MatmulLayouts = PLAIN
) -> jax.Array:
    """`Y = X W` on local shards: rows over `data` and `z`, contraction over `in_axis`, columns over the other.

    Shapes: `x` [..., k/Gin], `kernel` [k/(Gin Gz), n/Gout] -> [..., n/Gout]. The kernel is cast to `x`'s dtype
    before it travels; `layouts` says how products are computed. Collectives (DESIGN section 4): forward all-gather of W
    over `z` and all-reduce of Y over `in_axis`; backward all-reduce of dX over the other axis and reduce-scatter of
    dW over `z`.
    Source: AxoNN 4D (arXiv 2305.13525), section on the 3D-parallel fully connected layer.
    """
    w = gather_weight(kernel, x.dtype)
    x = vary(x, (other(in_axis),))
    rows = x.reshape(-1, x.shape[-1])  # 2-D: batched operands cost the CPU backend a tenth of a step
    y = matmul(rows, w, layouts)
    return reduce_sum(y.reshape(*x.shape[:-1], w.shape[1]), in_axis)


class Linear(nnx.Module):
    """A linear layer whose input features are split over `in_axis` and output features over the other axis."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        in_axis: TensorAxis,
        bias: bool,
        std: float,
        key: jax.Array,
    ):
        self.in_axis: TensorAxis = in_axis
        self.layouts = PLAIN
        out_axis = other(in_axis)
        self.kernel = normal_param(key, (in_features, out_features), std, P((in_axis, "z"), out_axis))
        self.bias = constant_param((out_features,), 0.0, P(out_axis)) if bias else None

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., in/Gin] -> [..., out/Gout]; collectives as in `matmul_4d`."""
        y = matmul_4d(x, self.kernel.get_value(), self.in_axis, self.layouts)
        return y if self.bias is None else y + self.bias.get_value().astype(y.dtype)
