"""Layouts of a layer: contracted and produced dims, and axes of the arrays."""

from dataclasses import dataclass, replace
from math import prod
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from axonn_jax.grid import BATCH_AXES
from axonn_jax.ops.layers import TensorAxis

PLAN = "axonn_plan"
"""Name of a layer's (static) attribute with the plan."""


@dataclass(frozen=True)
class ActivationSplit:
    """Known layout of an activation: the split dim and the axis."""

    axis: TensorAxis
    size: int
    """Global size of the split dim."""
    last: bool
    """True if the split dim was the last one of the layer's output."""


@dataclass(frozen=True)
class Dims:
    """Sharded dims of a layer's arrays, as Python indexes."""

    x: int = -1
    """Contracted dim of the input, split over `in_axis`."""
    y: int = -1
    """Dim of the output split over `out_axis`."""
    bias: tuple[int, ...] = (-1,)
    """The output's dims of the bias, in the bias's order."""
    rows: tuple[int, int] | None = (0, 0)
    """The batch dim of input and of output; None where there is none to split."""
    rank: int = 0
    """Dims of the output less dims of the input."""


@dataclass(frozen=True)
class LayerPlan:
    """Layout of one layer on the mesh.

    `sharded` is False for an unchanged layer with replicated parameters. A sharded layer with split rows alone (no
    axes, no specs) has replicated parameters too.
    """

    kind: str
    mesh: Mesh
    sharded: bool
    in_axis: TensorAxis | None = None
    out_axis: TensorAxis | None = None
    specs: tuple[tuple[str, P], ...] = ()
    """The layout of every parameter, by name in the layer."""
    dims: Dims = Dims()
    z_dim: int | None = None
    """The kernel's dim split once more over `z`."""
    note: str = ""
    """Reason against splitting the layer, or a part."""
    sizes: tuple[int, int] = (1, 1)
    """Elements of input and output of all known calls together, or of one row."""
    rows: int | None = None
    """Rows of the last known call, 1 for ids of one dim; None if no call is known."""
    row_axes: tuple[str, ...] = BATCH_AXES
    """Axes that split rows: fewer where a program maps over the others by itself."""

    @property
    def rows_known(self) -> bool:
        """True if a call of the layer is known."""
        return self.rows is not None

    @property
    def rows_split(self) -> bool:
        """True if the rows of the last known call divide over `row_axes`."""
        return self.rows is None or self.rows % self.size(*self.row_axes) == 0

    @property
    def replica_axes(self) -> tuple[str, ...]:
        """The axes that split rows and no weight."""
        return tuple(axis for axis in self.row_axes if axis != "z")

    def spec(self, name: str) -> P:
        """The layout of one of the layer's parameters."""
        return dict(self.specs).get(name, P())

    def size(self, *axes: str | None) -> int:
        """Product of the sizes of the mesh axes named; None counts one."""
        count = 1
        for axis in axes:
            count *= 1 if axis is None else self.mesh.shape[axis]
        return count

    def called_with(self, in_size: int, out_size: int, rows: int) -> "LayerPlan":
        """The plan with one more call on record."""
        before = self.sizes if self.rows_known else (0, 0)
        sizes = (before[0] + in_size, before[1] + out_size)
        return replace(self, sizes=sizes, rows=rows)


def spec_of(ndim: int, *axes: tuple[int, str | tuple[str, ...] | None]) -> P:
    """A layout of `ndim` dims with the given (dim, axis) pairs split."""
    dims: list[str | tuple[str, ...] | None] = [None] * ndim
    for dim, axis in axes:
        if axis is not None:
            dims[dim] = axis
    return P(*dims)


def without_z(spec: P) -> P:
    """The layout with nothing split over `z`."""
    kept = [tuple(a for a in ((dim,) if isinstance(dim, str) else dim or ()) if a != "z") for dim in spec]
    return P(*(axes or None for axes in kept))


@dataclass(frozen=True)
class Side:
    """Splittable dim of the kernel, and the activation's dim split with it."""

    kernel: int
    activation: int
    size: int


@dataclass(frozen=True)
class Kernel:
    """A layer with one weight: candidates for the input's and the output's split dim, the best first."""

    name: str
    shape: tuple[int, ...]
    ins: tuple[Side, ...]
    outs: tuple[Side, ...]
    features: tuple[int, int]
    """Elements a row of the input and of the output has."""
    bias: tuple[int, ...] | None = None
    """The output's dims of the bias's dims."""
    rows: tuple[int, int] | None = (0, 0)
    rank: int = 0
    """Dims of the output less dims of the input."""
    groups: int = 1
    """Independent groups of features, in order: a shard of whole groups needs no other shard."""

    def dims(self, side_in: Side | None, side_out: Side | None) -> Dims:
        """The dims of activations for the sides chosen."""
        x = (side_in or self.ins[0]).activation
        y = (side_out or self.outs[0]).activation
        return Dims(x, y, self.bias or (), self.rows, self.rank)


@dataclass(frozen=True)
class Norm:
    """Norm over the last dim; each parameter has the length of the features."""

    features: int
    names: tuple[str, ...]


def describe(layer: Any) -> Kernel | Norm | str:
    """Return the splittable kernel or norm of a layer, or one line with the reason for none."""
    kind = type(layer)
    if kind is nnx.Linear:
        if layer.kernel.shape != (layer.in_features, layer.out_features):
            return _stacked(layer.kernel.shape)
        ins, outs = Side(0, -1, layer.in_features), Side(1, -1, layer.out_features)
        return Kernel("kernel", layer.kernel.shape, (ins,), (outs,), layer.kernel.shape, (-1,))
    if kind is nnx.LinearGeneral:
        return _linear_general(layer)
    if kind is nnx.Einsum:
        return _einsum(layer)
    if kind in (nnx.Conv, nnx.ConvTranspose):
        return _conv(layer)
    if kind is nnx.Embed:
        return _embed(layer)
    if kind in (nnx.LayerNorm, nnx.RMSNorm):
        return _norm(layer)
    if kind in (nnx.BatchNorm, nnx.GroupNorm, nnx.InstanceNorm):
        return f"{kind.__name__} runs as it is on split activations (its statistics are those of the global batch)"
    return f"a {kind.__name__} has no sharded form: the parameters it holds itself are replicated"


def _stacked(shape: tuple[int, ...]) -> str:
    return f"its parameters are stacked by nnx.vmap or nnx.scan (kernel {shape})"


def _not_heads_size(sides: list[Side]) -> tuple[Side, ...]:
    """All but the last of several dims, as (heads, head_dim), best first: attention sums over the last."""
    return tuple(sides[-2::-1] if len(sides) > 1 else sides)


def _linear_general(layer: Any) -> Kernel | str:
    if layer.batch_axis:
        return "batch_axis gives every batch entry a kernel of its own"
    n_in, n_out = len(layer.in_features), len(layer.out_features)
    shape = (*layer.in_features, *layer.out_features)
    if layer.kernel.shape != shape:
        return _stacked(layer.kernel.shape)
    if any(axis >= 0 for axis in layer.axis) or sorted(layer.axis) != list(range(-n_in, 0)):
        return f"axis={layer.axis} is not the input's last dims, counted from the end"
    ins = [Side(i, axis, layer.in_features[i]) for i, axis in enumerate(layer.axis)]
    outs = [Side(n_in + i, i - n_out, layer.out_features[i]) for i in range(n_out)]
    bias = tuple(range(-n_out, 0))
    features = (prod(layer.in_features), prod(layer.out_features))
    return Kernel("kernel", shape, _not_heads_size(ins), _not_heads_size(outs), features, bias, rank=n_out - n_in)


def _einsum(layer: Any) -> Kernel | str:
    if layer.einsum_str is None:
        return "its einsum string is given at the call only"
    operands, result = layer.einsum_str.split("->")
    x, kernel = operands.split(",")
    if "..." in kernel or len(kernel) != len(layer.kernel_shape):
        return f"the kernel's dims in {layer.einsum_str!r} are not all named"
    if layer.kernel.shape != tuple(layer.kernel_shape):
        return _stacked(layer.kernel.shape)
    if any(label in x and label in result for label in kernel):
        return f"{layer.einsum_str!r} has an index in input, kernel and result"
    size = dict(zip(kernel, layer.kernel_shape, strict=True))
    ins = [Side(i, _position(x, label), size[label]) for i, label in enumerate(kernel) if label in x]
    outs = [Side(i, _position(result, label), size[label]) for i, label in enumerate(kernel) if label in result]
    if not ins or not outs:
        return f"{layer.einsum_str!r} does not contract the input with the kernel"
    biased = [label for label in result if label in kernel]
    if layer.bias is not None and tuple(layer.bias.shape) != tuple(size[label] for label in biased):
        return f"its bias {layer.bias.shape} does not have the result's kernel dims"
    bias = tuple(_position(result, label) for label in biased)
    rows: tuple[int, int] | None = None
    if x[0] == "." == result[0]:
        rows = (0, 0)
    elif x[0] != "." and x[0] not in kernel and x[0] in result and _position(result, x[0]) >= 0:
        rows = (0, _position(result, x[0]))
    rank = len(result.replace(".", "")) - len(x.replace(".", ""))
    shape = tuple(layer.kernel_shape)
    features = (prod(side.size for side in ins), prod(side.size for side in outs))
    return Kernel("kernel", shape, _not_heads_size(ins), _not_heads_size(outs), features, bias, rows, rank)


def _position(labels: str, label: str) -> int:
    """Return an index's dim: from the front if before an ellipsis or without one, else from the end."""
    before, dots, after = labels.partition("...")
    return before.index(label) if not dots or label in before else after.index(label) - len(after)


def _conv(layer: Any) -> Kernel | str:
    if layer.mask is not None:
        return "a masked convolution"
    shape = layer.kernel.shape
    if shape != layer.kernel_shape:
        return _stacked(shape)
    at_in, at_out = len(shape) - 2, len(shape) - 1
    if getattr(layer, "transpose_kernel", False):
        at_in, at_out = at_out, at_in
    ins, outs = Side(at_in, -1, layer.in_features), Side(at_out, -1, layer.out_features)
    groups = getattr(layer, "feature_group_count", 1)
    return Kernel("kernel", shape, (ins,), (outs,), (layer.in_features, layer.out_features), (-1,), groups=groups)


def _embed(layer: Any) -> Kernel | str:
    shape = layer.embedding.shape
    if shape != (layer.num_embeddings, layer.features):
        return _stacked(shape)
    if layer.num_embeddings == 1 or not jnp.issubdtype(layer.embedding.dtype, jnp.floating):
        return "a table of one row, or not of floating-point numbers"
    return Kernel("embedding", shape, (Side(0, -1, shape[0]),), (Side(1, -1, shape[1]),), (1, shape[1]), rank=1)


def _norm(layer: Any) -> Norm | str:
    names = ("scale", "bias") if isinstance(layer, nnx.LayerNorm) else ("scale",)
    held = tuple(name for name in names if getattr(layer, name) is not None)
    if any(getattr(layer, name).shape != (layer.num_features,) for name in held):
        return _stacked(getattr(layer, held[0]).shape)
    if layer.reduction_axes not in (-1, (-1,)) or layer.feature_axes not in (-1, (-1,)):
        return "its reduction or feature axes are not the last one alone"
    if layer.axis_name is not None:
        return f"it reduces over a mapped axis of its own, {layer.axis_name!r}"
    return Norm(layer.num_features, held)
