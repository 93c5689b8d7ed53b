"""Parts of one row, for which jax writes some of its own functions otherwise."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import axonn_jax as ax
from axonn_jax.any_flax.dependence.one_row import alike

ROWS, WIDTH = 8, 6
TOKEN = jnp.ones((1, 1, WIDTH))


def picked(x, labels):
    return jnp.take_along_axis(x, labels[..., None], -1).mean()


LOSSES = {
    "label's entry": (picked, True),
    "cross-entropy": (lambda x, y: optax.softmax_cross_entropy_with_integer_labels(x, y).mean(), True),
    "scan": (lambda x, y: jax.lax.scan(lambda c, e: (c + e, picked(c, y)), x, jnp.ones(2))[1].sum(), True),
    "einsum": (lambda x, y: jnp.einsum("bij,bkj->bik", x, x).mean(), True),
    "product of heads": (lambda x, y: jnp.einsum("btd,ndh->btnh", x, jnp.ones((1, WIDTH, 3))).mean(), True),
    "token in front": (lambda x, y: jnp.concatenate([jnp.broadcast_to(TOKEN, (len(x), 1, WIDTH)), x], 1).mean(), True),
    "mean by hand": (lambda x, y: jnp.tanh(x).sum() / len(x), True),
    "squeezed": (lambda x, y: jnp.squeeze(jnp.tanh(x)).mean(), False),
    "branch": (lambda x, y: (jnp.tanh(x) if len(x) > 1 else x).mean(), False),
    "other operand": (lambda x, y: (jnp.tanh(x) + (x if len(x) > 1 else jnp.tanh(x))).mean(), False),
    "other function": (lambda x, y: (jnp.sin if len(x) > 1 else jnp.cos)(x).mean(), False),
    "other product": (lambda x, y: jnp.einsum("bij,bkj->bik" if len(x) > 1 else "bij,bjk->bik", x, x).mean(), False),
    "other number": (lambda x, y: (x * (1.0 if len(x) > 1 else 3.0)).mean(), False),
    "other axis": (lambda x, y: jnp.tanh(x).sum(1 if len(x) > 1 else 2).mean(), False),
}


@pytest.mark.parametrize("name", LOSSES)
def test_one_row_is_the_program_of_two(name):
    loss, expected = LOSSES[name]

    def traced(rows):
        shape = jax.ShapeDtypeStruct
        return jax.make_jaxpr(loss)(shape((rows, WIDTH, WIDTH), np.float32), shape((rows, WIDTH), np.int32))

    assert alike(traced(2), traced(1), (2, 1)) is expected


@pytest.mark.parametrize("microbatches", [4, 8])
def test_one_row_a_microbatch_of_a_replica(microbatches, capfd):
    """The usual loss of a language model goes in parts of one row, without a line, and in a pipeline."""
    ids = np.random.default_rng(0).integers(0, 8, (ROWS, 4)).astype(np.int32)

    def loss(model, ids):
        return optax.softmax_cross_entropy_with_integer_labels(model(ids), ids).mean()

    found = []
    for axes in ({}, {"pipe": 2, "data": ROWS // microbatches}):
        model = nnx.Sequential(nnx.Embed(8, 8, rngs=nnx.Rngs(0)), nnx.Linear(8, 8, rngs=nnx.Rngs(1)))
        trainer = ax.Trainer(model, optax.sgd(0.1), ax.init(**axes), loss=loss, microbatches=microbatches)
        found.append([float(trainer.step(ids)["loss"]) for _ in range(2)])
        trainer.close()
    np.testing.assert_allclose(*found, rtol=1e-6)
    assert "rows:" not in capfd.readouterr().err
