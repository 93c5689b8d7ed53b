"""The collectives of the 4D algebra, for use inside one manual region (`jax.shard_map`).

Each is named for `jax.ad_checkpoint` policies, so that recomputation can keep what was communicated.

An axis of size one is left out of the manual region altogether (`tensor/region.py`), and every function here takes
an axis that is not there as one of size one: nothing is communicated and XLA sees a plain program. So the same
layers, called outside a manual region, are the plain version.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Primitive
from jax.interpreters import mlir

from axonn_jax import compat

BLOCK_REDUCTIONS = ("x_all_reduce", "y_all_reduce", "y_reduce_scatter", "x_reduce_scatter", "x_all_gather")
"""Names under which a policy finds what a layer's forward pass communicates of activations."""


def axis_size(axis: str) -> int:
    """Size of a mesh axis inside a manual region; 1 where the axis is not part of one."""
    try:
        return int(lax.axis_size(axis))
    except NameError:  # jax says "unbound axis name"
        return 1


def axis_index(axis: str) -> jax.Array | int:
    """This device's place along a mesh axis; 0 where the axis is not part of the manual region."""
    return lax.axis_index(axis) if axis_size(axis) > 1 else 0


def live(axes: Iterable[str]) -> tuple[str, ...]:
    """Those of `axes` that communicate here: in a manual region and larger than one."""
    return tuple(axis for axis in axes if axis_size(axis) > 1)


def vary(x: jax.Array, axes: Iterable[str]) -> jax.Array:
    """Marks `x` as varying over `axes` in the forward pass.

    Its transpose is an all-reduce of the cotangent over those axes that `x` did not vary over before: for the
    input of a matmul over the output axis that is the all-reduce of `dX` (DESIGN section 4), bytes
    `2 (G-1)/G * size * itemsize` a device on a ring.
    """
    new = tuple(axis for axis in live(axes) if axis not in compat.varying_axes(x))
    return lax.pcast(x, new, to="varying") if new else x


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Gathered:
    """A weight that has been gathered already, in place of its shard: for layers that several streams share."""

    value: jax.Array


def gather_weight(w: jax.Array | Gathered, dtype: jnp.dtype, axis: str = "z", dim: int = 0) -> jax.Array:
    """All-gathers a weight shard, cast to `dtype`, along `dim` over `axis`.

    The transpose reduce-scatters the gradient in the shard's own dtype: summed over many devices in bf16 it would be
    off by a percent and more. A weight that is `Gathered` is taken as it is. Bytes a device on a ring: `(G-1)/G *
    elements of the gathered weight * itemsize`, of `dtype` there and of the shard's on the way back.
    """
    if isinstance(w, Gathered):
        return w.value
    if axis_size(axis) == 1:
        return w.astype(dtype)
    return checkpoint_name(_gathered(w, jnp.dtype(dtype), axis, dim), f"{axis}_all_gather")


@partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _gathered(w: jax.Array, dtype: jnp.dtype, axis: str, dim: int) -> jax.Array:
    return lax.all_gather(w.astype(dtype), axis, axis=dim, tiled=True)


def _gathered_forward(w: jax.Array, dtype: jnp.dtype, axis: str, dim: int) -> tuple[jax.Array, jax.Array]:
    return _gathered(w, dtype, axis, dim), jnp.zeros((), w.dtype)


def _gathered_backward(dtype: jnp.dtype, axis: str, dim: int, like: jax.Array, g: jax.Array) -> tuple[jax.Array]:
    return (scatter_sum(g.astype(like.dtype), axis, dim),)


_gathered.defvjp(_gathered_forward, _gathered_backward)


def scatter_sum(g: jax.Array, axis: str = "z", dim: int = 0) -> jax.Array:
    """Reduce-scatters a gathered weight's gradient along `dim` over `axis`: what autodiff makes of `gather_weight`.

    Bytes a device on a ring: `(G-1)/G * size * itemsize`.
    """
    return g if axis_size(axis) == 1 else lax.psum_scatter(g, axis, scatter_dimension=dim, tiled=True)


def reduce_sum(y: jax.Array, axes: str | tuple[str, ...]) -> jax.Array:
    """All-reduces partial sums over `axes`; the result no longer varies over them.

    Bytes a device on a ring: `2 (G-1)/G * size * itemsize`, G the product of the axes' sizes.
    """
    over = live((axes,) if isinstance(axes, str) else axes)
    return checkpoint_name(lax.psum(y, over), f"{'_'.join(over)}_all_reduce") if over else y


# What `x` is, as jax does not see it where parts of an array are reduced and put back one by one.
_alike = Primitive("alike")
_alike.def_abstract_eval(lambda x, *, axes: compat.without_varying(x, axes))
mlir.register_lowering(_alike, lambda _, x, *, axes: [x])


def alike(x: jax.Array, axes: Iterable[str]) -> jax.Array:
    """Declares that `x` is the same along `axes`, where jax cannot see it; not differentiable."""
    return _alike.bind(x, axes=tuple(axes))  # type: ignore[no-any-return]


def reduce_max(y: jax.Array, axis: str) -> jax.Array:
    """All-reduces to the maximum over `axis`; bytes as for `reduce_sum`."""
    return lax.pmax(y, axis) if axis_size(axis) > 1 else y


def shard_offset(axis: str, shard_size: int) -> jax.Array | int:
    """First global index held by this device of a dim split into shards of `shard_size` over `axis`."""
    return axis_index(axis) * shard_size
