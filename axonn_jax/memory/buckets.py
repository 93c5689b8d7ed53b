"""Gradient buckets: many small reductions packed into few large ones."""

from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from axonn_jax import compat
from axonn_jax.backend.repairs import after
from axonn_jax.grid import BATCH_AXES
from axonn_jax.tensor.collectives import all_reduce, assume_replicated, live, mark_varying
from axonn_jax.tensor.specs import spec_axes


class Leaf(NamedTuple):
    """Gradient's name, size and group, which decide its bucket."""

    name: str
    size: int
    group: tuple[object, ...]


def plan_buckets(leaves: Sequence[Leaf], capacity: int) -> list[list[str]]:
    """Packs leaves of the same group, in order, into buckets of at most `capacity` elements.

    A leaf larger than `capacity` gets a bucket of its own; leaves are never split.
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
    """Return the numbers of the buckets that stay on the devices, the first that fit; `sizes` are bytes a device."""
    left, staying = budget, set[int]()
    for number, size in enumerate(sizes):
        if 0 < size <= left:
            staying.add(number)
            left -= size
    return staying


def in_buckets(
    leaves: Sequence[Leaf],
    capacity: int,
    pack: Callable[[str], jax.Array],
    send: Callable[[jax.Array, str], jax.Array],
    *,
    in_turn: bool,
) -> Iterator[tuple[str, jax.Array]]:
    """Send arrays in buckets; yield each one's name and its part of the bucket's result.

    `pack` makes [..., elements] of an array by its name; `send` is given a bucket of them and the first one's name. A
    bucket is put together `in_turn`, when the one before the last has been sent, or as soon as its arrays are there.
    Left to itself XLA puts all of them together first, a second copy of all gradients.
    """
    results: list[jax.Array] = []
    for bucket in plan_buckets(leaves, capacity):
        first, *others = map(pack, bucket)
        if in_turn and len(results) >= 2:
            first = after(first, results[-2])
        packed = [first, *others]
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
    """Sums each gradient over the mesh axes `axes_of(name)`; inside a manual region.

    Gradients of at most `capacity` elements are reduced together, one all-reduce a bucket; a larger one where it is, by
    one all-reduce, or `by_parts` by one for each. So about two buckets are needed beside the gradients. Bytes a device
    on a ring: `2 (G-1)/G * itemsize * elements` of all gradients, G the product of the axes' sizes. `in_turn` as for
    `in_buckets`.
    """
    reduced = {name: g for name, g in grads.items() if not live(axes_of(name))}
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
    """Return the gradients in about the order of a backward pass: the last layer's first, those of no layer last.

    A layer's parameters have its number in their names.
    """

    def layer(name: str) -> int:
        return next((int(word) for word in name.split(".") if word.isdecimal()), -1)

    return {name: grads[name] for name in sorted(grads, key=layer, reverse=True)}


def _reduce_by_parts(g: jax.Array, axes: tuple[str, ...], capacity: int) -> jax.Array:
    """Sums a gradient over `axes` in parts of at most `capacity` elements, each written where it was read."""
    dim, rows = part_of(g.shape, capacity)
    lead, count = prod(g.shape[:dim]), -(-g.shape[dim] // rows)
    g = mark_varying(g, axes)

    def reduce_part(g: jax.Array, lead: jax.Array, start: jax.Array, rows: int) -> jax.Array:
        starts = [*_coordinates(lead, g.shape[:dim]), start, *[jnp.int32(0)] * (g.ndim - dim - 1)]
        part = lax.dynamic_slice(g, starts, (*[1] * dim, rows, *g.shape[dim + 1 :]))
        return lax.dynamic_update_slice(g, mark_varying(all_reduce(part, axes), axes), starts)

    full = count - 1 if g.shape[dim] % rows else count
    g = lax.fori_loop(0, lead * full, lambda i, g: reduce_part(g, i // full, i % full * rows, rows), g)
    if full < count:
        last = full * rows
        g = lax.fori_loop(0, lead, lambda i, g: reduce_part(g, i, jnp.int32(last), g.shape[dim] - last), g)
    return assume_replicated(g, axes)


def part_of(shape: tuple[int, ...], capacity: int) -> tuple[int, int]:
    """Return (dim, rows along it) for cutting an array into parts of at most `capacity` elements.

    A part lies at one place of the dims before and has all of those behind. Parts are about equally large.
    """
    for dim, size in enumerate(shape):
        below = prod(shape[dim + 1 :])
        if below <= capacity:
            return dim, -(-size // -(-size // min(size, capacity // below)))
    raise ValueError(f"an array of shape {shape} in parts of {capacity}")


def _coordinates(index: jax.Array, shape: tuple[int, ...]) -> list[jax.Array]:
    """The indices along every dim of the element with this flat index."""
    indices: list[jax.Array] = []
    for size in reversed(shape):
        indices.insert(0, index % size)
        index = index // size
    return indices


def reduced_axes(spec: P, token_axes: Sequence[str] = BATCH_AXES) -> tuple[str, ...]:
    """Return the axes over which a parameter's gradient is summed once a step: token axes that do not split the
    parameter."""
    return tuple(axis for axis in token_axes if axis not in spec_axes(spec))
