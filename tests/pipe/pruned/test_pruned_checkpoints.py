"""Checkpoints of pruned runs: dense under the usual names, resumed on any grid, read by runs that prune nothing."""

import grids
import jax
import numpy as np
import pytest
import trainers
from pruned_runs import DENSITY, PRUNE, batches, curve, largest, model, optimizer
from trainers import make_trainer, params, same

import axonn_jax as ax
from axonn_jax.core.checkpoint.manifest import read
from axonn_jax.core.grid import GridShape
from axonn_jax.core.pruned.prune import prunable
from axonn_jax.core.tensor.params import split_module


def made(axes, prune=PRUNE, **options):
    return make_trainer(model(), optimizer(), grids.lay(axes), prune=prune, microbatches=2, **options)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A run's directory with the checkpoint of step 3, saved on a grid with ZeRO; and the curve of one device."""
    trainer, folder = made(GridShape(1, 2, 1, 2), zero=1), tmp_path_factory.mktemp("run")
    for batch in batches(3):
        trainer.step(batch)
    path = trainer.save(folder, 3)
    kept = params(trainer)
    return path, kept, curve(made(GridShape()), 6)[0]


@pytest.mark.parametrize(
    ("axes", "options"),
    [
        pytest.param(GridShape(1, 2, 1, 2), {"zero": 1}, marks=pytest.mark.slow),
        pytest.param(GridShape(1, 1, 2, 1, 2), {}, marks=pytest.mark.slow),
        pytest.param(GridShape(), {"scan_layers": "yes"}, marks=pytest.mark.slow),
        pytest.param(GridShape(1, 2), {"offload": "optimizer"}, marks=pytest.mark.slow),
        (GridShape(2, 2), {"zero": 1}),
    ],
)
def test_goes_on_on_other_grids(axes, options, saved):
    path, kept, want = saved
    trainer = made(axes, ax.PruneConfig(density=DENSITY, method="random"), **options)  # the checkpoint's masks count
    assert trainer.load(path) == 3
    same(trainer.engine.params, kept)
    np.testing.assert_allclose(trainers.curve(trainer, batches(6)[3:]), want[3:], rtol=grids.CURVE_TOLERANCE)


def test_is_dense_under_the_usual_names(saved):
    path, kept, _ = saved
    dense = make_trainer(model(), optimizer(), grids.lay(GridShape()), microbatches=2)
    dense.load(path)  # masks are passed by
    same(dense.engine.params, kept)
    arrays = read(path).arrays
    assert {name for name in arrays if not name.startswith("masks.")} == set(dense.engine.state())
    masks = [name for name in arrays if name.startswith("masks.")]
    assert [name.removeprefix("masks.") for name in sorted(masks)] == sorted(prunable(dense.engine.parts, "blocks"))


def test_a_dense_run_is_pruned_where_it_goes_on(tmp_path):
    trainer = make_trainer(model(), optimizer(), grids.lay(GridShape()), microbatches=2)
    for batch in batches(2):
        trainer.step(batch)
    path, weights = trainer.save(tmp_path, 2), trainer.engine.params
    for only in (False, True):
        pruned = made(GridShape(1, 1, 2, 2))
        pruned.load(path, weights_only=only)
        for name, value in pruned.engine.params.items():
            want = np.asarray(weights[name])
            want = want * largest(want) if name in prunable(trainer.engine.parts, "blocks") else want
            np.testing.assert_array_equal(np.asarray(value), want)
        assert np.isfinite(float(pruned.step(batches(1)[0])["loss"]))


def test_the_model_that_was_trained(saved):
    path, kept, _ = saved
    trainer = made(GridShape(1, 1, 2, 2))
    trainer.load(path)
    assert isinstance(trainer.model, ax.models.Transformer)
    same(jax.device_get(split_module(trainer.model).params), kept)
