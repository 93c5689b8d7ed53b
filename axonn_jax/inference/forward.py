"""Logits of whole sequences, all at once: the reference for generation with a cache."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from axonn_jax.grid import BATCH_AXES
from axonn_jax.tensor.params import Params, SplitModule
from axonn_jax.tensor.specs import shard_mapped
from axonn_jax.tensor.weight_gather import gather_weights


def logits(parts: SplitModule, mesh: Mesh, params: Params, tokens: jax.Array) -> jax.Array:
    """Float32 logits [sequences, seq, vocab] of [sequences, seq] tokens, laid out over `data`, `z` and `y`."""

    def local(params: Params, tokens: jax.Array) -> jax.Array:
        model: Any = parts.merge(params)
        dtype = jnp.dtype("float32")
        return gather_weights(model, dtype, skip=model.layer_list)(tokens, dtype=dtype)  # type: ignore[no-any-return]

    region = shard_mapped(local, mesh, (parts.specs, P(BATCH_AXES)), P(BATCH_AXES, None, "y"))
    return region(params, tokens)  # type: ignore[no-any-return]
