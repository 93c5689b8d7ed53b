"""The collectives of the 4D algebra, for use inside one manual region (`jax.shard_map`).

Each is named for `jax.ad_checkpoint` policies, so that recomputation can keep the results.

An axis of size one is left out of the manual region altogether (`tensor/specs.py`), and every function here takes
an axis that is not there as one of size one: nothing is communicated and XLA sees a plain program. So the same
layers, called outside a manual region, are the plain version.
"""

from collections.abc import Iterable
from functools import partial

import jax
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Primitive
from jax.interpreters import mlir

from axonn_jax import compat
from axonn_jax.backend import repairs

BLOCK_REDUCTIONS = (
    *("x_all_reduce", "y_all_reduce", "y_reduce_scatter", "x_reduce_scatter", "x_all_gather"),
    *("tokens_all_gather", "tokens_reduce_scatter", "tokens_all_to_all"),
)
"""Names, for activation policies, of the collectives on activations in a layer's forward pass."""


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
    """Axes of `axes` that communicate here: part of the manual region and larger than one."""
    return tuple(axis for axis in axes if axis_size(axis) > 1)


def mark_varying(x: jax.Array, axes: Iterable[str]) -> jax.Array:
    """Mark `x` as varying over `axes` in the forward pass.

    Its transpose is an all-reduce of the cotangent over those axes that `x` did not vary over before: for the
    input of a matmul over the output axis that is the all-reduce of `dX`, bytes
    `2 (G-1)/G * size * itemsize` a device on a ring.
    """
    new = tuple(axis for axis in live(axes) if axis not in compat.varying_axes(x))
    return lax.pcast(x, new, to="varying") if new else x


def reduce_scatter(g: jax.Array, axis: str = "z", dim: int = 0) -> jax.Array:
    """Reduce-scatter a gathered weight's gradient along `dim` over `axis`; the transpose of `gather_weight`.

    Bytes a device on a ring: `(G-1)/G * size * itemsize`.
    """
    return g if axis_size(axis) == 1 else repairs.reduce_scatter(g, axis, dim)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def all_gather(x: jax.Array, axis: str, dim: int) -> jax.Array:
    """All-gather along `dim` over a live `axis`; the transpose is `reduce_scatter`, of the same bytes.

    Bytes a device on a ring: `(G-1)/G * size of the result * itemsize`.
    """
    return lax.all_gather(x, axis, axis=dim, tiled=True)


all_gather.defvjp(
    lambda x, axis, dim: (all_gather(x, axis, dim), None),
    lambda axis, dim, _, g: (reduce_scatter(g, axis, dim),),
)


def all_reduce(y: jax.Array, axes: str | tuple[str, ...]) -> jax.Array:
    """All-reduce partial sums over `axes`; the result no longer varies over them.

    Bytes a device on a ring: `2 (G-1)/G * size * itemsize`, G the product of the axes' sizes.
    """
    over = live((axes,) if isinstance(axes, str) else axes)
    return checkpoint_name(lax.psum(y, over), f"{'_'.join(over)}_all_reduce") if over else y


# What `x` is, as jax does not see it where parts of an array are reduced and put back one by one.
_alike = Primitive("alike")
_alike.def_abstract_eval(lambda x, *, axes: compat.without_varying(x, axes))
mlir.register_lowering(_alike, lambda _, x, *, axes: [x])


def assume_replicated(x: jax.Array, axes: Iterable[str]) -> jax.Array:
    """Declare that `x` is the same along `axes`, where jax cannot see it; not differentiable."""
    return _alike.bind(x, axes=tuple(axes))  # type: ignore[no-any-return]


def all_reduce_max(y: jax.Array, axis: str) -> jax.Array:
    """All-reduce to the maximum over `axis`; bytes as for `all_reduce`."""
    return lax.pmax(y, axis) if axis_size(axis) > 1 else y


def shard_offset(axis: str, shard_size: int) -> jax.Array | int:
    """First global index held by this device of a dim split into shards of `shard_size` over `axis`."""
    return axis_index(axis) * shard_size


# The residual stream [batch, seq, hidden]. Its features lie over `x`. With sequence parallelism its sequence lies over
# `y` too: norms, dropout and sums then run once, and not once on each of the devices along `y`; a matmul's input is
# gathered and its output reduce-scattered, together the bytes of the all-reduces that they replace (Korthikanti et al.,
# arXiv 2205.05198).

SEQUENCE_AXIS, FEATURE_AXIS = "y", "x"
_SEQUENCE_DIM = 1  # of [batch, seq, features]


def gather_over(x: jax.Array, axis: str, dim: int, of: str = "") -> jax.Array:
    """All-gather along `dim` over `axis`; for activation policies the result is `of` something, by default the axis.

    The transpose reduce-scatters. Bytes a device on a ring, either way: `(G-1)/G * size of the result * itemsize`.
    """
    return x if axis_size(axis) == 1 else checkpoint_name(all_gather(x, axis, dim), f"{of or axis}_all_gather")


def scatter_over(sums: jax.Array, axis: str, dim: int, of: str = "") -> jax.Array:
    """Reduce-scatter partial sums along `dim` over `axis`; name and bytes as for the gather."""
    if axis_size(axis) == 1:
        return sums
    return checkpoint_name(reduce_scatter(sums, axis, dim), f"{of or axis}_reduce_scatter")


def gather_sequence(x: jax.Array) -> jax.Array:
    """All-gather [batch, seq/Gy, features] along its sequence dim over `y`; bytes and transpose as of `gather_over`."""
    return gather_over(x, SEQUENCE_AXIS, _SEQUENCE_DIM)


def scatter_sequence(sums: jax.Array) -> jax.Array:
    """Reduce-scatter partial sums [batch, seq, features] over `y` along the sequence dim; bytes as for the gather."""
    return scatter_over(sums, SEQUENCE_AXIS, _SEQUENCE_DIM)


def gather_features(x: jax.Array) -> jax.Array:
    """All-gather [..., features/Gx] along its features over `x`; bytes and transpose as of `gather_over`."""
    return gather_over(x, FEATURE_AXIS, x.ndim - 1)


def scatter_features(sums: jax.Array) -> jax.Array:
    """Reduce-scatter partial sums [..., features] over `x` along the features; bytes as for the gather."""
    return scatter_over(sums, FEATURE_AXIS, sums.ndim - 1)


def local_sequence(full: jax.Array, dim: int) -> jax.Array:
    """Return this device's part of a dim of tokens that every device along `y` has in full; no collectives."""
    size = full.shape[dim] // axis_size(SEQUENCE_AXIS)
    return lax.dynamic_slice_in_dim(full, axis_index(SEQUENCE_AXIS) * size, size, dim)
