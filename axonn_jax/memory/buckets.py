"""Gradient buckets: many small reductions packed into few large ones."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from axonn_jax import compat
from axonn_jax.tensor.collectives import live, reduce_sum


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
    grads: dict[str, jax.Array], axes_of: Callable[[str], tuple[str, ...]], capacity: int
) -> dict[str, jax.Array]:
    """Sums each gradient over the mesh axes `axes_of(name)`, one all-reduce a bucket; inside a manual region.

    Bytes a device on a ring: `2 (G-1)/G * itemsize * elements` of all gradients, G the product of the axes' sizes.
    """
    if not live(axis for name in grads for axis in axes_of(name)):
        return dict(grads)
    leaves = [
        Leaf(name, g.size, (axes_of(name), g.dtype, compat.varying_axes(g)))
        for name, g in grads.items()
        if live(axes_of(name))
    ]
    reduced = {name: g for name, g in grads.items() if not live(axes_of(name))}
    for bucket in plan_buckets(leaves, capacity):
        axes = axes_of(bucket[0])
        if len(bucket) == 1:
            reduced[bucket[0]] = reduce_sum(grads[bucket[0]], axes)
            continue
        flat = reduce_sum(jnp.concatenate([grads[name].reshape(-1) for name in bucket]), axes)
        start = 0
        for name in bucket:
            size = grads[name].size
            reduced[name] = flat[start : start + size].reshape(grads[name].shape)
            start += size
    return {name: reduced[name] for name in grads}
