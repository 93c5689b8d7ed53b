"""Utilities for layouts: queries on `PartitionSpec`, manual regions over live axes, replicated arrays of a batch."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import prod
from typing import TypeVar, TypeVarTuple

import jax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jax.tree_util import register_dataclass

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


def spec_axes(spec: P) -> frozenset[str]:
    """Return the mesh axes that a layout splits over."""
    return frozenset(a for dim in spec if dim is not None for a in ((dim,) if isinstance(dim, str) else dim))


def split_dim(spec: P, axis: str) -> int | None:
    """Return the dim that a layout splits over an axis; None if it does not use the axis."""
    return next((at for at, dim in enumerate(spec) if axis in spec_axes(P(dim))), None)


def further_split(spec: P, further: P) -> tuple[int, tuple[str, ...]] | None:
    """Return the dim that `further` splits over more axes than `spec`, and those axes; None if there is no such dim."""
    more = spec_axes(further) - spec_axes(spec)
    if not more:
        return None
    dim = next(at for at, names in enumerate(further) if more & spec_axes(P(names)))
    names = further[dim]
    return dim, tuple(axis for axis in ((names,) if isinstance(names, str) else names) if axis in more)


def size_over(mesh: Mesh, axes: Iterable[str]) -> int:
    """Return the product of some mesh axes' sizes."""
    return prod(mesh.shape[axis] for axis in axes)


def live_axes(mesh: Mesh) -> tuple[str, ...]:
    """Return the mesh axes that are larger than one, slowest first."""
    return tuple(axis for axis in mesh.axis_names if mesh.shape[axis] > 1)


def shard_mapped(
    f: Callable[[*Ts], T],
    mesh: Mesh,
    in_specs: object,
    out_specs: object,
    *,
    keep_mesh: bool = False,
    differentiated: bool = True,
) -> Callable[[*Ts], T]:
    """Return a function of global arrays that runs `f` on their local shards, or `f` itself if no axis is above one.

    The manual region covers the mesh axes that are larger than one, which keeps collectives over single devices out of
    the program.

    Args:
        f: Function of local shards.
        mesh: The grid's mesh.
        in_specs: Layouts of the arguments.
        out_specs: Layouts of the results.
        keep_mesh: True for one of several regions in a program. Arrays between regions carry the mesh in their type,
            and jax rejects any but the mesh that `jax.set_mesh` set, so such a region uses the full mesh.
        differentiated: False if no gradient is taken. The region may then declare a result replicated where jax cannot
            see why, since jax does not track the axes that values vary over, as correct gradients require.
    """
    axes = live_axes(mesh)
    if not axes:
        return f
    # Shrink the mesh itself: a region that is manual over only some axes of a mesh crashes XLA's CPU compiler on
    # bfloat16 sums (jaxlib 0.10.2).
    auto = (jax.sharding.AxisType.Auto,) * len(axes)
    live = mesh if keep_mesh else Mesh(mesh.devices.squeeze(), axes, axis_types=auto)
    specs = jax.tree.map(lambda spec: _over(spec, axes), (in_specs, out_specs), is_leaf=_is_spec)
    region = jax.shard_map(f, mesh=live, in_specs=specs[0], out_specs=specs[1], check_vma=differentiated)

    def run(*args: *Ts) -> T:
        with jax.sharding.use_abstract_mesh(live.abstract_mesh):  # `jax.set_mesh` may have set the 4D one
            return region(*args)

    return run


def _is_spec(leaf: object) -> bool:
    return isinstance(leaf, P)


def _over(spec: P, axes: tuple[str, ...]) -> P:
    """Return a layout restricted to `axes`."""
    dims = [() if dim is None else (dim,) if isinstance(dim, str) else dim for dim in spec]
    return P(*(tuple(axis for axis in dim if axis in axes) or None for dim in dims))


@register_dataclass
@dataclass(frozen=True)
class Replicated:
    """Marker for arrays of a batch that have no rows, which every device receives in full."""

    value: object


def replicated(array: object) -> Replicated:
    """Mark an array in a `Trainer`'s batch as having no rows, such as a graph's edges or a number.

    Args:
        array: The array, or a tree of arrays, identical in every process; the loss receives it unchanged.
    """
    return Replicated(array)


def is_replicated(leaf: object) -> bool:
    """True if a node of a batch's tree is marked by `replicated`."""
    return isinstance(leaf, Replicated)


def values_of(batch: object) -> object:
    """Return a batch without the marks of `replicated`, as a loss receives it."""
    return jax.tree.map(lambda leaf: leaf.value if is_replicated(leaf) else leaf, batch, is_leaf=is_replicated)
