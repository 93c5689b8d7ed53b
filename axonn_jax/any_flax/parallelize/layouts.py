"""Layouts of a layer: the plan of its activations, and of its parameters in computation and in storage."""

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

from axonn_jax.any_flax.parallelize.kinds import Kernel, Norm, Side
from axonn_jax.core.errors import UserError
from axonn_jax.core.grid import BATCH_AXES
from axonn_jax.core.ops.layers import TensorAxis
from axonn_jax.core.tensor.specs import size_over, spec_axes, split_dim

PLAN = "axonn_plan"
"""Name of the (static) attribute that holds a layer's plan."""

REPLICATED = P()

_SMALL, _SLACK = 4096, 0.02
Name = TypeVar("Name", bound=Hashable)


@dataclass(frozen=True)
class ActivationSplit:
    """Layout of an activation that is split along one dim."""

    axis: TensorAxis
    size: int
    """Global size of the split dim."""
    last: bool
    """True if the split dim was the last one in the output of the layer that made the activation."""


class Call(NamedTuple):
    """One call of a layer, or of all entries of a stack."""

    in_size: int
    """Elements of the input."""
    out_size: int
    """Elements of the output."""
    rows: int | None
    """Rows, 1 for ids of one dim; None if the call is assumed, not traced."""
    input_grad: bool = True
    """True if the input has a gradient, that is, depends on a parameter."""
    attend: bool = False
    """True if input and output swap axes, as in logits from an embedding table."""


@dataclass(frozen=True)
class LayerPlan:
    """Plan of one layer's layout on the mesh.

    `sharded` is False for an unchanged layer with replicated parameters. A sharded layer that splits only rows (no
    axes, no specs) has replicated parameters as well.
    """

    kind: str
    mesh: Mesh
    sharded: bool
    in_axis: TensorAxis | None = None
    out_axis: TensorAxis | None = None
    specs: tuple[tuple[str, P], ...] = ()
    """Layout of every parameter in computation, by its name in the layer; without the dims of a stack."""
    of: Kernel | Norm | None = None
    """The layer's kernel or norm; None for any other module."""
    sides: tuple[Side, ...] = ()
    """Input side and output side of a kernel: its dims, and the activations' dims split along with them."""
    note: str = ""
    """Reason why the layer, or a part of it, is not split."""
    calls: tuple[Call, ...] | None = None
    """All calls of the layer in a training call; None if they are not known."""
    row_axes: tuple[str, ...] = BATCH_AXES
    """Axes that split rows; fewer if a program maps over the remaining ones itself."""
    spread: tuple[tuple[str, P], ...] = ()
    """Storage layouts of parameters that are split further in storage than in computation."""
    regathers: bool = True
    """True if the backward pass always gathers the kernel over `z` again, not only where it recomputes the layer."""

    def __repr__(self) -> str:
        # Printing a module prints this plan in every layer, so keep it short; `sharding_report` has the details.
        return ", ".join(f"{name} {spec}" for name, spec in self.specs) or "replicated"

    @property
    def stack(self) -> tuple[int, ...]:
        """Sizes of a stack's leading dims, which are never split."""
        return () if self.of is None else self.of.stack

    @property
    def z_dim(self) -> int | None:
        """Dim of the kernel that is split over `z`, possibly in addition to another axis; None if there is none."""
        return split_dim(self.specs[0][1], "z") if self.specs else None

    def splits(self, call: Call) -> bool:
        """True if `row_axes` divide the rows of a call."""
        return call.rows is None or call.rows % self.size(*self.row_axes) == 0

    @property
    def replica_axes(self) -> tuple[str, ...]:
        """Axes that split rows but no weight."""
        return tuple(axis for axis in self.row_axes if axis != "z")

    def spec(self, name: str) -> P:
        """Layout of one parameter in computation, without a stack's dims; replicated by default."""
        return dict(self.specs).get(name, P())

    def stored_spec(self, name: str) -> P:
        """Layout of one parameter in storage."""
        return dict(self.spread).get(name) or self.used(name)

    def used(self, name: str) -> P:
        """Layout of one parameter in computation, including a stack's dims."""
        return P(*(None for _ in self.stack), *self.spec(name))

    def size(self, *axes: str | None) -> int:
        """Product of the sizes of some mesh axes; None counts as one."""
        return size_over(self.mesh, [axis for axis in axes if axis is not None])


def spec_of(ndim: int, *axes: tuple[int, str | tuple[str, ...] | None]) -> P:
    """Return a layout of `ndim` dims that splits each (dim, axis) pair."""
    dims: list[str | tuple[str, ...] | None] = [None] * ndim
    for dim, axis in axes:
        if axis is not None:
            dims[dim] = axis
    return P(*dims)


def spread(shape: tuple[int, ...], mesh: Mesh, spec: P = REPLICATED, first: int = 0) -> P:
    """Return a layout that splits an array over as many of `z`, `y` and `x` as divide one of its dims.

    Args:
        shape: Shape of the array.
        mesh: The grid's mesh.
        spec: Layout to start from; axes that it uses stay where they are.
        first: First dim that may be split further.
    """
    dims = [() if dim is None else (dim,) if isinstance(dim, str) else dim for dim in spec]
    dims += [()] * (len(shape) - len(dims))
    parts = [size_over(mesh, axes) for axes in dims]
    free = [axis for axis in ("z", "y", "x") if mesh.shape[axis] > 1 and axis not in spec_axes(spec)]
    every = [axes for count in range(len(free), 0, -1) for axes in combinations(free, count)]
    # The largest product of axes first, then the dim with the largest local size: fewest bytes stay on each device.
    for axes in sorted(every, key=lambda axes: -size_over(mesh, axes)):
        for dim in sorted(range(first, len(shape)), key=lambda dim: -shape[dim] // parts[dim]):
            if shape[dim] % (parts[dim] * size_over(mesh, axes)) == 0:
                dims[dim] = (*dims[dim], *axes)
                return P(*(axes or None for axes in dims))
    return spec


def gather_param(value: jax.Array, mesh: Mesh, spec: P = REPLICATED) -> jax.Array:
    """Gather a spread parameter to `spec`; its gradient is reduced in that layout as well, and spread afterwards."""
    # Without the constraint, XLA chooses between gathering the parameter and moving activations, and keeps what it
    # has gathered.
    return lax.with_sharding_constraint(value, NamedSharding(mesh, spec))


def small_enough(sizes: Mapping[Name, int], total: int, parts: int) -> set[Name]:
    """Return the arrays small enough to stay replicated.

    These are the smallest arrays that together add at most 2 % to a device's share of all bytes, and all arrays under
    4 KiB. In a large model that comes down to its vectors.

    Args:
        sizes: Bytes by name.
        total: Bytes of all arrays, including those not in `sizes`.
        parts: Devices over which the arrays would be split.
    """
    small: set[Name] = set()
    # Replicating b bytes adds b * (parts - 1) / parts to a device's share of total / parts.
    budget = _SLACK * total / max(1, parts - 1)
    # Every array that is split costs collectives, which under 4 KiB are not worth the memory they save.
    for name, size in sorted(sizes.items(), key=lambda item: item[1]):
        budget -= size
        if budget >= 0 or size < _SMALL:
            small.add(name)
    return small


class Stored(NamedTuple):
    """Parameter whose storage layout is to be chosen."""

    shape: tuple[int, ...]
    bytes: int
    used: P
    """Layout in computation."""
    first: int = 0
    """First dim that may be split further."""
    free: bool = True
    """False if it must be stored in the layout in which it is used."""


def further_layouts(params: Mapping[Name, Stored], mesh: Mesh) -> dict[Name, P]:
    """Return storage layouts that differ from the computation's, for parameters that are not yet split over all axes.

    Small parameters are left out (`small_enough`).
    """
    every = size_over(mesh, ("z", "y", "x"))
    # `small_enough` counts replicated bytes: express a partially split parameter as the replicated bytes that would
    # add as much to a device's share.
    more = {
        name: param.bytes * (every // size_over(mesh, spec_axes(param.used)) - 1) // max(1, every - 1)
        for name, param in params.items()
    }
    small = small_enough(more, sum(param.bytes for param in params.values()), every)
    free = {name: param for name, param in params.items() if param.free and name not in small}
    specs = {name: spread(param.shape, mesh, param.used, param.first) for name, param in free.items()}
    return {name: spec for name, spec in specs.items() if spec != params[name].used}


def without_z(spec: P) -> P:
    """Return the layout with nothing split over `z`."""
    dims = [tuple(a for a in ((dim,) if isinstance(dim, str) else dim or ()) if a != "z") for dim in spec]
    return P(*(axes or None for axes in dims))


def stored_params(layer: Any, names: tuple[str, ...]) -> dict[str, jax.Array | None]:
    """Return a layer's parameters in their storage layouts, None for absent ones."""
    # Through vars(): attribute access would go through `OutsideRead` and gather the parameter.
    variables = {name: vars(layer).get(name) for name in names}
    return {name: None if param is None else param[...] for name, param in variables.items()}


class OutsideRead:
    """Descriptor of a sharded layer's parameter that gathers it over `z` for code outside the layer's region.

    XLA computes `x @ w` wrong on a mesh of `data`, `z`, `y` and `x` where rows are split over `data` and `z` and both
    dims of `w` are split, one of them over `z` too (jaxlib 0.10.2). On such a mesh the parameter is always gathered, on
    other meshes only inside a trace.
    """

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, layer: Any, owner: type | None = None) -> Any:
        """Return the variable, or a proxy that reads the gathered value and writes to the variable."""
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
        """Set the attribute itself, as without a descriptor."""
        vars(layer)[self.name] = value

    def __delete__(self, layer: Any) -> None:
        """Remove the attribute."""
        del vars(layer)[self.name]
