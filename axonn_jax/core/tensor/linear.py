"""4D-sharded matmul (Agarwal's algorithm) and the linear layer built on it."""

from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P

from axonn_jax.core import compat
from axonn_jax.core.backend.workarounds import over_rows
from axonn_jax.core.ops.layers import Comm, TensorAxis
from axonn_jax.core.tensor.collectives import (
    SEQUENCE_AXIS,
    all_reduce,
    axis_size,
    gather_features,
    gather_sequence,
    mark_varying,
    scatter_features,
    scatter_sequence,
)
from axonn_jax.core.tensor.elementwise import DropoutKey
from axonn_jax.core.tensor.params import constant_param, normal_param
from axonn_jax.core.tensor.weight_gather import GatheredWeight, gather_weight


def swapped(axis: TensorAxis) -> TensorAxis:
    """Return the axis that swaps roles with `axis` in the next layer."""
    return "y" if axis == "x" else "x"


def matmul(x: jax.Array, w: jax.Array, *, turned: bool = False, transpose_limit: int = 0) -> jax.Array:
    """Compute `Y = X W` on one device, [rows, k] and [k, n] (stored as [n, k] if `turned`) -> [rows, n].

    No collectives. Up to `transpose_limit` rows are computed as the transposed product `W^T X^T`.
    """
    over = 1 if turned else 0
    if x.shape[0] > transpose_limit:
        return lax.dot_general(x, w, (((1,), (over,)), ((), ())))
    # Without the barrier, XLA would move the transpose back to the other side of the product.
    return lax.optimization_barrier(lax.dot_general(w, x, (((over,), (1,)), ((), ())))).T


def matmul_4d(
    x: jax.Array,
    kernel: jax.Array | GatheredWeight,
    in_axis: TensorAxis,
    comm: Comm = "all_reduce",
    *,
    turned: bool = False,
    transpose_limit: int = 0,
    adapter: Callable[[jax.Array], jax.Array] | None = None,
) -> jax.Array:
    """Compute `Y = X W` on local shards: tokens over `data` and `z`, contraction over `in_axis`, output over the other.

    Collectives: forward an all-gather of W over `z` and an all-reduce of Y over `in_axis`; backward an all-reduce of dX
    over the other axis and a reduce-scatter of dW over `z`. With `comm` "sequence" a product over `y` is
    reduce-scattered along the sequence dim of [batch, seq, n/Gx]. With "gather" a product over `x` maps [..., k] to
    [..., n/(Gy Gx)] without a collective; a product over `y` maps [..., k/(Gy Gx)] to [..., n/Gx] by a reduce-scatter
    of its features over `x` and an all-reduce.
    Source: AxoNN 4D (arXiv 2305.13525), section on the 3D-parallel fully connected layer.

    Args:
        x: [..., k/Gin].
        kernel: [k/(Gin Gz), n/Gout], cast to `x`'s dtype before it travels; [n/Gout, k/Gin] if `turned`, where Gz is 1.
        in_axis: Axis to contract over.
        comm: How the residual stream is communicated.
        turned: True if the kernel is stored transposed.
        transpose_limit: As for `matmul`.
        adapter: Computes further partial sums from `x`, which are reduced together with the product's.

    Returns:
        [..., n/Gout].
    """
    w = gather_weight(kernel, x.dtype)
    # The transpose of this marking is the all-reduce of dX.
    x = mark_varying(x, (swapped(in_axis),))

    y = over_rows(lambda rows: matmul(rows, w, turned=turned, transpose_limit=transpose_limit), x)
    y = y if adapter is None else y + adapter(x)
    if comm == "gather":
        return y if in_axis == "x" else all_reduce(scatter_features(y), in_axis)
    return scatter_sequence(y) if comm == "sequence" and in_axis == "y" else all_reduce(y, in_axis)


def _specs(in_axis: TensorAxis, comm: Comm) -> tuple[P, P]:
    """Return the layouts of a kernel and of a bias."""
    if comm != "gather":
        return P((in_axis, "z"), swapped(in_axis)), P(swapped(in_axis))
    inner = ("y", "x")
    return (P("z", inner), P(inner)) if in_axis == "x" else (P((*inner, "z")), P("x"))


class Linear(nnx.Module):
    """Linear layer with input features split over `in_axis` and output features over the other axis.

    A layer over `x` reads the residual stream, a layer over `y` adds to it, with the communication of `comm`. A layer
    without bias may have more `columns` than output features; the additional ones are zero.
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
        """True if the kernel is stored as [out, in], as in generation on CPUs (`inference.cpu_kernels`)."""
        self.transpose_limit = 0
        """Maximum number of tokens for which the transposed product is computed (`inference.cpu_kernels`)."""
        self.regather = False
        """True if the backward pass gathers a split sequence again instead of saving the gathered one."""
        self.adapter: Callable[..., jax.Array] | None = None
        kernel_spec, bias_spec = _specs(in_axis, comm)
        padded = (in_features, out_features if columns is None else columns)
        self.kernel = normal_param(key, (in_features, out_features), std, kernel_spec, padded=padded)
        self.bias = constant_param((out_features,), 0.0, bias_spec) if bias else None

    def adapt(self, adapter: Callable[..., jax.Array] | None) -> None:
        """Set the module whose partial sums are added to the layer's (`matmul_4d`); None removes it."""
        self.adapter = nnx.data(adapter)

    def __call__(self, x: jax.Array, key: DropoutKey | None = None) -> jax.Array:
        """Apply the layer, [..., in/Gin] -> [..., out/Gout].

        Collectives are those of `column_parallel` for `in_axis` "x", those of `matmul_4d` for "y". With a `key`, an
        adapter applies dropout.
        """
        if self.in_axis == "x":
            return column_parallel((self,), x, key)[0]
        return self.apply_to_gathered(x, self.kernel.get_value(), key)

    def apply_to_gathered(
        self, x: jax.Array, kernel: jax.Array | GatheredWeight, key: DropoutKey | None = None
    ) -> jax.Array:
        """Apply the layer to an input that is already gathered, with `kernel` in place of the layer's parameter."""
        adapter = None if self.adapter is None else partial(self.adapter, key=key)
        y = matmul_4d(
            x,
            kernel,
            self.in_axis,
            self.comm,
            turned=self.turned,
            transpose_limit=self.transpose_limit,
            adapter=adapter,
        )
        return y if self.bias is None else add_bias(y, self.bias.get_value())


def add_bias(y: jax.Array, bias: jax.Array) -> jax.Array:
    """Return [..., n] + [n] in the dtype of `y`; the bias's gradient is summed over all tokens in float32."""
    # The cotangents of a custom VJP vary like its inputs, so mark both operands varying over the same axes; the
    # reduction is the transpose of this marking.
    return _plus(mark_varying(y, compat.varying_axes(bias)), mark_varying(bias, compat.varying_axes(y)))


@jax.custom_vjp
def _plus(y: jax.Array, bias: jax.Array) -> jax.Array:
    return y + bias.astype(y.dtype)


def _plus_backward(bias: jax.Array, dy: jax.Array) -> tuple[jax.Array, jax.Array]:
    db = jnp.sum(dy, tuple(range(dy.ndim - 1)), dtype=jnp.float32)
    return dy, db.astype(bias.dtype)


_plus.defvjp(lambda y, bias: (_plus(y, bias), bias), _plus_backward)


def column_parallel(layers: Sequence[Linear], x: jax.Array, key: DropoutKey | None = None) -> list[jax.Array]:
    """Apply layers that read the residual stream, which is gathered once for all of them.

    Other collectives are those of `matmul_4d`.

    Args:
        layers: The layers, all with the same `comm`.
        x: The stream [batch, seq, hidden/Gx]; with `comm` "sequence" its sequence is split over `y`.
        key: Key for the adapters' dropout.

    Returns:
        [batch, seq, features/Gy] for each layer.
    """
    comm = layers[0].comm
    if comm != "sequence":
        # Marked here, once, the layers' dX are summed before a single all-reduce.
        x = mark_varying(x, ("y",))
        x = gather_features(x) if comm == "gather" else x
        return [layer.apply_to_gathered(x, layer.kernel.get_value(), key) for layer in layers]
    # Gather weights outside the checkpointed function, so that the backward pass gathers only the stream again.
    kernels = [GatheredWeight(gather_weight(layer.kernel.get_value(), x.dtype)) for layer in layers]

    def read(x: jax.Array) -> list[jax.Array]:
        gathered = gather_sequence(x)
        return [layer.apply_to_gathered(gathered, kernel, key) for layer, kernel in zip(layers, kernels, strict=True)]

    regather = layers[0].regather and axis_size(SEQUENCE_AXIS) > 1
    return (jax.checkpoint(read) if regather else read)(x)


def regather_residual(module: nnx.Module) -> None:
    """Set `Linear.regather` in all projections of a module."""
    for _, layer in nnx.iter_modules(module):
        if isinstance(layer, Linear):
            layer.regather = True
