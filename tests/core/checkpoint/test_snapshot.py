"""State by name, the same on every grid, and the copies that training goes on beside."""

import grids
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import NamedSharding, P

from axonn_jax.core.checkpoint.naming import flatten, shapes, unflatten
from axonn_jax.core.checkpoint.snapshot import snapshot
from axonn_jax.core.engines.optimizer import decayed
from axonn_jax.core.grid import GridShape


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


PARAMS = {"blocks.0.mlp.kernel": jnp.ones((4, 2)), "norm.scale": jnp.ones(3)}
RATE = optax.cosine_decay_schedule(1e-3, 10)
OPTIMIZERS = {
    "adamw": optax.adamw(RATE, mask=decayed),
    "lion": optax.lion(RATE, mask=decayed),
    "sgd": optax.sgd(RATE, momentum=0.9),
    "nested": optax.chain(optax.apply_if_finite(optax.adam(1e-3), 3), optax.masked(optax.trace(0.9), decayed)),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_there_and_back(kind):
    state = OPTIMIZERS[kind].init(PARAMS)
    named = flatten(PARAMS, state)
    numbered = {name: np.full(value.shape, at) for at, (name, value) in enumerate(sorted(named.items()))}
    params, back = unflatten(numbered, PARAMS, state)
    assert jax.tree.structure(back) == jax.tree.structure(state)
    assert flatten(params, back) == numbered
    assert len(named) == len(PARAMS) + len(jax.tree.leaves(state))


def test_names_are_paths_in_the_optimizers_own_state():
    named = flatten(PARAMS, OPTIMIZERS["adamw"].init(PARAMS))
    assert set(named) == {
        "params.blocks.0.mlp.kernel", "params.norm.scale",
        "optimizer.0.count", "optimizer.2.count",
        "optimizer.0.mu.blocks.0.mlp.kernel", "optimizer.0.mu.norm.scale",
        "optimizer.0.nu.blocks.0.mlp.kernel", "optimizer.0.nu.norm.scale",
    }  # fmt: skip


def test_shapes_outlive_their_arrays():
    value = jnp.ones((4, 2))
    (shape,) = shapes({"a": value}).values()
    value.delete()
    assert (shape.shape, shape.dtype, shape.sharding) == ((4, 2), jnp.float32, value.sharding)
