"""The 4D-sharded matmul: Agarwal's algorithm as a Flax layer."""

from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P

from axonn_jax import compat
from axonn_jax.backend.repairs import over_rows
from axonn_jax.ops.layers import Comm, TensorAxis
from axonn_jax.tensor.collectives import (
    SEQUENCE_AXIS,
    all_reduce,
    axis_size,
    gather_features,
    gather_sequence,
    mark_varying,
    scatter_features,
    scatter_sequence,
)
from axonn_jax.tensor.elementwise import DropoutKey
from axonn_jax.tensor.matmul import matmul
from axonn_jax.tensor.params import constant_param, normal_param
from axonn_jax.tensor.weight_gather import GatheredWeight, gather_weight


def swapped(axis: TensorAxis) -> TensorAxis:
    """Return the axis that swaps roles with `axis` in the next layer."""
    return "y" if axis == "x" else "x"


def matmul_4d(
    x: jax.Array,
    kernel: jax.Array | GatheredWeight,
    in_axis: TensorAxis,
    comm: Comm = "all_reduce",
    *,
    turned: bool = False,
    few: int = 0,
    adapter: Callable[[jax.Array], jax.Array] | None = None,
) -> jax.Array:
    """`Y = X W` on local shards: tokens over `data` and `z`, contraction over `in_axis`, columns over the other.

    Shapes: `x` [..., k/Gin], `kernel` [k/(Gin Gz), n/Gout] -> [..., n/Gout]. The kernel is cast to `x`'s dtype
    before it travels; it is held [n/Gout, k/Gin] if `turned`, where Gz is 1; `few` as for `matmul`.
    Collectives: forward all-gather of W over `z` and all-reduce of Y over `in_axis`; backward
    all-reduce of dX over the other axis and reduce-scatter of dW over `z`. With `comm` "sequence" a product over `y` is
    reduce-scattered along the sequence dim of [batch, seq, n/Gx]. With "gather" a product over `x` takes [..., k] and
    gives [..., n/(Gy Gx)] without a collective; one over `y` is reduce-scattered over `x` along its features and then
    all-reduced, [..., k/(Gy Gx)] -> [..., n/Gx]. An `adapter` gives further partial sums of `x`, which are reduced with
    the others.
    Source: AxoNN 4D (arXiv 2305.13525), section on the 3D-parallel fully connected layer.
    """
    w = gather_weight(kernel, x.dtype)
    x = mark_varying(x, (swapped(in_axis),))

    y = over_rows(lambda rows: matmul(rows, w, turned=turned, few=few), x)
    y = y if adapter is None else y + adapter(x)
    if comm == "gather":
        return y if in_axis == "x" else all_reduce(scatter_features(y), in_axis)
    return scatter_sequence(y) if comm == "sequence" and in_axis == "y" else all_reduce(y, in_axis)


def _specs(in_axis: TensorAxis, comm: Comm) -> tuple[P, P]:
    """Layouts of a kernel and of a bias."""
    if comm != "gather":
        return P((in_axis, "z"), swapped(in_axis)), P(swapped(in_axis))
    inner = ("y", "x")
    return (P("z", inner), P(inner)) if in_axis == "x" else (P((*inner, "z")), P("x"))


class Linear(nnx.Module):
    """A linear layer whose input features are split over `in_axis` and output features over the other axis.

    Over `x` it reads the residual stream, over `y` it adds to it, in the way of `comm`. A layer without bias may have
    more `columns` than output features, which are zero.
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
        comm: Comm = "all_reduce",
        columns: int | None = None,
    ):
        self.in_axis: TensorAxis = in_axis
        self.comm: Comm = comm
        self.turned = False
        """True if the kernel is held [out, in], as in generation on CPUs (`inference.cpu_kernels`)."""
        self.few = 0
        """Tokens up to which the transposed product is computed, as there."""
        self.regather = False
        """True if the backward pass gathers a split sequence again instead of keeping the gathered one."""
        self.adapter: Callable[..., jax.Array] | None = None
        kernel_spec, bias_spec = _specs(in_axis, comm)
        padded = (in_features, out_features if columns is None else columns)
        self.kernel = normal_param(key, (in_features, out_features), std, kernel_spec, padded=padded)
        self.bias = constant_param((out_features,), 0.0, bias_spec) if bias else None

    def adapt(self, adapter: Callable[..., jax.Array] | None) -> None:
        """Add the partial sums of a module to those of the layer from now on (`matmul_4d`); None: of none."""
        self.adapter = nnx.data(adapter)

    def __call__(self, x: jax.Array, key: DropoutKey | None = None) -> jax.Array:
        """[..., in/Gin] -> [..., out/Gout]; collectives as in `column_parallel`, over `y` as in `matmul_4d`.

        An adapter drops features where `key` is given.
        """
        if self.in_axis == "x":
            return column_parallel((self,), x, key)[0]
        return self.apply_to_gathered(x, self.kernel.get_value(), key)

    def apply_to_gathered(
        self, x: jax.Array, kernel: jax.Array | GatheredWeight, key: DropoutKey | None = None
    ) -> jax.Array:
        """Apply the layer to a gathered input, with `kernel` in place of the layer's own."""
        adapter = None if self.adapter is None else partial(self.adapter, key=key)
        y = matmul_4d(x, kernel, self.in_axis, self.comm, turned=self.turned, few=self.few, adapter=adapter)
        return y if self.bias is None else add_bias(y, self.bias.get_value())


def add_bias(y: jax.Array, bias: jax.Array) -> jax.Array:
    """[..., n] + [n] in the first's dtype; the bias's gradient, a sum over all tokens, adds up in float32."""
    return _plus(mark_varying(y, compat.varying_axes(bias)), mark_varying(bias, compat.varying_axes(y)))


@jax.custom_vjp
def _plus(y: jax.Array, bias: jax.Array) -> jax.Array:
    return y + bias.astype(y.dtype)


def _plus_backward(bias: jax.Array, dy: jax.Array) -> tuple[jax.Array, jax.Array]:
    db = jnp.sum(dy, tuple(range(dy.ndim - 1)), dtype=jnp.float32)
    return dy, db.astype(bias.dtype)


_plus.defvjp(lambda y, bias: (_plus(y, bias), bias), _plus_backward)


def column_parallel(layers: Sequence[Linear], x: jax.Array, key: DropoutKey | None = None) -> list[jax.Array]:
    """Apply layers that read the residual stream, all with one `comm`; their dX are added before the reduction.

    Stream [batch, seq, hidden/Gx], its sequence over `y` with "sequence" -> [batch, seq, features/Gy] a layer. The
    stream is gathered once for all layers; other collectives are those of `matmul_4d`.
    """
    comm = layers[0].comm
    if comm != "sequence":
        x = mark_varying(x, ("y",))
        x = gather_features(x) if comm == "gather" else x
        return [layer.apply_to_gathered(x, layer.kernel.get_value(), key) for layer in layers]
    # Weights are gathered before: the backward pass gathers only the stream again.
    kernels = [GatheredWeight(gather_weight(layer.kernel.get_value(), x.dtype)) for layer in layers]

    def read(x: jax.Array) -> list[jax.Array]:
        gathered = gather_sequence(x)
        return [layer.apply_to_gathered(gathered, kernel, key) for layer, kernel in zip(layers, kernels, strict=True)]

    regather = layers[0].regather and axis_size(SEQUENCE_AXIS) > 1
    return (jax.checkpoint(read) if regather else read)(x)


def regather_residual(module: nnx.Module) -> None:
    """Make the backward pass of a module's projections gather a split sequence again (`Linear.regather`)."""
    for _, layer in nnx.iter_modules(module):
        if isinstance(layer, Linear):
            layer.regather = True
