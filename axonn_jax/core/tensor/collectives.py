"""Collectives of the 4D algorithm, for use inside a manual region (`jax.shard_map`).

Results carry names for `jax.ad_checkpoint` policies, so that recomputation can save them.

The manual region leaves out axes of size one (`core/tensor/specs.py`), and every function here treats a missing axis as
one of size one: nothing is communicated and XLA sees a plain program. Called outside a manual region, the same layers
are therefore their own unsharded version.
"""

from collections.abc import Iterable
from functools import partial

import jax
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Primitive
from jax.interpreters import mlir

from axonn_jax.core import compat
from axonn_jax.core.backend import workarounds

BLOCK_REDUCTIONS = (
    *("x_all_reduce", "y_all_reduce", "y_reduce_scatter", "x_reduce_scatter", "x_all_gather"),
    *("tokens_all_gather", "tokens_reduce_scatter", "tokens_all_to_all"),
)
"""Names, for activation policies, of the collectives on activations in a block's forward pass."""


def axis_size(axis: str) -> int:
    """Return the size of a mesh axis inside a manual region; 1 if the axis is not part of one."""
    try:
        return int(lax.axis_size(axis))
    except NameError:  # jax says "unbound axis name"
        return 1


def axis_index(axis: str) -> jax.Array | int:
    """Return this device's index along a mesh axis; 0 if the axis is not part of the manual region."""
    return lax.axis_index(axis) if axis_size(axis) > 1 else 0


def live(axes: Iterable[str]) -> tuple[str, ...]:
    """Return those of `axes` that communicate here: part of the manual region and larger than one."""
    return tuple(axis for axis in axes if axis_size(axis) > 1)


def mark_varying(x: jax.Array, axes: Iterable[str]) -> jax.Array:
    """Mark `x` as varying over `axes` in the forward pass.

    Its transpose is an all-reduce of the cotangent over the axes that `x` did not vary over already. For a matmul's
    input and the output axis that is the all-reduce of dX, `2 (G-1)/G * size * itemsize` bytes per device on a ring.
    """
    new = tuple(axis for axis in live(axes) if axis not in compat.varying_axes(x))
    return lax.pcast(x, new, to="varying") if new else x


def reduce_scatter(g: jax.Array, axis: str = "z", dim: int = 0) -> jax.Array:
    """Reduce-scatter a gathered weight's gradient along `dim` over `axis`; the transpose of `gather_weight`.

    Bytes per device on a ring: `(G-1)/G * size * itemsize`.
    """
    return g if axis_size(axis) == 1 else workarounds.reduce_scatter(g, axis, dim)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def all_gather(x: jax.Array, axis: str, dim: int) -> jax.Array:
    """All-gather along `dim` over a live `axis`; the transpose is `reduce_scatter`, with the same bytes.

    Bytes per device on a ring: `(G-1)/G * size of the result * itemsize`.
    """
    return lax.all_gather(x, axis, axis=dim, tiled=True)


all_gather.defvjp(
    lambda x, axis, dim: (all_gather(x, axis, dim), None),
    lambda axis, dim, _, g: (reduce_scatter(g, axis, dim),),
)


def all_reduce(y: jax.Array, axes: str | tuple[str, ...]) -> jax.Array:
    """All-reduce partial sums over `axes`; the result no longer varies over them.

    Bytes per device on a ring: `2 (G-1)/G * size * itemsize`, where G is the product of the axes' sizes.
    """
    over = live((axes,) if isinstance(axes, str) else axes)
    return checkpoint_name(lax.psum(y, over), f"{'_'.join(over)}_all_reduce") if over else y


# The identity, with a type that varies over fewer axes: jax cannot see that a result is replicated where parts of an
# array are reduced and put back one by one.
_alike = Primitive("alike")
_alike.def_abstract_eval(lambda x, *, axes: compat.without_varying(x, axes))
mlir.register_lowering(_alike, lambda _, x, *, axes: [x])


def assume_replicated(x: jax.Array, axes: Iterable[str]) -> jax.Array:
    """Declare `x` replicated along `axes` where jax cannot infer it; not differentiable."""
    return _alike.bind(x, axes=tuple(axes))  # type: ignore[no-any-return]


def all_reduce_max(y: jax.Array, axis: str) -> jax.Array:
    """All-reduce the maximum over `axis`; bytes as for `all_reduce`."""
    return lax.pmax(y, axis) if axis_size(axis) > 1 else y


def shard_offset(axis: str, shard_size: int) -> jax.Array | int:
    """Return the global index at which this device's shard begins, for shards of `shard_size` over `axis`."""
    return axis_index(axis) * shard_size


# The residual stream [batch, seq, hidden] has its features split over `x`. With sequence parallelism its sequence is
# split over `y`, so norms, dropout and sums are no longer repeated on every device along `y`. A matmul's input is then
# gathered and its output reduce-scattered, for the same total bytes as the all-reduces that they replace (Korthikanti
# et al., arXiv 2205.05198).

SEQUENCE_AXIS, FEATURE_AXIS = "y", "x"
_SEQUENCE_DIM = 1  # of [batch, seq, features]


def gather_over(x: jax.Array, axis: str, dim: int, of: str = "") -> jax.Array:
    """All-gather along `dim` over `axis`; the transpose reduce-scatters.

    Bytes per device on a ring, in either direction: `(G-1)/G * size of the result * itemsize`. `of` begins the name of
    the result for activation policies, by default the axis.
    """
    return x if axis_size(axis) == 1 else checkpoint_name(all_gather(x, axis, dim), f"{of or axis}_all_gather")


def scatter_over(sums: jax.Array, axis: str, dim: int, of: str = "") -> jax.Array:
    """Reduce-scatter partial sums along `dim` over `axis`; name and bytes as for `gather_over`."""
    if axis_size(axis) == 1:
        return sums
    return checkpoint_name(reduce_scatter(sums, axis, dim), f"{of or axis}_reduce_scatter")


def gather_sequence(x: jax.Array) -> jax.Array:
    """All-gather [batch, seq/Gy, features] along the sequence dim over `y`; bytes and transpose as in `gather_over`."""
    return gather_over(x, SEQUENCE_AXIS, _SEQUENCE_DIM)


def scatter_sequence(sums: jax.Array) -> jax.Array:
    """Reduce-scatter partial sums [batch, seq, features] along the sequence dim over `y`; bytes as for the gather."""
    return scatter_over(sums, SEQUENCE_AXIS, _SEQUENCE_DIM)


def gather_features(x: jax.Array) -> jax.Array:
    """All-gather [..., features/Gx] along the features over `x`; bytes and transpose as in `gather_over`."""
    return gather_over(x, FEATURE_AXIS, x.ndim - 1)


def scatter_features(sums: jax.Array) -> jax.Array:
    """Reduce-scatter partial sums [..., features] along the features over `x`; bytes as for the gather."""
    return scatter_over(sums, FEATURE_AXIS, sums.ndim - 1)


def local_sequence(full: jax.Array, dim: int) -> jax.Array:
    """Return this device's slice of a dim of tokens that every device along `y` has in full; no collectives."""
    size = full.shape[dim] // axis_size(SEQUENCE_AXIS)
    return lax.dynamic_slice_in_dim(full, axis_index(SEQUENCE_AXIS) * size, size, dim)
