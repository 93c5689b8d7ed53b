"""Whether a state is made of finite numbers: asked before it is saved."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from axonn_jax.memory.placement import HOST


def all_finite(state: Any) -> bool:
    """Whether no array of a tree holds an infinity or a NaN; waits for the arrays.

    Arrays on devices are looked at there, one after another and with no copy. Of one in host memory a process looks at
    the shards that it has. Collectives: an all-reduce of a scalar for each array that is sharded.
    """
    leaves = [leaf for leaf in jax.tree.leaves(state) if jnp.issubdtype(leaf.dtype, jnp.inexact)]
    on_host = [leaf for leaf in leaves if leaf.sharding.memory_kind == HOST]
    found = [_finite(leaf) for leaf in leaves if leaf.sharding.memory_kind != HOST]
    shards = (shard for leaf in on_host for shard in leaf.addressable_shards if shard.replica_id == 0)
    return all(bool(np.isfinite(np.asarray(shard.data)).all()) for shard in shards) and all(map(bool, found))


@jax.jit
def _finite(array: jax.Array) -> jax.Array:
    return jnp.isfinite(array).all()
