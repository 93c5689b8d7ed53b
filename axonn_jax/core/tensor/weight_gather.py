"""Layer weights: gathering of shards, per call or once for several calls, and the form of pruned weights."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from axonn_jax.core import compat
from axonn_jax.core.tensor.collectives import axis_size, mark_varying, reduce_scatter
from axonn_jax.core.tensor.params import Params, Specs, split_module
from axonn_jax.core.tensor.specs import split_dim


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class GatheredWeight:
    """Weight that is already gathered, in place of its shard, for layers that several sub-batches share."""

    value: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PrunedWeight:
    """A device's shard of a pruned weight, which takes the weight's place in a module."""

    dense: jax.Array
    """The shard in dense form, with zeros at pruned entries."""
    index: jax.Array
    """Row-major positions of the kept entries: [1, ..., slots] int32, ascending; spare slots point past the end."""
    tap: jax.Array | None = None
    """[1, ..., slots] with unused values; its gradient, in its dtype, is the kept entries'. None without gradients."""

    def shard(self) -> jax.Array:
        """Return the dense shard; its gradient is compressed to the kept entries right away. No collectives.

        Source: SAMO (Singh and Bhatele, IPDPS 23), section on compressing gradients layer by layer.
        """
        # The tap, not the dense shard, is differentiated, so no dense gradient outlives its layer's backward pass.
        if self.tap is None:
            return self.dense
        return _tapped(self.tap, mark_varying(self.dense, compat.varying_axes(self.tap)), self.index)

    def trained(self, dtype: jnp.dtype) -> jax.Array:
        """Return a tap in `dtype`, the array to differentiate with respect to."""
        return mark_varying(jnp.zeros(self.index.shape, dtype), compat.varying_axes(self.index))

    def holding(self, dense: jax.Array) -> "PrunedWeight":
        """Return the weight with another array, for example of gradients, in place of the dense shard."""
        return replace(self, dense=dense)

    def training(self, trained: jax.Array, dtype: jnp.dtype) -> "PrunedWeight":
        """Return the weight with `trained` as its tap; a reduction of its gradient over `z` happens in `dtype`."""
        return replace(self, dense=self.dense.astype(dtype) if axis_size("z") > 1 else self.dense, tap=trained)


@jax.custom_vjp
def _tapped(tap: jax.Array, dense: jax.Array, index: jax.Array) -> jax.Array:
    return dense


_tapped.defvjp(
    lambda tap, dense, index: (dense, (tap, index)),
    lambda residuals, grad: (gather_entries(grad, residuals[1]).astype(residuals[0].dtype), None, None),
)


def gather_entries(dense: jax.Array, index: jax.Array) -> jax.Array:
    """Return the kept entries [1, ..., slots] of a local dense array, 0 in spare slots."""
    flat = dense.reshape(-1).at[index.reshape(-1)]
    entries = flat.get(mode="fill", fill_value=0, unique_indices=True, indices_are_sorted=True)
    return entries.reshape(index.shape)


def gather_weight(w: jax.Array | GatheredWeight | PrunedWeight, dtype: jnp.dtype, dim: int = 0) -> jax.Array:
    """All-gather a weight shard along `dim` over `z`, in `dtype`.

    The transpose reduce-scatters the gradient in the shard's dtype. Bytes sent per device on a ring:
    `(G-1)/G * elements of the gathered weight * itemsize`, with the itemsize of `dtype` forward and of the shard's
    dtype backward.

    Args:
        w: The shard; a `GatheredWeight` is returned without a gather.
        dtype: Dtype of the result; the shard is cast before it travels.
        dim: Dim along which shards are concatenated.
    """
    if isinstance(w, GatheredWeight):
        return w.value
    if isinstance(w, PrunedWeight):
        w = w.shard()
    if axis_size("z") == 1:
        return w.astype(dtype)
    return checkpoint_name(_gathered(w, jnp.dtype(dtype), dim), "z_all_gather")


# A custom VJP, since autodiff would reduce the gradient in `dtype`: summed over many devices in bf16, it would be off
# by a percent or more.
@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _gathered(w: jax.Array, dtype: jnp.dtype, dim: int) -> jax.Array:
    return lax.all_gather(w.astype(dtype), "z", axis=dim, tiled=True)


_gathered.defvjp(
    lambda w, dtype, dim: (_gathered(w, dtype, dim), jnp.zeros((), w.dtype)),
    lambda dtype, dim, prototype, g: (reduce_scatter(g.astype(prototype.dtype), "z", dim),),
)


MaybeGathered = dict[str, jax.Array | GatheredWeight]
"""Parameters on a device by name, as shards or gathered."""

Module = TypeVar("Module", bound=nnx.Module)


Weight = jax.Array | PrunedWeight
"""Weight as a layer reads it: an array, or a pytree that provides the layer's shard."""

Weights = dict[str, Weight]
"""Weights by name, as layers read them."""


def trained(weight: Weight, sums: jnp.dtype) -> jax.Array:
    """Return the array to differentiate: the weight itself, or a pruned weight's tap in dtype `sums`."""
    return weight if isinstance(weight, jax.Array) else weight.trained(sums)


def training(weights: Mapping[str, Weight], params: Mapping[str, Any], sums: jnp.dtype) -> dict[str, Any]:
    """Return the weights that layers read, whose gradients flow to the arrays in `params`.

    Args:
        weights: The weights, which determine the form of each result.
        params: The trained arrays by name, as from `trained`.
        sums: Dtype in which gradients are reduced.
    """
    layer_weights = dict(params)
    for name, value in params.items():
        if not isinstance(weight := weights[name], jax.Array):
            layer_weights[name] = weight.training(value, sums)
    return layer_weights


def gather_weights(module: Module, dtype: jnp.dtype, *, skip: str = "") -> Module:
    """Return the module with its weights gathered over `z` in `dtype`, inside a manual region.

    However often the module is called, each weight is gathered once and its gradient reduce-scattered once.
    Collectives: an all-gather per weight, as in `gather_weight`; none if `z` has size one.

    Args:
        module: The module.
        dtype: Dtype of the gathered weights.
        skip: Attribute whose weights are not gathered.
    """
    if axis_size("z") == 1:
        return module
    parts: Any = split_module(module)
    selected = {name: weight for name, weight in parts.params.items() if name.partition(".")[0] != skip}
    return parts.merge(parts.params | gather_params(selected, parts.specs, dtype))  # type: ignore[no-any-return]


def cast_for_reduction(dtype: jnp.dtype, params: MaybeGathered | Params, specs: Specs) -> MaybeGathered:
    """Return the parameters with shards over `z` cast to the dtype in which their gradients are reduce-scattered."""
    # `gather_weight` scatters in its input's dtype; this cast folds with the one to the dtype it gathers in.
    if axis_size("z") == 1:
        return dict(params)
    return {
        name: value.astype(dtype) if isinstance(value, jax.Array) and split_dim(specs[name], "z") is not None else value
        for name, value in params.items()
    }


def gather_params(params: Params, specs: Specs, dtype: jnp.dtype) -> MaybeGathered:
    """Gather every parameter that is split over `z`, in `dtype`, inside a manual region.

    Collectives: an all-gather per weight, as in `gather_weight`; none if `z` has size one.
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
    """Return, gathered in `dtype`, the parameters split over `z` whose names do not begin with `inside`.

    Meant for parameters that every microbatch reads first or last, with no computation to hide a gather behind.
    Collectives: an all-gather per weight, as in `gather_weight`; none, and an empty result, if `z` has size one.
    """
    outside = {name: value for name, value in params.items() if not name.startswith(inside)}
    gathered = gather_params(outside, specs, dtype)
    return {name: weight.value for name, weight in gathered.items() if isinstance(weight, GatheredWeight)}


def as_gathered(shards: MaybeGathered | Params, gathered: Params, specs: Specs) -> MaybeGathered:
    """Return the parameters with those in `gathered` substituted; their gradients flow to the shards.

    Collectives: in the backward pass a reduce-scatter per weight, as in `reduce_scatter`.
    """
    params: MaybeGathered = dict(shards)
    for name, full in gathered.items():
        shard, dim = shards[name], split_dim(specs[name], "z")
        assert dim is not None
        assert isinstance(shard, jax.Array)
        params[name] = GatheredWeight(_as_gathered(shard, full, dim))
    return params


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _as_gathered(shard: jax.Array, full: jax.Array, dim: int) -> jax.Array:
    return full


_as_gathered.defvjp(
    lambda shard, full, dim: (full, shard),
    lambda dim, shard, grad: (reduce_scatter(grad.astype(shard.dtype), dim=dim), jnp.zeros_like(grad)),
)


def scatter_grads(sums: Mapping[str, jax.Array | GatheredWeight], specs: Specs) -> Params:
    """Reduce the full gradients of gathered parameters over `z` to each device's shard.

    Collectives: a reduce-scatter per weight, as in `reduce_scatter`.
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
