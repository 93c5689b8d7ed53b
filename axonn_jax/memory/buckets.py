"""Gradient buckets: many small reductions packed into few large ones."""

from collections.abc import Callable, Sequence
from math import prod
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from axonn_jax import compat
from axonn_jax.tensor.collectives import alike, live, reduce_sum, vary
from axonn_jax.tensor.order import after


class Leaf(NamedTuple):
    """What decides which bucket a gradient goes to."""

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
    on a ring: `2 (G-1)/G * itemsize * elements` of all gradients, G the product of the axes' sizes. A bucket is put
    together `in_turn`, when the one before the last has been reduced, or as soon as its gradients are there.
    """
    reduced = {name: g for name, g in grads.items() if not live(axes_of(name))}
    large = {name: g for name, g in grads.items() if name not in reduced and g.size > capacity}
    for name, g in large.items():
        axes = live(axes_of(name))
        reduced[name] = _reduce_by_parts(g, axes, capacity) if by_parts else reduce_sum(g, axes)
    leaves = [
        Leaf(name, g.size, (axes_of(name), g.dtype, compat.varying_axes(g)))
        for name, g in in_backward_order(grads).items()
        if name not in reduced
    ]
    turns = Turns()
    for bucket in plan_buckets(leaves, capacity):
        axes = axes_of(bucket[0])
        first, *others = (grads[name].reshape(-1) for name in bucket)
        flat = reduce_sum(jnp.concatenate([turns.wait(first) if in_turn else first, *others]), axes)
        turns.done(flat)
        start = 0
        for name in bucket:
            size = grads[name].size
            reduced[name] = flat[start : start + size].reshape(grads[name].shape)
            start += size
    return {name: reduced[name] for name in grads}


def in_backward_order(grads: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """The gradients about as a backward pass gives them: of the last layer first, what belongs to no layer last.

    A layer's parameters have its number in their names.
    """

    def layer(name: str) -> int:
        return next((int(word) for word in name.split(".") if word.isdecimal()), -1)

    return {name: grads[name] for name in sorted(grads, key=layer, reverse=True)}


class Turns:
    """Buckets one after the other: one is put together when the one before the last has been reduced.

    Left to itself XLA puts all of them together first, a second copy of all gradients.
    """

    def __init__(self) -> None:
        self._results: list[jax.Array] = []

    def wait(self, part: jax.Array) -> jax.Array:
        """A part of the next bucket, which is there when that bucket's turn has come."""
        return part if len(self._results) < 2 else after(part, self._results[-2])

    def done(self, result: jax.Array) -> None:
        """Tells what the bucket was reduced to."""
        self._results.append(result)


def in_place(mesh: Mesh) -> bool:
    """Whether XLA reduces a whole array in place there; its CPU backend does not, and would need a second one."""
    return str(mesh.devices.flat[0].platform) != "cpu"


def _reduce_by_parts(g: jax.Array, axes: tuple[str, ...], capacity: int) -> jax.Array:
    """Sums a gradient over `axes` in parts of at most `capacity` elements, each written where it was read."""
    dim, rows = part_of(g.shape, capacity)
    lead, count = prod(g.shape[:dim]), -(-g.shape[dim] // rows)
    g = vary(g, axes)

    def reduce_part(g: jax.Array, lead: jax.Array, start: jax.Array, rows: int) -> jax.Array:
        starts = [*_places(lead, g.shape[:dim]), start, *[jnp.int32(0)] * (g.ndim - dim - 1)]
        part = lax.dynamic_slice(g, starts, (*[1] * dim, rows, *g.shape[dim + 1 :]))
        return lax.dynamic_update_slice(g, vary(reduce_sum(part, axes), axes), starts)

    whole = count - 1 if g.shape[dim] % rows else count
    g = lax.fori_loop(0, lead * whole, lambda i, g: reduce_part(g, i // whole, i % whole * rows, rows), g)
    if whole < count:
        last = whole * rows
        g = lax.fori_loop(0, lead, lambda i, g: reduce_part(g, i, jnp.int32(last), g.shape[dim] - last), g)
    return alike(g, axes)


def part_of(shape: tuple[int, ...], capacity: int) -> tuple[int, int]:
    """How an array is cut into parts of at most `capacity` elements: (dim, rows along it).

    A part lies at one place of the dims before and has all of those behind. Parts are about equally large.
    """
    for dim, size in enumerate(shape):
        below = prod(shape[dim + 1 :])
        if below <= capacity:
            return dim, -(-size // -(-size // min(size, capacity // below)))
    raise ValueError(f"an array of shape {shape} in parts of {capacity}")


def _places(index: jax.Array, shape: tuple[int, ...]) -> list[jax.Array]:
    """The place along every dim of the element with this index."""
    places: list[jax.Array] = []
    for size in reversed(shape):
        places.insert(0, index % size)
        index = index // size
    return places
