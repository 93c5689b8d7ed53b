"""`axonn_jax.offload` in a script of one's own: optax's updates, state in host memory, shardings kept."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import axonn_jax as ax


def tree():
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("a", "b"))
    keys = jax.random.split(jax.random.key(0), 3)
    return {
        "dense": [
            jax.device_put(jax.random.normal(keys[0], (8, 6)), NamedSharding(mesh, P("a", "b"))),
            jax.device_put(jax.random.normal(keys[1], (6,)), NamedSharding(mesh, P("b"))),
        ],
        "head": jax.device_put(jax.random.normal(keys[2], (6, 4)), NamedSharding(mesh, P(None, "a"))),
    }


def by_dims(params):
    return jax.tree.map(lambda p: p.ndim >= 2, params)


ADAMW = optax.adamw(1e-2, weight_decay=0.1, mask=by_dims)


@pytest.mark.parametrize(("plain", "bucket"), [(ADAMW, 1), (ADAMW, 30), (ADAMW, 1000), (optax.lamb(1e-2), 30)])
def test_it_gives_optax_updates_and_keeps_moments_on_the_host(plain, bucket):
    params, mine = tree(), tree()
    wrapped = ax.offload(plain, bucket=bucket)
    state, here = plain.init(params), wrapped.init(mine)
    for step in range(3):
        grads = jax.tree.map(lambda p, step=step: jnp.sin(p + step), params)
        with jax.numpy_dtype_promotion("standard"):
            want, state = jax.jit(plain.update)(grads, state, params)
        got, here = wrapped.update(grads, here, mine)
        params, mine = optax.apply_updates(params, want), optax.apply_updates(mine, got)
    for (path, a), b in zip(jax.tree.leaves_with_path(mine), jax.tree.leaves(params), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, err_msg=str(path))  # a few roundings
        assert a.sharding.is_equivalent_to(b.sharding, a.ndim)
    moments = [leaf for leaf in jax.tree.leaves(here) if leaf.ndim]
    assert {leaf.sharding.memory_kind for leaf in moments} == {"pinned_host"}
    assert sum(leaf.size for leaf in moments) == 2 * sum(leaf.size for leaf in jax.tree.leaves(params))


def test_what_it_cannot_do_is_said():
    with pytest.raises(ax.UserError, match="clip_by_global_norm"):
        ax.offload(optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3)))
    wrapped = ax.offload(optax.sgd(0.1, momentum=0.9))
    with pytest.raises(ax.UserError, match=r"inside jax.jit.*outside of it"):
        jax.jit(wrapped.init)(tree())
