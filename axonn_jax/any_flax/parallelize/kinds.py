"""Layer types with a sharded form, and descriptions of the dims along which a layer can be split."""

import inspect
from dataclasses import dataclass, replace
from math import prod
from string import ascii_lowercase
from typing import Any, TypeVar

import jax.numpy as jnp
from flax import nnx

BASES: tuple[type[nnx.Module], ...] = (
    nnx.Linear, nnx.LinearGeneral, nnx.Einsum, nnx.Conv, nnx.ConvTranspose, nnx.Embed, nnx.LayerNorm, nnx.RMSNorm,
)  # fmt: skip
"""Flax's layers with a sharded form."""

CALLS = ("__call__", "attend")
"""Methods of layers that have a sharded form; a derived type may wrap them, as in `super().__call__(x) * 2`."""

# Unlike other dunder methods, these change how the base's code reads and writes its parameters.
_ACCESS = ("__getattribute__", "__setattr__")


def base_of(kind: type) -> type[nnx.Module] | None:
    """Return the Flax layer that a type is or derives from; None if it has no sharded form."""
    return next((cls for cls in kind.__mro__ if cls in BASES), None)


def changed(kind: type, base: type) -> str:
    """Return the first attribute of the base that a derived type overrides besides `CALLS` and `__init__`; "" if none.

    Overrides matter because the sharded layer runs the base's code with the layer's attributes.
    """
    for cls in _between(kind, base):
        for name in vars(cls):
            hidden = name.startswith(("__", "_pytree__", "_abc_")) and name not in _ACCESS
            if not hidden and name not in CALLS and hasattr(base, name):
                return name
    return ""


def overrides_call(kind: type) -> bool:
    """True if a type derived from a Flax layer overrides `__call__`."""
    return kind.__call__ is not base_of(kind).__call__  # type: ignore[union-attr, operator]


def wraps(kind: type) -> bool:
    """True if every `__call__` that a derived type defines mentions `super` in its code."""
    for cls in _between(kind, base_of(kind)):
        call = vars(cls).get("__call__")
        if call is not None and "super" not in getattr(inspect.unwrap(call), "__code__", wraps.__code__).co_names:
            return False
    return True


def _between(kind: type, base: type | None) -> tuple[type, ...]:
    return kind.__mro__ if base is None else kind.__mro__[: kind.__mro__.index(base)]


def in_place_of_base(kind: type[nnx.Module], stand_in: type[nnx.Module], prefix: str) -> type[nnx.Module]:
    """Return a type derived from `kind` in which `super()` resolves to `stand_in` instead of the Flax layer.

    For a Flax layer itself, that is `stand_in`.

    Args:
        kind: A Flax layer, or a type derived from one.
        stand_in: Type derived from that Flax layer.
        prefix: Prefix of the new type's name.
    """
    # Python's method resolution order puts `stand_in` between `kind` and the Flax layer that both derive from.
    return stand_in if kind in BASES else type(f"{prefix}{kind.__name__}", (kind, stand_in), {})


@dataclass(frozen=True)
class Side:
    """Splittable dim of a kernel, and the dim of the activation that is split along with it."""

    kernel: int
    activation: int
    size: int


@dataclass(frozen=True)
class Kernel:
    """Layer with a single weight, with candidates for the split dims of its input and output, best first."""

    name: str
    shape: tuple[int, ...]
    ins: tuple[Side, ...]
    outs: tuple[Side, ...]
    features: tuple[int, int]
    """Elements per row of the input and of the output."""
    bias: tuple[int, ...] | None = None
    """Dim of the output that each dim of the bias corresponds to; None for a type of layer that has no bias."""
    rows: tuple[int, int] | None = (0, 0)
    """Batch dim of the input and of the output; None if the layer has none."""
    rank: int = 0
    """Number of the output's dims minus the input's."""
    groups: int = 1
    """Independent groups of features, in order; a shard of complete groups needs no other shard."""
    stack: tuple[int, ...] = ()
    """Sizes of the leading dims added by `nnx.vmap`, for a layer that `nnx.scan` or `nnx.vmap` calls per entry."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the parameters that are always present."""
        return (self.name,)


@dataclass(frozen=True)
class Norm:
    """Norm over the last dim, whose parameters all have one element per feature."""

    size: int
    names: tuple[str, ...]
    stack: tuple[int, ...] = ()
    """Sizes of the leading dims that `nnx.vmap` added to every parameter."""

    @property
    def features(self) -> tuple[int, int]:
        """Elements per row of the input and of the output."""
        return self.size, self.size


Described = TypeVar("Described", Kernel, Norm)


def describe(layer: Any) -> Kernel | Norm | str:
    """Return a layer's splittable kernel or norm, or a one-line reason why it has none."""
    kind = type(layer)
    base = base_of(kind)
    if base is None:
        if kind in (nnx.BatchNorm, nnx.GroupNorm, nnx.InstanceNorm):
            return f"{kind.__name__} runs as it is on split activations (its statistics are those of the global batch)"
        return f"a {kind.__name__} has no sharded form"
    variables = {name: value for name, value in vars(layer).items() if isinstance(value, nnx.Variable)}
    if computed := [name for name, variable in variables.items() if _computes(variable)]:
        return f"reading its {computed[0]} computes something"
    if kind is base:
        return _described(layer, base)
    if name := changed(kind, base):
        return f"a {kind.__name__} has {name} of its own and not {base.__name__}'s"
    # A derived type may have its own constructor and lack attributes that the base's code reads.
    try:
        described = _described(layer, base)
    except AttributeError as error:
        return f"a {kind.__name__} is not made as a {base.__name__} is: {error}"
    names = () if isinstance(described, str) else described.names
    if strange := [name for name in names if not isinstance(vars(layer).get(name), nnx.Variable)]:
        return f"a {kind.__name__} does not hold {strange[0]} as a {base.__name__} does"
    return described


def _computes(variable: nnx.Variable[Any]) -> bool:
    overridden = type(variable).get_value is not nnx.Variable.get_value
    return overridden or bool(variable.get_metadata().get("on_get_value"))


def _described(layer: Any, base: type[nnx.Module]) -> Kernel | Norm | str:
    if base is nnx.Linear:
        return _contraction(layer, "...a,ab->...b", (layer.in_features, layer.out_features))
    if base is nnx.LinearGeneral:
        return _linear_general(layer)
    if base is nnx.Einsum:
        return _einsum(layer)
    if base in (nnx.Conv, nnx.ConvTranspose):
        return _conv(layer)
    return _embed(layer) if base is nnx.Embed else _norm(layer)


def _stack(layer: Any, described: Described) -> Described | str:
    """Return the description with the leading dims that `nnx.vmap` added to every parameter."""
    entry: tuple[int, ...] = (described.size,) if isinstance(described, Norm) else described.shape
    shapes = {name: tuple(getattr(layer, name).shape) for name in described.names}
    first = next(iter(shapes.values()), entry)
    lead: tuple[int, ...] = first[: len(first) - len(entry)]
    bias = getattr(layer, "bias", None) if isinstance(described, Kernel) and described.bias is not None else None
    for name, shape in shapes.items():
        if shape != (*lead, *entry) or (bias is not None and bias.shape[: len(lead)] != lead):
            return f"its {name} {shape} is not one of {entry}, nor a stack of them with the stack's dims in front"
    return replace(described, stack=lead)


def _not_heads_size(sides: list[Side]) -> tuple[Side, ...]:
    # Of several dims, as in (heads, head_dim), leave out the last one: attention sums over head_dim.
    return tuple(sides[-2::-1] if len(sides) > 1 else sides)


def _linear_general(layer: Any) -> Kernel | str:
    if layer.batch_axis:
        return "batch_axis gives every batch entry a kernel of its own"
    n_in, n_out = len(layer.in_features), len(layer.out_features)
    # Positive axes depend on the input's rank, which is not known before the call.
    if any(axis >= 0 for axis in layer.axis) or sorted(layer.axis) != list(range(-n_in, 0)):
        return f"axis={layer.axis} is not the input's last dims, counted from the end"
    ins, outs = ascii_lowercase[:n_in], ascii_lowercase[n_in : n_in + n_out]
    x = "".join(label for _, label in sorted(zip(layer.axis, ins, strict=True)))
    return _contraction(layer, f"...{x},{ins}{outs}->...{outs}", (*layer.in_features, *layer.out_features))


def _einsum(layer: Any) -> Kernel | str:
    if layer.einsum_str is None:
        return "its einsum string is given at the call only"
    return _contraction(layer, layer.einsum_str, tuple(layer.kernel_shape))


def _contraction(layer: Any, string: str, shape: tuple[int, ...]) -> Kernel | str:
    """Describe a layer that computes an einsum of its input and its kernel."""
    operands, result = string.split("->")
    x, kernel = operands.split(",")
    if "..." in kernel or len(kernel) != len(shape):
        return f"the kernel's dims in {string!r} are not all named"
    if any(label in x and label in result for label in kernel):
        return f"{string!r} has an index in input, kernel and result"
    size = dict(zip(kernel, shape, strict=True))
    ins = [Side(i, _position(x, label), size[label]) for i, label in enumerate(kernel) if label in x]
    outs = [Side(i, _position(result, label), size[label]) for i, label in enumerate(kernel) if label in result]
    if not ins or not outs:
        return f"{string!r} does not contract the input with the kernel"
    biased = [label for label in result if label in kernel]
    bias_shape = layer.bias_shape if isinstance(layer, nnx.Einsum) and layer.bias is not None else None
    if bias_shape is not None and tuple(bias_shape) != tuple(size[label] for label in biased):
        return f"its bias {bias_shape} does not have the result's kernel dims"
    rows: tuple[int, int] | None = None
    if x[0] == "." == result[0]:
        rows = (0, 0)
    elif x[0] != "." and x[0] not in kernel and x[0] in result and _position(result, x[0]) >= 0:
        rows = (0, _position(result, x[0]))
    bias = tuple(_position(result, label) for label in biased)
    rank = len(result.replace(".", "")) - len(x.replace(".", ""))
    features = (prod(side.size for side in ins), prod(side.size for side in outs))
    sides = _not_heads_size(ins), _not_heads_size(outs)
    return _stack(layer, Kernel("kernel", shape, *sides, features, bias, rows, rank))


def _position(labels: str, label: str) -> int:
    """Return the dim of an index, counted from the front unless it comes after an ellipsis."""
    head, dots, tail = labels.partition("...")
    return head.index(label) if not dots or label in head else tail.index(label) - len(tail)


def _conv(layer: Any) -> Kernel | str:
    if layer.mask is not None:
        return "a masked convolution"
    shape = tuple(layer.kernel_shape)
    at_in, at_out = len(shape) - 2, len(shape) - 1
    if getattr(layer, "transpose_kernel", False):
        at_in, at_out = at_out, at_in
    ins, outs = Side(at_in, -1, layer.in_features), Side(at_out, -1, layer.out_features)
    groups = getattr(layer, "feature_group_count", 1)
    features = (layer.in_features, layer.out_features)
    return _stack(layer, Kernel("kernel", shape, (ins,), (outs,), features, (-1,), groups=groups))


def _embed(layer: Any) -> Kernel | str:
    shape = (layer.num_embeddings, layer.features)
    if layer.num_embeddings == 1 or not jnp.issubdtype(layer.embedding.dtype, jnp.floating):
        return "a table of one row, or not of floating-point numbers"
    ins, outs = Side(0, -1, shape[0]), Side(1, -1, shape[1])
    return _stack(layer, Kernel("embedding", shape, (ins,), (outs,), (1, shape[1]), rank=1))


def _norm(layer: Any) -> Norm | str:
    names = ("scale", "bias") if isinstance(layer, nnx.LayerNorm) else ("scale",)
    present = tuple(name for name in names if getattr(layer, name) is not None)
    if layer.reduction_axes not in (-1, (-1,)) or layer.feature_axes not in (-1, (-1,)):
        return "its reduction or feature axes are not the last one alone"
    if layer.axis_name is not None:
        return f"it reduces over a mapped axis of its own, {layer.axis_name!r}"
    return _stack(layer, Norm(layer.num_features, present))
