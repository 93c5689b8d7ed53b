"""ZeRO-1: gradients, master weights and optimizer state split over `data` as well (Rajbhandari et al., SC 20)."""

from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from axonn_jax import compat
from axonn_jax.memory.buckets import Leaf, Turns, in_backward_order, plan_buckets
from axonn_jax.tensor.clip import split_dim
from axonn_jax.tensor.collectives import axis_size
from axonn_jax.tensor.params import Specs
from axonn_jax.tensor.region import manual


def split_over_data(shapes: Mapping[str, tuple[int, ...]], specs: Specs, mesh: Mesh) -> Specs:
    """The layouts with the first dim of every parameter that divides split over `data` too, after its other axes.

    A parameter of which no dim of the local shard is divisible keeps its layout: all replicas hold it.
    """
    replicas = mesh.shape["data"]

    def layout(name: str) -> P:
        spec = (*specs[name], *[None] * (len(shapes[name]) - len(specs[name])))
        local = NamedSharding(mesh, specs[name]).shard_shape(shapes[name])
        for dim, axes in enumerate(spec):
            if replicas > 1 and local[dim] % replicas == 0:
                return P(*spec[:dim], (*_axes(axes), "data"), *spec[dim + 1 :])
        return specs[name]

    return {name: layout(name) for name in shapes}


def in_parts(whole: jax.Array, dim: int, parts: int) -> jax.Array:
    """A local array as [parts, elements]: its equal parts along `dim`, each read row by row."""
    rows = whole.reshape(*whole.shape[:dim], parts, -1, *whole.shape[dim + 1 :])
    return jnp.moveaxis(rows, dim, 0).reshape(parts, -1)


def from_parts(parts: jax.Array, dim: int, shape: Sequence[int]) -> jax.Array:
    """The way back from `in_parts` to a local array of this shape."""
    count = parts.shape[0]
    rows = parts.reshape(count, *shape[:dim], shape[dim] // count, *shape[dim + 1 :])
    return jnp.moveaxis(rows, 0, dim).reshape(shape)


def _axes(axes: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return () if axes is None else (axes,) if isinstance(axes, str) else tuple(axes)


def scatter_in_buckets(
    grads: dict[str, jax.Array], dims: Mapping[str, int], capacity: int, *, in_turn: bool = True
) -> dict[str, jax.Array]:
    """Sums gradients over `data`, of which each device keeps its part along `dims`; inside a manual region.

    Collectives: a reduce-scatter a bucket, and one of every gradient of more than `capacity` elements, which is not
    copied; bytes a device on a ring `(G-1)/G * itemsize * elements` in all. `in_turn` as for `reduce_gradients`.
    """
    size = axis_size("data")
    if size == 1:
        return dict(grads)
    large = {name: g for name, g in grads.items() if g.size > capacity}
    out = {name: lax.psum_scatter(g, "data", scatter_dimension=dims[name], tiled=True) for name, g in large.items()}
    leaves = [
        Leaf(name, g.size, (g.dtype, compat.varying_axes(g)))
        for name, g in in_backward_order(grads).items()
        if name not in large
    ]
    turns = Turns()
    for bucket in plan_buckets(leaves, capacity):
        first, *others = (in_parts(grads[name], dims[name], size) for name in bucket)
        flat = jnp.concatenate([turns.wait(first) if in_turn else first, *others], axis=1)
        part = lax.psum_scatter(flat, "data", scatter_dimension=0)
        turns.done(part)
        start = 0
        for name in bucket:
            shape, dim, n = grads[name].shape, dims[name], grads[name].size // size
            out[name] = part[start : start + n].reshape(*shape[:dim], shape[dim] // size, *shape[dim + 1 :])
            start += n
    return {name: out[name] for name in grads}


def gather_in_buckets(parts: dict[str, jax.Array], dims: Mapping[str, int], capacity: int) -> dict[str, jax.Array]:
    """Gathers parameters of which each device along `data` holds a part along `dims`; inside a manual region.

    Collectives: an all-gather a bucket of `capacity` gathered elements; bytes a device on a ring
    `(G-1)/G * itemsize * elements` in all.
    """
    size = axis_size("data")
    if size == 1:
        return dict(parts)
    out: dict[str, jax.Array] = {}
    leaves = [Leaf(name, p.size * size, (p.dtype,)) for name, p in parts.items()]
    for bucket in plan_buckets(leaves, capacity):
        flat = jnp.concatenate([parts[name].reshape(-1) for name in bucket])
        whole = lax.all_gather(flat, "data")
        start = 0
        for name in bucket:
            shape, dim, n = parts[name].shape, dims[name], parts[name].size
            full = (*shape[:dim], shape[dim] * size, *shape[dim + 1 :])
            out[name] = from_parts(whole[:, start : start + n], dim, full)
            start += n
    return {name: out[name] for name in parts}


def whole_weights(
    parts: dict[str, jax.Array], layouts: tuple[Specs, Specs], mesh: Mesh, dtype: jnp.dtype, capacity: int
) -> dict[str, jax.Array]:
    """Global arrays in the first of two layouts, as `split_over_data` gives it -> in the second, cast to `dtype`.

    Collectives: `gather_in_buckets`, of what is split.
    """
    split, specs = layouts

    def local(parts: dict[str, jax.Array]) -> dict[str, jax.Array]:
        cast = {name: p.astype(dtype) for name, p in parts.items()}
        dims = {name: dim for name in cast if (dim := split_dim(split[name], "data")) is not None}
        return cast | gather_in_buckets({name: cast[name] for name in dims}, dims, capacity)

    return manual(local, mesh, (split,), specs, differentiated=False)(parts)  # type: ignore[no-any-return]
