"""The collectives of the 4D algebra, for use inside one manual region (`jax.shard_map`).

Each is named for `jax.ad_checkpoint` policies, so that recomputation can keep what was communicated.
"""

from collections.abc import Iterable

import jax
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from axonn_jax import compat


def vary(x: jax.Array, axes: Iterable[str]) -> jax.Array:
    """Marks `x` as varying over `axes` in the forward pass.

    Its transpose is an all-reduce of the cotangent over those axes that `x` did not vary over before: for the
    input of a matmul over the output axis that is the all-reduce of `dX` (DESIGN section 4), bytes
    `2 (G-1)/G * size * itemsize` a device on a ring.
    """
    new = tuple(axis for axis in axes if axis not in compat.varying_axes(x))
    return lax.pcast(x, new, to="varying") if new else x


def gather_weight(w: jax.Array, axis: str = "z") -> jax.Array:
    """All-gathers a weight shard along its first dim over `axis`; the transpose reduce-scatters the gradient.

    Bytes a device on a ring: `(G-1)/G * size of the gathered weight * itemsize`, in either direction.
    """
    return checkpoint_name(lax.all_gather(w, axis, axis=0, tiled=True), f"{axis}_all_gather")


def reduce_sum(y: jax.Array, axis: str) -> jax.Array:
    """All-reduces partial sums over `axis`; the result no longer varies over it.

    Bytes a device on a ring: `2 (G-1)/G * size * itemsize`.
    """
    return checkpoint_name(lax.psum(y, axis), f"{axis}_all_reduce")


def shard_offset(axis: str, shard_size: int) -> jax.Array:
    """First global index held by this device of a dim split into shards of `shard_size` over `axis`."""
    return lax.axis_index(axis) * shard_size
