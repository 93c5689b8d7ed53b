"""The global norm of sharded gradients."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from axonn_jax.tensor.collectives import axis_size, reduce_sum, vary

TENSOR_AXES = ("z", "y", "x")


def spec_axes(spec: PartitionSpec) -> frozenset[str]:
    """Mesh axes that a layout splits over."""
    return frozenset(a for dim in spec if dim is not None for a in ((dim,) if isinstance(dim, str) else dim))


def split_dim(spec: PartitionSpec, axis: str) -> int | None:
    """The dim that a layout splits over an axis."""
    return next((at for at, dim in enumerate(spec) if axis in spec_axes(PartitionSpec(dim))), None)


def global_norm(grads: Mapping[str, jax.Array], specs: Mapping[str, PartitionSpec]) -> jax.Array:
    """Euclidean norm of all gradients: the root of `square_sum`, with its collective."""
    return jnp.sqrt(square_sum(grads, specs))


def square_sum(grads: Mapping[str, jax.Array], specs: Mapping[str, PartitionSpec]) -> jax.Array:
    """Sum of squares of all gradients, each counted once however often it is replicated; inside a manual region.

    Expects gradients already reduced over the axes that replicate them. Collective: one all-reduce of a scalar over
    `z`, `y`, `x`, and `data` where that splits some of them.
    """
    split = frozenset().union(*(spec_axes(specs[name]) for name in grads))
    axes = (("data",) if "data" in split else ()) + TENSOR_AXES
    total = vary(jnp.zeros((), jnp.float32), axes)
    for name, grad in grads.items():
        square = jnp.sum(jnp.square(grad.astype(jnp.float32)))
        copies = 1
        for axis in axes:
            copies *= 1 if axis in spec_axes(specs[name]) else axis_size(axis)
        total = total + vary(square, axes) / copies
    return reduce_sum(total, axes)
