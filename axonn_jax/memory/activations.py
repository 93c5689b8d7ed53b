"""Activation policies: what the backward pass keeps and what it computes again."""

from functools import partial
from typing import Any

import jax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from axonn_jax.errors import UserError
from axonn_jax.memory.placement import HOST
from axonn_jax.memory.policies import FIELD, Policies, Policy, read_policies
from axonn_jax.models.transformer import Block, BlockFn, Streams, run_streams
from axonn_jax.tensor.collectives import BLOCK_REDUCTIONS
from axonn_jax.tensor.gather import Gather, gather_weights

_BLOCK_INPUT = "block_input"


def block_runner(activations: str, gather: Gather = "layer") -> BlockFn:
    """Returns how to run blocks under a policy, or each under its own (`memory.policies`).

    `none` keeps every intermediate; `full` keeps a block's input and computes the block again in the backward
    pass, communication included; `dots` keeps the outputs of matmuls with weights and computes the rest again;
    `save_collectives` keeps what was reduced and computes the rest again without reducing anything twice (TED,
    section on communication-aware activation checkpointing); `offload` is `full` with the block's input in host
    memory until the backward pass. With `gather` "layer" all of them but `none` gather weights again; else what a block
    recomputes begins with gathered weights, which are kept. With sequence parallelism all of them, `none` too, gather
    again what matmuls read of the stream. Raises ``UserError`` at a block of a loop over layers where policies differ.
    """
    policies = read_policies(activations)
    if policies.uniform is not None:
        return _runner(policies.uniform, gather)
    runners = {
        policy: _runner(policy, gather) for policy in {policies.rest, *(policy for policy, _ in policies.ranges)}
    }

    def run(block: Block, xs: Streams, key: jax.Array | None, layer: jax.Array | int) -> Streams:
        if not isinstance(layer, int):
            raise UserError(FIELD, activations, "one policy for all layers where they are scanned")
        return runners[policies.of(layer)](block, xs, key, layer)

    return run


def checked_policies(activations: str, model: Any) -> Policies:
    """The policies, checked against the layers of a model; raises ``UserError`` where it has not those they name."""
    policies = read_policies(activations)
    if policies.uniform is None:
        layers = getattr(model, getattr(model, "repeats", "layers"), None)
        if layers is None:
            raise UserError(FIELD, activations, f"one policy, for {type(model).__name__} does not tell its layers")
        policies.check(len(layers))
    return policies


def _runner(policy: Policy, gather: Gather) -> BlockFn:
    if policy == "none":
        return partial(run_streams, again=True)
    policies = jax.checkpoint_policies
    keep = {
        "full": None,
        "dots": policies.dots_with_no_batch_dims_saveable,
        "save_collectives": policies.save_only_these_names(*BLOCK_REDUCTIONS),
        "offload": policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[],
            names_which_can_be_offloaded=[_BLOCK_INPUT],
            offload_src="device",
            offload_dst=HOST,
        ),
    }[policy]

    def run(block: Block, xs: Streams, key: jax.Array | None, layer: jax.Array | int) -> Streams:
        if gather != "layer":
            block = gather_weights(block, xs[0].dtype)
        graphdef, state = nnx.split(block)

        def pure(state: Any, xs: Streams, key: jax.Array | None) -> Streams:
            if policy == "offload":  # the name, and not the argument, is what the backward pass then depends on
                xs = tuple(checkpoint_name(x, _BLOCK_INPUT) for x in xs)
            return run_streams(nnx.merge(graphdef, state), xs, key, layer)

        return jax.checkpoint(pure, policy=keep)(state, xs, key)  # type: ignore[no-any-return]

    return run
