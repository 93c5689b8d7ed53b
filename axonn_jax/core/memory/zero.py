"""Gradient reduction and ZeRO-1 (Rajbhandari et al., SC 20): gradients and optimizer state split over replicas."""

from collections.abc import Callable, Collection, Mapping, Sequence
from math import prod

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from axonn_jax.core import compat
from axonn_jax.core.backend.traits import reduces_in_place
from axonn_jax.core.backend.workarounds import reduce_scatter
from axonn_jax.core.grid import BATCH_AXES, REPLICA_AXES
from axonn_jax.core.memory.buckets import (
    Leaf,
    in_backward_order,
    in_buckets,
    reduce_in_buckets,
    reduced_axes,
)
from axonn_jax.core.tensor.collectives import axis_size
from axonn_jax.core.tensor.params import Params, Specs
from axonn_jax.core.tensor.specs import further_split, shard_mapped, size_over, spec_axes

Split = tuple[int, tuple[str, ...]]
"""A dim and the replica axes that split it."""


def split_over_replicas(
    shapes: Mapping[str, tuple[int, ...]], specs: Specs, mesh: Mesh, stacked: Collection[str] = ()
) -> Specs:
    """Return the layouts with the first divisible dim of every parameter also split over its replicas.

    Replica axes are `data` and `expert`; for experts only `data`. A parameter without a divisible dim keeps its
    layout, and the layer dim of a `stacked` parameter is never split.
    """

    # Checkpoints read a stacked parameter layer by layer, hence the unsplit layer dim.
    def layout(name: str) -> P:
        axes = tuple(axis for axis in REPLICA_AXES if axis not in spec_axes(specs[name]) and mesh.shape[axis] > 1)
        replicas = size_over(mesh, axes)
        spec = (*specs[name], *[None] * (len(shapes[name]) - len(specs[name])))
        local = NamedSharding(mesh, specs[name]).shard_shape(shapes[name])
        for dim, over in enumerate(spec):
            if replicas > 1 and local[dim] % replicas == 0 and not (dim == 0 and name in stacked):
                return P(*spec[:dim], (*_axes(over), *axes), *spec[dim + 1 :])
        return specs[name]

    return {name: layout(name) for name in shapes}


def reduce_gradients(
    sums: Params,
    specs: Specs,
    grad_specs: Specs,
    capacity: int,
    mesh: Mesh,
    sum_axes: Callable[[str], Sequence[str]] = lambda name: BATCH_AXES,
    *,
    in_turn: bool = True,
) -> Params:
    """Reduce each device's sums of gradients to the step's gradients, laid out by `grad_specs`.

    Call it inside a manual region. Collectives, in buckets of `capacity` elements: an all-reduce over those of
    `sum_axes` (`data`, `expert`, `z`, with sequence parallelism `y`; `SplitModule.sum_axes`) over which a parameter is
    replicated, replaced by a reduce-scatter over the axes that `grad_specs` split further.

    Args:
        sums: Local sums by name.
        specs: Layouts of the parameters.
        grad_specs: Layouts of the gradients.
        capacity: Most elements in a bucket.
        mesh: Mesh of the parameters.
        sum_axes: Axes over which a gradient is a partial sum, by name.
        in_turn: See `in_buckets`.
    """
    split = splits(specs, {name: grad_specs[name] for name in sums})

    def axes_of(name: str) -> tuple[str, ...]:
        done = split[name][1] if name in split else ()
        return tuple(axis for axis in reduced_axes(specs[name], sum_axes(name)) if axis not in done)

    # Scatter first: the all-reduces over the remaining axes then only carry each device's part.
    parts = scatter_in_buckets({name: sums[name] for name in split}, split, capacity, in_turn=in_turn)
    return reduce_in_buckets(
        {name: parts.get(name, g) for name, g in sums.items()},
        axes_of,
        capacity,
        by_parts=not reduces_in_place(mesh.devices.flat[0].platform),
        in_turn=in_turn,
    )


def in_parts(array: jax.Array, dim: int, parts: int) -> jax.Array:
    """Return a local array as [parts, elements]: its equal parts along `dim`, each flattened in row-major order."""
    rows = array.reshape(*array.shape[:dim], parts, -1, *array.shape[dim + 1 :])
    return jnp.moveaxis(rows, dim, 0).reshape(parts, -1)


def from_parts(parts: jax.Array, dim: int, shape: Sequence[int]) -> jax.Array:
    """Invert `in_parts` for a local array of this shape."""
    count = parts.shape[0]
    rows = parts.reshape(count, *shape[:dim], shape[dim] // count, *shape[dim + 1 :])
    return jnp.moveaxis(rows, 0, dim).reshape(shape)


def _size(axes: Sequence[str]) -> int:
    return prod(axis_size(axis) for axis in axes)


def _axes(axes: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return () if axes is None else (axes,) if isinstance(axes, str) else tuple(axes)


def splits(specs: Mapping[str, P], further: Mapping[str, P]) -> dict[str, Split]:
    """Return how `further` splits each parameter laid out by `specs`; parameters it does not split are omitted."""
    return {name: split for name, spec in further.items() if (split := further_split(specs[name], spec)) is not None}


def scatter_in_buckets(
    grads: dict[str, jax.Array], split: Mapping[str, Split], capacity: int, *, in_turn: bool = True
) -> dict[str, jax.Array]:
    """Sum gradients over the axes of their `split` and return each device's parts; call it inside a manual region.

    Collectives: a reduce-scatter per bucket, and one per gradient of more than `capacity` elements, which is not
    copied; `(G-1)/G * itemsize * elements` bytes per device on a ring in all. `in_turn` as for `in_buckets`.
    """
    out: dict[str, jax.Array] = {}
    for name, g in grads.items():
        if g.size > capacity:
            dim, axes = split[name]
            out[name] = reduce_scatter(g, axes, dim)
    leaves = [
        Leaf(name, g.size, (split[name][1], g.dtype, compat.varying_axes(g)))
        for name, g in in_backward_order(grads).items()
        if name not in out
    ]

    def pack(name: str) -> jax.Array:
        dim, axes = split[name]
        return in_parts(grads[name], dim, _size(axes))

    def send(flat: jax.Array, name: str) -> jax.Array:
        return reduce_scatter(flat, split[name][1], 0)[0]

    for name, part in in_buckets(leaves, capacity, pack, send, in_turn=in_turn):
        shape, (dim, axes) = grads[name].shape, split[name]
        out[name] = part.reshape(*shape[:dim], shape[dim] // _size(axes), *shape[dim + 1 :])
    return {name: out[name] for name in grads}


def gather_in_buckets(parts: dict[str, jax.Array], split: Mapping[str, Split], capacity: int) -> dict[str, jax.Array]:
    """Gather parameters whose parts lie along the axes of their `split`; call it inside a manual region.

    Collectives: an all-gather per bucket of `capacity` gathered elements; `(G-1)/G * itemsize * elements` bytes per
    device on a ring in all.
    """
    out: dict[str, jax.Array] = {}
    leaves = [Leaf(name, p.size * _size(split[name][1]), (split[name][1], p.dtype)) for name, p in parts.items()]

    def send(flat: jax.Array, name: str) -> jax.Array:
        return lax.all_gather(flat, split[name][1])

    for name, gathered in in_buckets(leaves, capacity, lambda name: parts[name].reshape(-1), send, in_turn=False):
        shape, (dim, axes) = parts[name].shape, split[name]
        out[name] = from_parts(gathered, dim, (*shape[:dim], shape[dim] * _size(axes), *shape[dim + 1 :]))
    return {name: out[name] for name in parts}


def gather_weights(
    parts: dict[str, jax.Array],
    layouts: tuple[Specs, Specs],
    mesh: Mesh,
    dtype_of: Callable[[str], jnp.dtype],
    capacity: int,
) -> dict[str, jax.Array]:
    """Cast global arrays by name and lay them out by the second of two `layouts`.

    The first is that of `parts`, from `split_over_replicas`. Collectives: `gather_in_buckets` of the split arrays.
    """
    further, specs = layouts
    split = splits(specs, further)

    def local(parts: dict[str, jax.Array]) -> dict[str, jax.Array]:
        # Cast before the gather, which with 16-bit weights then moves half the bytes.
        cast = {name: p.astype(dtype_of(name)) for name, p in parts.items()}
        return cast | gather_in_buckets({name: cast[name] for name in cast if name in split}, split, capacity)

    return shard_mapped(local, mesh, (further,), specs, differentiated=False)(parts)  # type: ignore[no-any-return]
