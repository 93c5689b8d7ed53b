"""Models with experts that alternate or are scanned, and what a dense model becomes; the axis `expert` without any."""

from dataclasses import replace

import grids
import numpy as np
import optax
import pytest
from jax import P
from trainers import ids, losses, make_trainer

from axonn_jax import GridShape, UserError
from axonn_jax.core.memory.zero import split_over_replicas
from axonn_jax.core.models.stacked import stack_layers
from axonn_jax.core.tensor.params import split_module

GRID = GridShape(1, 1, 2, 2, expert=2)


def test_kinds_of_layers_that_alternate_are_one_loop():
    shape = replace(grids.SPARSE, layers=4)
    scanned = grids.gradients(shape, GRID, scanned=True, activations="full", bucket=3000)
    grids.check_gradients(scanned, grids.one_device(shape))
    model = grids.model_on(shape, grids.lay(GridShape()))
    stack = stack_layers(model, split_module(model))
    assert {name.split(".")[2] for name in stack.layer_names} == {"0", "1"}
    routers = ("blocks.1.mlp.router.kernel", "blocks.3.mlp.router.kernel")
    assert stack.layer_names["blocks.every.1.mlp.router.kernel"] == routers
    odd = grids.model_on(replace(shape, layers=3), grids.lay(GridShape()))
    with pytest.raises(UserError, match=r"model.layers = 3: to scan layers, at least 4, a multiple of 2"):
        stack_layers(odd, split_module(odd))


@pytest.mark.parametrize("scanned", [pytest.param(False, marks=pytest.mark.slow), True])
def test_loads_are_counted_over_the_global_batch(scanned):
    grads, _, _ = grids.gradients(grids.MIXTRAL, GridShape(1, 2, 2, 1, expert=2), scanned=scanned)
    one, _, _ = grids.gradients(grids.MIXTRAL, GridShape(), scanned=scanned)
    for layer in range(grids.MIXTRAL.layers):
        counts = grads[f"blocks.{layer}.mlp.router.bias"]
        np.testing.assert_array_equal(counts, one[f"blocks.{layer}.mlp.router.bias"])
        assert counts.sum() == 2 * 8 * grids.MIXTRAL.seq_len * grids.MIXTRAL.experts_per_token


def test_what_experts_do_not_share_is_split_over_data_alone():
    mesh = grids.lay(GridShape(data=2, expert=2)).mesh
    found = split_over_replicas({"dense": (8, 3), "experts": (2, 6)}, {"dense": P(), "experts": P("expert")}, mesh)
    assert found == {"dense": P(("data", "expert"), None), "experts": P("expert", ("data",))}


def test_a_transformer_without_experts_takes_one():
    with pytest.raises(UserError, match=r"grid\.expert = 2: 1 for a model without experts"):
        grids.GPT.check_grid(GridShape(expert=2))
    assert str(GridShape(data=2, expert=4)) == "pipe 1 x data 2 x expert 4 x z 1 x y 1 x x 1"
    assert "expert" not in str(GridShape(data=2))


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
