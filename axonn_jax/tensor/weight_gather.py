"""Weight gathers done once for several calls, and the arrays of weights that gradients are taken of."""

from collections.abc import Mapping
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx

from axonn_jax.tensor.collectives import GatheredWeight, WeightForm, axis_size, gather_weight, reduce_scatter
from axonn_jax.tensor.params import Params, Specs, layout
from axonn_jax.tensor.specs import split_dim

MaybeGathered = dict[str, jax.Array | GatheredWeight]
"""Parameters as a device has them, shards or gathered full."""

Module = TypeVar("Module", bound=nnx.Module)


def trained(weight: jax.Array | WeightForm, sums: jnp.dtype) -> jax.Array:
    """Return the array of a weight that gradients are taken of: the weight itself, or its form's, in dtype `sums`."""
    return weight if isinstance(weight, jax.Array) else weight.trained(sums)


def training(weights: Mapping[str, jax.Array | WeightForm], held: Mapping[str, Any], sums: jnp.dtype) -> dict[str, Any]:
    """Return the weights for layers: `held` itself, or a form that hands its gradient on to the array held."""

    def one(weight: jax.Array | WeightForm, value: Any) -> Any:
        return value if isinstance(weight, jax.Array) else weight.training(value, sums)

    return {name: one(weights[name], value) for name, value in held.items()}


def gather_weights(module: Module, dtype: jnp.dtype, *, skip: str = "") -> Module:
    """Return the module with its weights gathered over `z` in `dtype`, inside a manual region.

    Weights below the attribute `skip` stay. However often the module is called, each weight travels once and its
    gradient is reduce-scattered once. Collectives: an all-gather a weight, as in `gather_weight`; none where `z` is of
    size one.
    """
    if axis_size("z") == 1:
        return module
    split: Any = nnx.split(module, nnx.Param, ...)
    graphdef, state, rest = split

    def gathered(path: tuple[Any, ...], var: Any) -> Any:
        dim = split_dim(layout(var.get_metadata()), "z")
        if path[0] == skip or dim is None:
            return var
        return var.replace(GatheredWeight(gather_weight(var.get_value(), dtype, dim=dim)))

    pairs = [(path, gathered(path, var)) for path, var in nnx.to_flat_state(state)]
    return nnx.merge(graphdef, nnx.from_flat_state(pairs), rest)  # type: ignore[no-any-return]


def cast_for_reduction(dtype: jnp.dtype, params: MaybeGathered | Params, specs: Specs) -> MaybeGathered:
    """The parameters with shards over `z` in the dtype in which their gradients are to be reduce-scattered.

    `gather_weight` scatters in the dtype it is given; the cast folds with the one to the dtype it gathers in.
    """
    if axis_size("z") == 1:
        return dict(params)
    return {
        name: value.astype(dtype) if isinstance(value, jax.Array) and split_dim(specs[name], "z") is not None else value
        for name, value in params.items()
    }


def gather_params(params: Params, specs: Specs, dtype: jnp.dtype) -> MaybeGathered:
    """Gather every parameter that is split over `z` in `dtype`, inside a manual region; others stay.

    Collectives: an all-gather a weight, as in `gather_weight`; none where `z` is of size one.
    """
    if axis_size("z") == 1:
        return dict(params)
    return {
        name: value
        if (dim := split_dim(specs[name], "z")) is None
        else GatheredWeight(gather_weight(value, dtype, dim=dim))
        for name, value in params.items()
    }


def gather_once(params: Params, specs: Specs, dtype: jnp.dtype, inside: str) -> Params:
    """Parameters outside `inside` (a name's prefix) that are split over `z`, gathered in `dtype`; empty without `z`.

    For parameters that every microbatch reads first or last, with nothing to hide a gather behind. Collectives: an
    all-gather a weight, as in `gather_weight`; none where `z` is of size one.
    """
    outside = {name: value for name, value in params.items() if not name.startswith(inside)}
    gathered = gather_params(outside, specs, dtype)
    return {name: weight.value for name, weight in gathered.items() if isinstance(weight, GatheredWeight)}


def as_gathered(shards: MaybeGathered | Params, gathered: Params, specs: Specs) -> MaybeGathered:
    """The parameters with those in `gathered` taken from there; their gradients are the shards', as `gather_weight`'s.

    Collectives, in the backward pass: a reduce-scatter a weight, as in `reduce_scatter`.
    """
    held: MaybeGathered = dict(shards)
    for name, full in gathered.items():
        shard, dim = shards[name], split_dim(specs[name], "z")
        assert dim is not None
        assert isinstance(shard, jax.Array)
        held[name] = GatheredWeight(_as_gathered(shard, full, dim))
    return held


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _as_gathered(shard: jax.Array, full: jax.Array, dim: int) -> jax.Array:
    return full


def _forward(shard: jax.Array, full: jax.Array, dim: int) -> tuple[jax.Array, jax.Array]:
    return full, shard


def _backward(dim: int, shard: jax.Array, grad: jax.Array) -> tuple[jax.Array, jax.Array]:
    return reduce_scatter(grad.astype(shard.dtype), dim=dim), jnp.zeros_like(grad)


_as_gathered.defvjp(_forward, _backward)


def scatter_grads(sums: Mapping[str, jax.Array | GatheredWeight], specs: Specs) -> Params:
    """Whole gradients of gathered parameters -> each device's shard, summed over `z`; the others as they are.

    Collectives: a reduce-scatter a weight, as in `reduce_scatter`.
    """
    shards: Params = {}
    for name, value in sums.items():
        if isinstance(value, GatheredWeight):
            dim = split_dim(specs[name], "z")
            assert dim is not None
            shards[name] = reduce_scatter(value.value, dim=dim)
        else:
            shards[name] = value
    return shards
