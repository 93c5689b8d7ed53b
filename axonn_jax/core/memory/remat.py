"""Layer runner of training, with sub-batches and activation recomputation."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from axonn_jax.core.experts.router import CHOICES
from axonn_jax.core.memory.host_arrays import HOST
from axonn_jax.core.models.packed import inputs_of, targets_of
from axonn_jax.core.models.protocol import Model, RunLayer
from axonn_jax.core.models.stacked import run_layers
from axonn_jax.core.options import Activations
from axonn_jax.core.tensor.collectives import BLOCK_REDUCTIONS
from axonn_jax.core.tensor.elementwise import DropoutKey
from axonn_jax.core.tensor.linear import regather_residual
from axonn_jax.core.tensor.weight_gather import gather_weights

SubBatches = tuple[jax.Array, ...]
"""Residual streams of equal parts of a device's sequences; one computes while another communicates."""

_LAYER_INPUT = "layer_input"


def layer_runner(model: Model, activations: Activations, *, regather: bool = True) -> RunLayer:
    """Return a function that runs a layer under a recomputation policy; sub-batches share its gathered weights.

    `none` keeps every intermediate. `full` keeps a layer's input and recomputes the layer in the backward pass,
    including communication. `dots` keeps the outputs of matmuls with weights. `save_collectives` keeps reduced values,
    so that no reduction runs twice (TED, section on communication-aware activation checkpointing). `offload` is `full`
    with the layer's input in host memory until the backward pass. Every policy gathers a residual stream with a split
    sequence again for the matmuls.

    Args:
        model: The model.
        activations: The policy.
        regather: Gather weights again for recomputation, instead of keeping the gathered weights.
    """

    def run(layer: nnx.Module, xs: SubBatches, key: DropoutKey | None) -> SubBatches:
        if len(xs) == 1:
            return (model.run_layer(layer, xs[0], key),)
        # Gather once for all sub-batches; inside `run_layer` each would gather the weights again.
        layer = gather_weights(layer, xs[0].dtype)
        keys = [None] * len(xs) if key is None else key.split(len(xs))
        return tuple(model.run_layer(layer, x, key) for x, key in zip(xs, keys, strict=True))

    def keep_all(layer: nnx.Module, xs: SubBatches, key: DropoutKey | None) -> SubBatches:
        regather_residual(layer)
        return run(layer, xs, key)

    def recompute(layer: nnx.Module, xs: SubBatches, key: DropoutKey | None) -> SubBatches:
        if not regather:
            # Outside `jax.checkpoint`, so that gathered weights are residuals and not recomputed.
            layer = gather_weights(layer, xs[0].dtype)
        graphdef, state = nnx.split(layer)

        def pure(state: object, xs: SubBatches, key: DropoutKey | None) -> SubBatches:
            # Name the input inside the checkpoint: the backward pass then depends on the named value, which the policy
            # offloads, and not on the argument, which would stay on the device.
            if activations == "offload":
                xs = jax.tree.map(lambda x: checkpoint_name(x, _LAYER_INPUT), xs)
            return run(nnx.merge(graphdef, state), xs, key)

        return jax.checkpoint(pure, policy=_saveable(activations))(state, xs, key)  # type: ignore[no-any-return]

    return keep_all if activations == "none" else recompute


def _saveable(activations: Activations) -> Callable[..., bool]:
    """Return JAX's policy for the values, besides its input, that a recomputed layer keeps."""
    # Every policy saves the router's choices: a recomputation that rounds differently could send a token elsewhere.
    policies = jax.checkpoint_policies
    if activations == "dots":
        choices = policies.save_only_these_names(CHOICES)
        return policies.save_from_both_policies(policies.dots_with_no_batch_dims_saveable, choices)
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
    """Return the sum of the losses of local sequences [batch, seq + 1], each target weighted by `target_weights`.

    The sequences run in independent `parts`, so that the all-reduces of one overlap with the matmuls of another. This
    sends the same bytes, since the parts share gathered weights.
    """
    gathered: Any = model
    model = gather_weights(gathered, dtype, skip=model.layer_list)

    def split(sequences: jax.Array) -> list[jax.Array]:
        return jnp.split(sequences, parts)

    keys = [None] * parts if key is None else key.split(parts)
    xs = tuple(
        model.embed(tokens, dtype, key) for tokens, key in zip(split(inputs_of(model, batch)), keys, strict=True)
    )

    def body(layer: nnx.Module, xs: SubBatches, index: jax.Array | int) -> SubBatches:
        return run_layer(layer, xs, None if key is None else key.of_layer(index))

    xs = run_layers(getattr(model, model.layer_list), body, xs)
    targets, weights = targets_of(model, batch)
    first, *tail = map(model.total_loss, xs, split(targets), split(weights))
    return sum(tail, first)
