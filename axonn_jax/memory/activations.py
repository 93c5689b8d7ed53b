"""Activation policies: what the backward pass keeps and what it computes again."""

from typing import Any, Literal

import jax
from flax import nnx

from axonn_jax.models.transformer import Block, BlockFn, Streams, run_streams

Activations = Literal["none", "full", "dots"]


def block_runner(policy: Activations) -> BlockFn:
    """Returns how to run a block under a policy.

    `none` keeps every intermediate; `full` keeps a block's input and computes the block again in the backward
    pass, communication included; `dots` keeps the outputs of matmuls with weights and computes the rest again.
    """
    if policy == "none":
        return run_streams
    keep = jax.checkpoint_policies.dots_with_no_batch_dims_saveable if policy == "dots" else None

    def run(block: Block, xs: Streams, key: jax.Array | None) -> Streams:
        graphdef, state = nnx.split(block)

        def pure(state: Any, xs: Streams, key: jax.Array | None) -> Streams:
            return run_streams(nnx.merge(graphdef, state), xs, key)

        return jax.checkpoint(pure, policy=keep)(state, xs, key)  # type: ignore[no-any-return]

    return run
