"""A checkpoint of a model with experts goes on, on any other grid."""

import functools
from dataclasses import replace

import grids
import numpy as np
import optax
import pytest
from flax import nnx
from trainers import make_trainer

import axonn_jax as ax
from axonn_jax import GridShape, UserError

BEFORE, AFTER = 3, 3
TOLERANCE = 2e-6  # sums in another order, as on any grid
SAVED_ON = GridShape(1, 1, 1, 2, expert=4)


def trainer(axes, shape=grids.MIXTRAL):
    return make_trainer(
        lambda: ax.models.Transformer(shape, rngs=nnx.Rngs(0)),
        optax.adamw(3e-3),
        grids.lay(axes),
        microbatches=2,
        clip=0.5,
    )


def steps(trained, first, count):
    given = np.random.default_rng(0).integers(0, grids.MIXTRAL.vocab, (4, 16, grids.MIXTRAL.seq_len + 1))
    return [float(trained.step(given[step % 4])["loss"]) for step in range(first, first + count)]


@functools.cache
def uninterrupted(folder):
    trained = trainer(SAVED_ON)
    steps(trained, 0, BEFORE)
    trained.save(folder, BEFORE)
    losses = steps(trained, BEFORE, AFTER)
    trained.close()
    return losses


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("saved")


@pytest.mark.parametrize("axes", [GridShape(1, 2, 2, 2), GridShape(2, 1, expert=2)], ids=str)
def test_it_goes_on_as_if_it_had_not_been_interrupted(folder, axes):
    want = uninterrupted(folder)
    trained = trainer(axes)
    trained.load(folder / f"step_{BEFORE:08d}")
    np.testing.assert_allclose(steps(trained, BEFORE, AFTER), want, rtol=TOLERANCE)
    trained.close()


def test_a_dense_model_becomes_one_of_experts_that_computes_the_same(tmp_path):
    """While all experts are equal, it does not matter which ones a router chooses: its weights add up to 1."""
    dense = trainer(GridShape(y=2), replace(grids.MIXTRAL, experts=0))
    steps(dense, 0, 2)
    dense.save(tmp_path, 2)
    batch = np.random.default_rng(1).integers(0, grids.MIXTRAL.vocab, (16, grids.MIXTRAL.seq_len + 1))
    want = float(dense.engine.mean_loss(batch)[0])
    dense.close()
    for axes in (GridShape(1, 1, 2, 2, expert=2), GridShape(2, 1, expert=2)):
        mixture = trainer(axes)
        mixture.load(tmp_path, weights_only=True)
        np.testing.assert_allclose(float(mixture.engine.mean_loss(batch)[0]), want, rtol=TOLERANCE)
        steps(mixture, 0, 4)
        assert float(mixture.engine.mean_loss(batch)[0]) != want
        mixture.close()


def test_a_dense_model_of_another_width_is_refused(tmp_path):
    dense = trainer(GridShape(), replace(grids.MIXTRAL, experts=0, ffn=32))
    dense.save(tmp_path, 1)
    dense.close()
    mixture = trainer(GridShape())
    with pytest.raises(UserError, match=r"model\.ffn = 64 \(32 there\), model\.experts = 4 \(0"):
        mixture.load(tmp_path, weights_only=True)
    mixture.close()


def test_a_dense_model_with_biases_is_refused_and_the_reason_said(tmp_path):
    dense = trainer(GridShape(), replace(grids.MIXTRAL, experts=0, bias="all"))
    dense.save(tmp_path, 1)
    dense.close()
    mixture = trainer(GridShape(), replace(grids.MIXTRAL, bias="all"))
    reason = r"model\.bias = none or qkv, as experts have no biases; params\.blocks\.0\.mlp\.down\.bias is there"
    with pytest.raises(UserError, match=reason):
        mixture.load(tmp_path, weights_only=True)
    mixture.close()
