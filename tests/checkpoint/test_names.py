"""State by name: the same names on every grid, and back to the same trees."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from axonn_jax.checkpoint.naming import flatten, shapes, unflatten
from axonn_jax.train.optimizer import decayed

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
