"""Models with experts that alternate or are scanned, on grids and pipelines: gradients, loads and one curve."""

from dataclasses import replace

import grids
import numpy as np
import optax
import pytest
from flax import nnx
from trainers import make_trainer

import axonn_jax as ax
from axonn_jax import GridShape, UserError
from axonn_jax.models.stacked import stack_layers
from axonn_jax.tensor.params import split_module

GRID = GridShape(1, 1, 2, 2, expert=2)
CURVE_TOLERANCE = 2e-6
STEPS = 20


def test_kinds_of_layers_that_alternate_are_one_loop():
    shape = replace(grids.SPARSE, layers=4)
    scanned = grids.gradients(shape, GRID, scanned=True, activations="full", bucket=3000)
    grids.check_gradients(scanned, grids.one_device(shape))
    model = grids.model_on(shape, grids.lay(GridShape()))
    stack = stack_layers(model, split_module(model))
    assert {name.split(".")[2] for name in stack.own} == {"0", "1"}
    assert stack.own["blocks.every.1.mlp.router.kernel"] == ("blocks.1.mlp.router.kernel", "blocks.3.mlp.router.kernel")
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


def curve(axes, **options):
    shape = replace(grids.MIXTRAL, layers=3)
    made = make_trainer(
        lambda: ax.models.Transformer(shape, rngs=nnx.Rngs(0), moe=ax.MoeConfig(balance_weight=0.05)),
        optax.adamw(3e-3),
        grids.lay(axes),
        microbatches=4,
        clip=0.5,
        **options,
    )
    given = np.random.default_rng(0).integers(0, shape.vocab, (4, 16, shape.seq_len + 1))
    metrics = [made.step(given[step % 4]) for step in range(STEPS)]
    made.close()
    return [[float(m[name]) for name in ("loss", "grad_norm")] for m in metrics]


@pytest.mark.slow
def test_curves_of_pipelines_and_offloaded_states_coincide():
    want = curve(GridShape())
    for axes, options in (
        (GridShape(2, 1, expert=2), {}),
        (GridShape(2, 1, 1, 2, expert=2), {"activations": "full"}),
        (GridShape(1, 2, 1, 2, expert=2), {"zero": 1, "offload": "optimizer"}),
    ):
        np.testing.assert_allclose(curve(axes, **options), want, rtol=CURVE_TOLERANCE, err_msg=f"{axes} {options}")
    assert want[-1][0] < want[0][0] - 0.05
