"""The one reduction of a step's gradients."""

from collections.abc import Sequence

from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from axonn_jax.grid import BATCH_AXES
from axonn_jax.memory.buckets import in_place, reduce_in_buckets
from axonn_jax.memory.zero import scatter_in_buckets
from axonn_jax.tensor.clip import spec_axes, split_dim
from axonn_jax.tensor.params import Params, Specs


def reduce_gradients(
    sums: Params,
    specs: Specs,
    grad_specs: Specs,
    capacity: int,
    mesh: Mesh,
    token_axes: Sequence[str] = BATCH_AXES,
    *,
    in_turn: bool = True,
) -> Params:
    """Each device's sums of gradients -> the step's gradients, laid out by `grad_specs`; inside a manual region.

    `specs` are the parameters' layouts on `mesh`. Collectives, in buckets of `capacity` elements: an all-reduce over
    those of `token_axes` (`data`, `z`, with sequence parallelism `y`) over which a parameter is replicated; of these
    over `data` a reduce-scatter where `grad_specs` split over it. Buckets are put together `in_turn`, or each when its
    gradients are there.
    """
    split = {name: dim for name in sums if (dim := split_dim(grad_specs[name], "data")) is not None}

    def axes_of(name: str) -> tuple[str, ...]:
        done = {"data"} if name in split else set()
        return tuple(axis for axis in reduced_axes(specs[name], token_axes) if axis not in done)

    parts = scatter_in_buckets({name: sums[name] for name in split}, split, capacity, in_turn=in_turn)
    return reduce_in_buckets(
        {name: parts.get(name, g) for name, g in sums.items()},
        axes_of,
        capacity,
        by_parts=not in_place(mesh),
        in_turn=in_turn,
    )


def reduced_axes(spec: P, token_axes: Sequence[str] = BATCH_AXES) -> tuple[str, ...]:
    """The axes over which a parameter's gradient is summed once a step: those that split tokens, but not it."""
    return tuple(axis for axis in token_axes if axis not in spec_axes(spec))
