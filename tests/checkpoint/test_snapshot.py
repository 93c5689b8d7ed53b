"""Copies that training goes on beside: the same values and layouts, each part once, nothing of the arrays in use."""

import grids
import jax
import jax.numpy as jnp
import numpy as np
from jax import NamedSharding, P

from axonn_jax.checkpoint.snapshot import snapshot
from axonn_jax.grid import GridShape


def pointers(value):
    return [shard.data.unsafe_buffer_pointer() for shard in value.addressable_shards]


def test_the_copies_are_the_same_and_outlive_the_arrays():
    mesh = grids.lay(GridShape(1, 1, 1, 2, 2)).mesh
    made = {
        "split": jax.device_put(jnp.arange(96.0).reshape(8, 12), NamedSharding(mesh, P("x", "y"))),
        "half": jax.device_put(jnp.arange(10, dtype=jnp.bfloat16), NamedSharding(mesh, P("x"))),
        "whole": jax.device_put(jnp.ones(7, jnp.int8), NamedSharding(mesh, P())),
        "count": jax.device_put(jnp.int32(3), NamedSharding(mesh, P())),
    }
    before = {name: np.array(value) for name, value in made.items()}
    copies = dict(made)
    snapshot(copies)
    for name, value in made.items():
        assert not set(pointers(copies[name])) & set(pointers(value))
        assert copies[name].sharding.spec == value.sharding.spec
    assert len(set(pointers(copies["split"]))) == 4
    assert len(set(pointers(copies["half"]))) == 2  # those on several devices are one copy
    assert len(set(pointers(copies["whole"]))) == 1
    at = pointers(made["split"])
    next_step = jax.jit(lambda tree: jax.tree.map(lambda a: a + 1, tree), donate_argnums=0)(made)
    assert pointers(next_step["split"]) == at  # donated as if nobody had looked
    for name, value in before.items():
        np.testing.assert_array_equal(np.asarray(copies[name]), value, strict=True)


def test_of_nothing_there_is_no_copy():
    empty: dict = {}
    snapshot(empty)
    assert empty == {}
