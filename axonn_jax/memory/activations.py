"""Activation policies: what the backward pass keeps and what it computes again."""

from typing import Any, Literal

import jax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from axonn_jax.memory.placement import HOST
from axonn_jax.models.transformer import Block, BlockFn, Streams, run_streams
from axonn_jax.tensor.collectives import BLOCK_ALL_REDUCES

Activations = Literal["none", "full", "dots", "save_collectives", "offload"]

_BLOCK_INPUT = "block_input"


def block_runner(policy: Activations, run_block: BlockFn = run_streams) -> BlockFn:
    """Returns how to run a block, by `run_block`, under a policy.

    `none` keeps every intermediate; `full` keeps a block's input and computes the block again in the backward
    pass, communication included; `dots` keeps the outputs of matmuls with weights and computes the rest again;
    `save_collectives` keeps what was all-reduced and computes the rest again without reducing anything twice (TED,
    section on communication-aware activation checkpointing); `offload` is `full` with the block's input in host
    memory until the backward pass. Weights are gathered again under all of them.
    """
    if policy == "none":
        return run_block
    policies = jax.checkpoint_policies
    keep = {
        "full": None,
        "dots": policies.dots_with_no_batch_dims_saveable,
        "save_collectives": policies.save_only_these_names(*BLOCK_ALL_REDUCES),
        "offload": policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[],
            names_which_can_be_offloaded=[_BLOCK_INPUT],
            offload_src="device",
            offload_dst=HOST,
        ),
    }[policy]

    def run(block: Block, xs: Streams, key: jax.Array | None) -> Streams:
        graphdef, state = nnx.split(block)

        def pure(state: Any, xs: Streams, key: jax.Array | None) -> Streams:
            if policy == "offload":  # the name, and not the argument, is what the backward pass then depends on
                xs = tuple(checkpoint_name(x, _BLOCK_INPUT) for x in xs)
            return run_block(nnx.merge(graphdef, state), xs, key)

        return jax.checkpoint(pure, policy=keep)(state, xs, key)  # type: ignore[no-any-return]

    return run
