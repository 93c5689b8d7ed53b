"""Layers as a trainer runs them: in sub-batches, and with recomputation in the backward pass."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from axonn_jax.experts.router import CHOICES
from axonn_jax.memory.host_arrays import HOST
from axonn_jax.models.packed import inputs_of, targets_of
from axonn_jax.models.protocol import Model, RunLayer
from axonn_jax.models.stacked import run_layers
from axonn_jax.options import Activations
from axonn_jax.tensor.collectives import BLOCK_REDUCTIONS
from axonn_jax.tensor.elementwise import DropoutKey
from axonn_jax.tensor.linear import regather_residual
from axonn_jax.tensor.weight_gather import gather_weights

SubBatches = tuple[jax.Array, ...]
"""The residual streams of equal parts of a device's sequences: one computes while another communicates."""

_LAYER_INPUT = "layer_input"


def layer_runner(model: Model, activations: Activations, *, regather: bool = True) -> RunLayer:
    """Return a function that runs the model's layers under a policy; sub-batches share a layer's gathered weights.

    `none` keeps every intermediate; `full` keeps a layer's input and computes the layer again in the backward pass,
    communication included; `dots` keeps the outputs of matmuls with weights and computes the rest again;
    `save_collectives` keeps reduced values and computes the rest again without reducing anything twice (TED, section on
    communication-aware activation checkpointing); `offload` is `full` with the layer's input in host memory until the
    backward pass. With `regather` all of them but `none` gather weights again; else recomputation begins with gathered
    weights, which are kept. All of them, `none` too, gather a stream with a split sequence again for the matmuls.
    """

    def run(layer: Any, xs: SubBatches, key: DropoutKey | None) -> SubBatches:
        if len(xs) == 1:
            return (model.run_layer(layer, xs[0], key),)
        layer = gather_weights(layer, xs[0].dtype)
        keys = [None] * len(xs) if key is None else key.split(len(xs))
        return tuple(model.run_layer(layer, x, key) for x, key in zip(xs, keys, strict=True))

    def keep_all(layer: Any, xs: SubBatches, key: DropoutKey | None) -> SubBatches:
        regather_residual(layer)
        return run(layer, xs, key)

    def recompute(layer: Any, xs: SubBatches, key: DropoutKey | None) -> SubBatches:
        if not regather:
            layer = gather_weights(layer, xs[0].dtype)
        graphdef, state = nnx.split(layer)

        def pure(state: Any, xs: SubBatches, key: DropoutKey | None) -> SubBatches:
            if activations == "offload":  # so the backward pass depends on the name and not on the argument
                xs = jax.tree.map(lambda x: checkpoint_name(x, _LAYER_INPUT), xs)
            return run(nnx.merge(graphdef, state), xs, key)

        return jax.checkpoint(pure, policy=_saveable(activations))(state, xs, key)  # type: ignore[no-any-return]

    return keep_all if activations == "none" else recompute


def _saveable(activations: Activations) -> Any:
    """Return jax's policy for the values, beside its input, that a recomputed layer keeps."""
    policies = jax.checkpoint_policies
    if activations == "dots":
        chosen = policies.save_only_these_names(CHOICES)
        return policies.save_from_both_policies(policies.dots_with_no_batch_dims_saveable, chosen)
    if activations == "save_collectives":
        return policies.save_only_these_names(*BLOCK_REDUCTIONS, CHOICES)
    if activations == "offload":
        return policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[CHOICES],
            names_which_can_be_offloaded=[_LAYER_INPUT],
            offload_src="device",
            offload_dst=HOST,
        )
    return policies.save_only_these_names(CHOICES)


def batch_loss(
    model: Model, batch: jax.Array, dtype: jnp.dtype, key: DropoutKey | None, run_layer: RunLayer, parts: int
) -> jax.Array:
    """Sum of the losses of local sequences [batch, seq + 1], each target weighted by `target_weights`.

    The sequences go through the model in so many independent `parts`, so that one part's all-reduces can run beside
    another's matmuls; bytes are the same, since the parts share gathered weights.
    """
    gathered: Any = model
    model = gather_weights(gathered, dtype, skip=model.layer_list)

    def split(sequences: jax.Array) -> list[jax.Array]:
        return jnp.split(sequences, parts)

    keys = [None] * parts if key is None else key.split(parts)
    xs = tuple(
        model.embed(tokens, dtype, key) for tokens, key in zip(split(inputs_of(model, batch)), keys, strict=True)
    )

    def body(layer: Any, xs: SubBatches, index: jax.Array | int) -> SubBatches:
        return run_layer(layer, xs, None if key is None else key.of_layer(index))

    xs = run_layers(getattr(model, model.layer_list), body, xs)
    targets, weights = targets_of(model, batch)
    first, *others = map(model.total_loss, xs, split(targets), split(weights))
    return sum(others, first)
