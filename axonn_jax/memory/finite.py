"""Finite numbers: updates that are left out where gradients are not, and states that are looked at before a save."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from axonn_jax.memory.placement import HOST


def update_if(
    finite: jax.Array | None, update: Callable[[Any, Any], Any], state: Any, grads: Any, *, on_cores: bool
) -> Any:
    """The state after an update, to be traced; the state as it was where not `finite` (None: always updated).

    Accelerators choose number by number, in the fused kernel that has both at hand: a branch would make the host wait
    for the gradients. XLA's CPU backend (`on_cores`) fuses each result by itself, would copy moments that another
    still reads, and takes a branch for nothing.
    """
    if finite is None:
        return update(state, grads)
    if on_cores:
        return lax.cond(finite, update, lambda state, grads: state, state, grads)
    return jax.tree.map(lambda new, old: jnp.where(finite, new, old), update(state, grads), state)


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
