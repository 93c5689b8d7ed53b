"""A checkpoint of a dense model goes on as one of a mixture of experts."""

from dataclasses import replace

import grids
import numpy as np
import optax
import pytest
from trainers import ids, losses, make_trainer

from axonn_jax import GridShape, UserError

TOLERANCE = grids.CURVE_TOLERANCE


def trainer(axes, shape=grids.MIXTRAL):
    return make_trainer(shape, optax.adamw(3e-3), axes, microbatches=2, clip=0.5)


def steps(trained, count):
    return losses(trained, ids(grids.MIXTRAL.vocab, count, 16, grids.MIXTRAL.seq_len + 1))


def dense(folder, **changes):
    """Saves a dense model of one device."""
    made = trainer(GridShape(), replace(grids.MIXTRAL, experts=0, **changes))
    made.save(folder, 1)
    made.close()


def test_a_dense_model_becomes_one_of_experts_that_computes_the_same(tmp_path):
    """While all experts are equal, it does not matter which ones a router chooses: its weights add up to 1."""
    dense = trainer(GridShape(y=2), replace(grids.MIXTRAL, experts=0))
    steps(dense, 2)
    dense.save(tmp_path, 2)
    batch = ids(grids.MIXTRAL.vocab, 16, grids.MIXTRAL.seq_len + 1, seed=1)
    want = float(dense.engine.mean_loss(batch)[0])
    dense.close()
    for axes in (GridShape(1, 1, 2, 2, expert=2), GridShape(2, 1, expert=2)):
        mixture = trainer(axes)
        mixture.load(tmp_path, weights_only=True)
        np.testing.assert_allclose(float(mixture.engine.mean_loss(batch)[0]), want, rtol=TOLERANCE)
        steps(mixture, 4)
        assert float(mixture.engine.mean_loss(batch)[0]) != want
        mixture.close()


def test_a_dense_model_of_another_width_is_refused(tmp_path):
    dense(tmp_path, ffn=32)
    mixture = trainer(GridShape())
    with pytest.raises(UserError, match=r"model\.ffn = 64 \(32 there\), model\.experts = 4 \(0"):
        mixture.load(tmp_path, weights_only=True)
    mixture.close()


def test_a_dense_model_with_biases_is_refused_and_the_reason_said(tmp_path):
    dense(tmp_path, bias="all")
    mixture = trainer(GridShape(), replace(grids.MIXTRAL, bias="all"))
    reason = r"model\.bias = none or qkv, as experts have no biases; params\.blocks\.0\.mlp\.down\.bias is there"
    with pytest.raises(UserError, match=reason):
        mixture.load(tmp_path, weights_only=True)
    mixture.close()
