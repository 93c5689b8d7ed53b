"""Activation policies: what the backward pass keeps and what it computes again."""

from typing import Any, Literal

import jax
from flax import nnx

from axonn_jax.models.transformer import Block, BlockFn

Activations = Literal["none", "full", "dots"]


def block_runner(policy: Activations) -> BlockFn:
    """Returns how to run a block under a policy.

    `none` keeps every intermediate; `full` keeps a block's input and computes the block again in the backward
    pass, communication included; `dots` keeps the outputs of matmuls with weights and computes the rest again.
    """
    if policy == "none":
        return lambda block, x, key: block(x, key)
    keep = jax.checkpoint_policies.dots_with_no_batch_dims_saveable if policy == "dots" else None

    def run(block: Block, x: jax.Array, key: jax.Array | None) -> jax.Array:
        graphdef, state = nnx.split(block)

        def pure(state: Any, x: jax.Array, key: jax.Array | None) -> jax.Array:
            return nnx.merge(graphdef, state)(x, key)

        return jax.checkpoint(pure, policy=keep)(state, x, key)  # type: ignore[no-any-return]

    return run
