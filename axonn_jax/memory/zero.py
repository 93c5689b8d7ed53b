"""ZeRO-1: gradients, master weights and optimizer state split over `data` as well (Rajbhandari et al., SC 20)."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from axonn_jax import compat
from axonn_jax.memory.buckets import Leaf, plan_buckets
from axonn_jax.tensor.clip import spec_axes
from axonn_jax.tensor.collectives import axis_size
from axonn_jax.tensor.params import Specs
from axonn_jax.tensor.region import manual


def split_over_data(shapes: Mapping[str, tuple[int, ...]], specs: Specs, mesh: Mesh) -> Specs:
    """The layouts with every parameter's first dim split over `data` too, after the axes that split it already.

    A parameter whose local first dim is not divisible, or that has no dims, keeps its layout: all replicas hold it.
    """
    replicas = mesh.shape["data"]

    def layout(name: str) -> P:
        spec, shape = specs[name], shapes[name]
        if replicas == 1 or not shape:
            return spec
        first = spec[0] if len(spec) else None
        axes = () if first is None else (first,) if isinstance(first, str) else tuple(first)
        shards = replicas
        for axis in axes:
            shards *= mesh.shape[axis]
        return P((*axes, "data"), *spec[1:]) if shape[0] % shards == 0 else spec

    return {name: layout(name) for name in shapes}


def scatter_in_buckets(grads: dict[str, jax.Array], capacity: int) -> dict[str, jax.Array]:
    """Sums gradients over `data`, of which each device keeps its part of the first dim; inside a manual region.

    Collectives: a reduce-scatter a bucket; bytes a device on a ring `(G-1)/G * itemsize * elements` in all.
    """
    size = axis_size("data")
    if size == 1:
        return dict(grads)
    out: dict[str, jax.Array] = {}
    leaves = [Leaf(name, g.size, (g.dtype, compat.varying_axes(g))) for name, g in grads.items()]
    for bucket in plan_buckets(leaves, capacity):
        flat = jnp.concatenate([grads[name].reshape(size, -1) for name in bucket], axis=1)
        part = lax.psum_scatter(flat, "data", scatter_dimension=0)
        start = 0
        for name in bucket:
            shape = grads[name].shape
            n = grads[name].size // size
            out[name] = part[start : start + n].reshape(shape[0] // size, *shape[1:])
            start += n
    return {name: out[name] for name in grads}


def gather_in_buckets(parts: dict[str, jax.Array], capacity: int) -> dict[str, jax.Array]:
    """Gathers parameters of which each device along `data` holds a part of the first dim; inside a manual region.

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
            shape, n = parts[name].shape, parts[name].size
            out[name] = whole[:, start : start + n].reshape(shape[0] * size, *shape[1:])
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
        there = {name: p for name, p in cast.items() if "data" in spec_axes(split[name])}
        return cast | gather_in_buckets(there, capacity)

    return manual(local, mesh, (split,), specs, differentiated=False)(parts)  # type: ignore[no-any-return]
