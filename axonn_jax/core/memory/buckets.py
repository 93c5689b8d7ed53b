"""Gradient buckets, which pack many small collectives into a few large ones."""

from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from axonn_jax.core import compat
from axonn_jax.core.backend.workarounds import depend_on
from axonn_jax.core.grid import BATCH_AXES
from axonn_jax.core.tensor.collectives import all_reduce, assume_replicated, live, mark_varying
from axonn_jax.core.tensor.specs import spec_axes


class Leaf(NamedTuple):
    """Name, size and group of a gradient, which determine its bucket."""

    name: str
    size: int
    group: tuple[object, ...]


def plan_buckets(leaves: Sequence[Leaf], capacity: int) -> list[list[str]]:
    """Pack leaves of the same group, in order, into buckets of at most `capacity` elements; return their names.

    A leaf larger than `capacity` gets a bucket to itself; leaves are never split.
    """
    buckets: list[list[str]] = []
    open_buckets: dict[tuple[object, ...], tuple[list[str], int]] = {}
    for leaf in leaves:
        names, used = open_buckets.get(leaf.group, ([], 0))
        if names and used + leaf.size > capacity:
            names, used = [], 0
        if not names:
            buckets.append(names)
        names.append(leaf.name)
        open_buckets[leaf.group] = (names, used + leaf.size)
    return buckets


def fitting(sizes: Sequence[int], budget: int) -> set[int]:
    """Return the indices of the buckets that stay on the devices, the first that fit into `budget` bytes per device."""
    remaining, staying = budget, set[int]()
    for number, size in enumerate(sizes):
        if 0 < size <= remaining:
            staying.add(number)
            remaining -= size
    return staying


def in_buckets(
    leaves: Sequence[Leaf],
    capacity: int,
    pack: Callable[[str], jax.Array],
    send: Callable[[jax.Array, str], jax.Array],
    *,
    in_turn: bool,
) -> Iterator[tuple[str, jax.Array]]:
    """Send arrays in buckets; yield the name of each array and its part of the bucket's result.

    Args:
        leaves: The arrays, in the order in which to send them.
        capacity: Most elements in a bucket.
        pack: Returns an array, by name, as [..., elements].
        send: Runs the collective on a concatenated bucket; also gets the name of the bucket's first array.
        in_turn: Concatenate a bucket only once the bucket two before it has been sent, not as soon as its arrays exist.
    """
    results: list[jax.Array] = []
    for bucket in plan_buckets(leaves, capacity):
        first, *tail = map(pack, bucket)
        # Without this dependence XLA concatenates all buckets first, which is a second copy of all gradients.
        if in_turn and len(results) >= 2:
            first = depend_on(first, results[-2])
        packed = [first, *tail]
        results.append(send(jnp.concatenate(packed, axis=-1), bucket[0]))
        start = 0
        for name, array in zip(bucket, packed, strict=True):
            yield name, results[-1][..., start : start + array.shape[-1]]
            start += array.shape[-1]


def reduce_in_buckets(
    grads: dict[str, jax.Array],
    axes_of: Callable[[str], tuple[str, ...]],
    capacity: int,
    *,
    by_parts: bool = True,
    in_turn: bool = True,
) -> dict[str, jax.Array]:
    """Sum each gradient over the mesh axes `axes_of(name)`; call it inside a manual region.

    Gradients of at most `capacity` elements share an all-reduce per bucket. A larger one is reduced in place, by one
    all-reduce or, with `by_parts`, by one for each part of `capacity` elements. Temporaries are about two buckets.

    Collectives: all-reduces of `2 (G-1)/G * itemsize * elements` bytes per device on a ring for all gradients, where G
    is the product of the axes' sizes.

    Args:
        grads: Local gradients by name.
        axes_of: Axes to sum a gradient over, by name.
        capacity: Most elements in a bucket or part.
        by_parts: Reduce large gradients in parts.
        in_turn: See `in_buckets`.
    """
    reduced = {name: g for name, g in grads.items() if not live(axes_of(name))}
    # Never copy a large gradient into a bucket; a bucket of one array would only double its memory.
    large = {name: g for name, g in grads.items() if name not in reduced and g.size > capacity}
    for name, g in large.items():
        axes = live(axes_of(name))
        reduced[name] = _reduce_by_parts(g, axes, capacity) if by_parts else all_reduce(g, axes)
    leaves = [
        Leaf(name, g.size, (axes_of(name), g.dtype, compat.varying_axes(g)))
        for name, g in in_backward_order(grads).items()
        if name not in reduced
    ]

    def send(flat: jax.Array, name: str) -> jax.Array:
        return all_reduce(flat, axes_of(name))

    for name, part in in_buckets(leaves, capacity, lambda name: grads[name].reshape(-1), send, in_turn=in_turn):
        reduced[name] = part.reshape(grads[name].shape)
    return {name: reduced[name] for name in grads}


def in_backward_order(grads: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Return the gradients in the approximate order of a backward pass: last layer first, those of no layer last."""

    # A layer's parameters have its index in their dotted names.

    def layer(name: str) -> int:
        return next((int(word) for word in name.split(".") if word.isdecimal()), -1)

    return {name: grads[name] for name in sorted(grads, key=layer, reverse=True)}


def _reduce_by_parts(g: jax.Array, axes: tuple[str, ...], capacity: int) -> jax.Array:
    """Sum a gradient over `axes` in parts of at most `capacity` elements, each written back in place."""
    dim, rows = part_of(g.shape, capacity)
    lead, count = prod(g.shape[:dim]), -(-g.shape[dim] // rows)
    g = mark_varying(g, axes)

    def reduce_part(g: jax.Array, lead: jax.Array, start: jax.Array, rows: int) -> jax.Array:
        starts = [*_coordinates(lead, g.shape[:dim]), start, *[jnp.int32(0)] * (g.ndim - dim - 1)]
        part = lax.dynamic_slice(g, starts, (*[1] * dim, rows, *g.shape[dim + 1 :]))
        return lax.dynamic_update_slice(g, mark_varying(all_reduce(part, axes), axes), starts)

    # A loop over equal parts, so that the program does not grow with the gradient; the ragged last part comes after it.
    full = count - 1 if g.shape[dim] % rows else count
    g = lax.fori_loop(0, lead * full, lambda i, g: reduce_part(g, i // full, i % full * rows, rows), g)
    if full < count:
        last = full * rows
        g = lax.fori_loop(0, lead, lambda i, g: reduce_part(g, i, jnp.int32(last), g.shape[dim] - last), g)
    return assume_replicated(g, axes)


def part_of(shape: tuple[int, ...], capacity: int) -> tuple[int, int]:
    """Return (dim, rows along it) that cut an array into about equal parts of at most `capacity` elements.

    A part has a single index along each leading dim and spans every trailing dim.
    """
    for dim, size in enumerate(shape):
        below = prod(shape[dim + 1 :])
        if below <= capacity:
            return dim, -(-size // -(-size // min(size, capacity // below)))
    raise ValueError(f"an array of shape {shape} in parts of {capacity}")


def _coordinates(index: jax.Array, shape: tuple[int, ...]) -> list[jax.Array]:
    """Return the indices along every dim of the element with a flat index, like `np.unravel_index`."""
    indices: list[jax.Array] = []
    for size in reversed(shape):
        indices.insert(0, index % size)
        index = index // size
    return indices


def reduced_axes(spec: P, token_axes: Sequence[str] = BATCH_AXES) -> tuple[str, ...]:
    """Return the axes over which a parameter's gradient is summed once per step.

    These are the token axes that do not split the parameter: over the others each device has a gradient of its part.
    """
    return tuple(axis for axis in token_axes if axis not in spec_axes(spec))
