"""All of a module's or model's weights gathered at once, for several calls that share them."""

from collections.abc import Mapping
from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from axonn_jax.tensor.clip import split_dim
from axonn_jax.tensor.collectives import Gathered, axis_size, gather_weight, scatter_sum
from axonn_jax.tensor.params import Params, Specs, layout

Gather = Literal["layer", "pass", "step"]
"""How long gathered weights live: in a layer, from a microbatch's forward pass to its backward, or for a step."""

Held = dict[str, jax.Array | Gathered]
"""Parameters as a device has them, shards or gathered whole."""

Module = TypeVar("Module", bound=nnx.Module)


def gather_weights(module: Module, dtype: jnp.dtype) -> Module:
    """The module with its weights gathered over `z` in `dtype`, inside a manual region: its layers gather no more.

    However often it is called, each weight travels once and its gradient is reduce-scattered once. Collectives: an
    all-gather a weight, as in `gather_weight`; none where `z` is of size one.
    """
    if axis_size("z") == 1:
        return module
    split: Any = nnx.split(module, nnx.Param, ...)
    graphdef, state, rest = split

    def gathered(var: Any) -> Any:
        if split_dim(PartitionSpec(*layout(var.get_metadata())[:1]), "z") is None:
            return var
        return var.replace(Gathered(gather_weight(var.get_value(), dtype)))

    pairs = [(path, gathered(var)) for path, var in nnx.to_flat_state(state)]
    return nnx.merge(graphdef, nnx.from_flat_state(pairs), rest)  # type: ignore[no-any-return]


def gather_params(params: Params, specs: Specs, dtype: jnp.dtype) -> Held:
    """Every parameter that is split over `z` gathered in `dtype`, inside a manual region; the others as they are.

    Collectives: an all-gather a weight, as in `gather_weight`; none where `z` is of size one.
    """
    if axis_size("z") == 1:
        return dict(params)
    return {
        name: value if (dim := split_dim(specs[name], "z")) is None else Gathered(gather_weight(value, dtype, dim=dim))
        for name, value in params.items()
    }


def scatter_grads(sums: Mapping[str, jax.Array | Gathered], specs: Specs) -> Params:
    """Whole gradients of gathered parameters -> each device's shard, summed over `z`; the others as they are.

    Collectives: a reduce-scatter a weight, as in `scatter_sum`.
    """
    shards: Params = {}
    for name, value in sums.items():
        if isinstance(value, Gathered):
            dim = split_dim(specs[name], "z")
            assert dim is not None
            shards[name] = scatter_sum(value.value, dim=dim)
        else:
            shards[name] = value
    return shards
