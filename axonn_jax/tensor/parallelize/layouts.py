"""Layouts of a layer: the plan of its arrays, of its parameters where it computes and where they are kept."""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from axonn_jax.errors import UserError
from axonn_jax.grid import BATCH_AXES
from axonn_jax.ops.layers import TensorAxis
from axonn_jax.tensor.parallelize.kinds import Kernel, Norm, Side
from axonn_jax.tensor.specs import size_over, spec_axes, split_dim

PLAN = "axonn_plan"
"""Name of a layer's (static) attribute with the plan."""

REPLICATED = P()

_SMALL, _SLACK = 4096, 0.02
Name = TypeVar("Name", bound=Hashable)


@dataclass(frozen=True)
class ActivationSplit:
    """Known layout of an activation: the split dim and the axis."""

    axis: TensorAxis
    size: int
    """Global size of the split dim."""
    last: bool
    """True if the split dim was the last one of the layer's output."""


class Call(NamedTuple):
    """One call of a layer, or of all entries of a stack."""

    in_size: int
    """Elements of the input."""
    out_size: int
    """Elements of the output."""
    rows: int | None
    """Rows, 1 for ids of one dim; None if the call is not known but supposed."""
    input_grad: bool = True
    """True if the input has a gradient: it depends on a parameter."""
    attend: bool = False
    """True if the axes of input and output are each other's, as in logits by a table."""


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
    """The layout of every parameter where the layer computes, by name in the layer, of one entry of a stack."""
    of: Kernel | Norm | None = None
    """The layer's kernel or norm; None for another module."""
    sides: tuple[Side, ...] = ()
    """The dims of a kernel for the input and the output, and of the activations split with them."""
    note: str = ""
    """Reason against splitting the layer, or a part."""
    calls: tuple[Call, ...] | None = None
    """All calls in a training call; None if they are not known."""
    row_axes: tuple[str, ...] = BATCH_AXES
    """Axes that split rows: fewer where a program maps over the others by itself."""
    spread: tuple[tuple[str, P], ...] = ()
    """The layout of parameters that are split further where they are kept than where the layer computes."""
    regathers: bool = True
    """True if the backward pass gathers the kernel over `z` again in any case, not just where it recomputes the layer.
    """

    def __repr__(self) -> str:
        # A module prints its attributes, this plan in every layer; all of it is what `sharding_report` is for.
        return ", ".join(f"{name} {spec}" for name, spec in self.specs) or "replicated"

    @property
    def stack(self) -> tuple[int, ...]:
        """Sizes of a stack's dims, in front of every parameter's own; whole on every device."""
        return () if self.of is None else self.of.stack

    @property
    def z_dim(self) -> int | None:
        """The kernel's dim split once more over `z`."""
        return split_dim(self.specs[0][1], "z") if self.specs else None

    def splits(self, call: Call) -> bool:
        """True if the rows of a call divide over `row_axes`."""
        return call.rows is None or call.rows % self.size(*self.row_axes) == 0

    @property
    def replica_axes(self) -> tuple[str, ...]:
        """The axes that split rows and no weight."""
        return tuple(axis for axis in self.row_axes if axis != "z")

    def spec(self, name: str) -> P:
        """The layout of one of the layer's parameters where the layer computes, whole by default."""
        return dict(self.specs).get(name, P())

    def stored_spec(self, name: str) -> P:
        """The layout in which one of the layer's parameters is kept."""
        return dict(self.spread).get(name) or self.used(name)

    def used(self, name: str) -> P:
        """The layout of one of the layer's parameters, of a stack all entries, where the layer computes."""
        return P(*(None for _ in self.stack), *self.spec(name))

    def size(self, *axes: str | None) -> int:
        """Product of the sizes of the mesh axes named; None counts one."""
        return size_over(self.mesh, [axis for axis in axes if axis is not None])


def spec_of(ndim: int, *axes: tuple[int, str | tuple[str, ...] | None]) -> P:
    """A layout of `ndim` dims with the given (dim, axis) pairs split."""
    dims: list[str | tuple[str, ...] | None] = [None] * ndim
    for dim, axis in axes:
        if axis is not None:
            dims[dim] = axis
    return P(*dims)


def spread(shape: tuple[int, ...], mesh: Mesh, spec: P = REPLICATED, first: int = 0) -> P:
    """Return a layout of an array with its largest part that divides split over all of `z`, `y` and `x`, or fewer.

    Axes that `spec` has stay where they are; dims before `first` stay whole.
    """
    dims = [() if dim is None else (dim,) if isinstance(dim, str) else dim for dim in spec]
    dims += [()] * (len(shape) - len(dims))
    parts = [size_over(mesh, axes) for axes in dims]
    free = [axis for axis in ("z", "y", "x") if mesh.shape[axis] > 1 and axis not in spec_axes(spec)]
    every = [axes for count in range(len(free), 0, -1) for axes in combinations(free, count)]
    for axes in sorted(every, key=lambda axes: -size_over(mesh, axes)):
        for dim in sorted(range(first, len(shape)), key=lambda dim: -shape[dim] // parts[dim]):
            if shape[dim] % (parts[dim] * size_over(mesh, axes)) == 0:
                dims[dim] = (*dims[dim], *axes)
                return P(*(axes or None for axes in dims))
    return spec


def gather_param(value: jax.Array, mesh: Mesh, spec: P = REPLICATED) -> jax.Array:
    """Gather a parameter that is spread; its gradient is summed so too, then spread again.

    Left alone, XLA chooses between gathering a parameter and moving activations, and keeps what it has gathered.
    """
    return lax.with_sharding_constraint(value, NamedSharding(mesh, spec))


def small_enough(sizes: Mapping[Name, int], total: int, parts: int) -> set[Name]:
    """Return the arrays that may stay whole: the smallest, as long as they add 2 % to a device's part of all bytes.

    In a large model these are its vectors. Of a small model's, arrays under 4 KiB stay whole too: each that is split
    has collectives of its own.
    """
    small: set[Name] = set()
    budget = _SLACK * total / max(1, parts - 1)
    for name, size in sorted(sizes.items(), key=lambda item: item[1]):
        budget -= size
        if budget >= 0 or size < _SMALL:
            small.add(name)
    return small


class Stored(NamedTuple):
    """Parameter to lay out."""

    shape: tuple[int, ...]
    bytes: int
    used: P
    """The layout where it computes."""
    first: int = 0
    """The first dim that may be split further."""
    free: bool = True
    """False to keep it as it is used."""


def further_layouts(params: Mapping[Name, Stored], mesh: Mesh) -> dict[Name, P]:
    """Return layouts to keep parameters in that are split over fewer axes where they compute, but for small ones."""
    every = size_over(mesh, ("z", "y", "x"))
    # Bytes that, were they whole, would add as much to a device's part as these add by being split over fewer axes.
    more = {
        name: param.bytes * (every // size_over(mesh, spec_axes(param.used)) - 1) // max(1, every - 1)
        for name, param in params.items()
    }
    small = small_enough(more, sum(param.bytes for param in params.values()), every)
    free = {name: param for name, param in params.items() if param.free and name not in small}
    specs = {name: spread(param.shape, mesh, param.used, param.first) for name, param in free.items()}
    return {name: spec for name, spec in specs.items() if spec != params[name].used}


def without_z(spec: P) -> P:
    """The layout with nothing split over `z`."""
    dims = [tuple(a for a in ((dim,) if isinstance(dim, str) else dim or ()) if a != "z") for dim in spec]
    return P(*(axes or None for axes in dims))


def stored_params(layer: Any, names: tuple[str, ...]) -> dict[str, jax.Array | None]:
    """Return a layer's parameters as they are kept, None for absent ones."""
    variables = {name: vars(layer).get(name) for name in names}
    return {name: None if param is None else param[...] for name, param in variables.items()}


class OutsideRead:
    """A split layer's parameter for code outside of the layer's region, where traced gathered over `z`.

    XLA computes `x @ w` wrong on a mesh of `data`, `z`, `y` and `x` where rows lie over `data` and `z` and both dims of
    `w` are split, one of them over `z` too (jaxlib 0.10.2). On such a mesh it is gathered where it is not traced too.
    """

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, layer: Any, owner: type | None = None) -> Any:
        """Return the variable itself, or one that reads as gathered and writes as the variable."""
        if layer is None:
            return self
        if self.name not in vars(layer):
            raise AttributeError(f"{type(layer).__name__!r} has no attribute {self.name!r}", name=self.name, obj=layer)
        variable = vars(layer)[self.name]
        plan: LayerPlan | None = vars(layer).get(PLAN)
        if plan is None or not isinstance(variable, nnx.Variable):
            return variable
        raw, spec = variable.get_raw_value(), plan.spec(self.name)
        wrong = min(plan.size("data", "expert"), plan.size("z"), plan.size("y"), plan.size("x")) > 1
        computes = wrong or isinstance(raw, jax.core.Tracer)
        if not computes or not isinstance(raw, jax.Array) or "z" not in spec_axes(plan.stored_spec(self.name)):
            return variable
        inside = without_z(P(*[None] * (raw.ndim - len(spec)), *spec))

        def gathered(_: Any, value: jax.Array) -> jax.Array:
            return lax.with_sharding_constraint(value, NamedSharding(plan.mesh, inside))

        def written(_: Any, value: Any) -> Any:
            if jnp.shape(value) != raw.shape:
                raise UserError(self.name, f"values {jnp.shape(value)}", f"all at once, {raw.shape}, in a split layer")
            variable.set_raw_value(value)
            return value

        return variable.replace(raw, on_get_value=(gathered,), on_set_value=(written,))

    def __set__(self, layer: Any, value: Any) -> None:
        """Put another value in the attribute's place."""
        vars(layer)[self.name] = value

    def __delete__(self, layer: Any) -> None:
        """Remove the attribute."""
        del vars(layer)[self.name]
