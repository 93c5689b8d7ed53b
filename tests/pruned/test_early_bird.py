"""Early-bird search: the step and the mask that the published rule gives, transcribed in numpy on recorded weights."""

import grids
import numpy as np
import pytest
from test_pruned_training import DENSITY, batches, largest, model, optimizer
from trainers import make_trainer

import axonn_jax as ax
from axonn_jax.grid import GridShape
from axonn_jax.pruned.prune import prunable
from axonn_jax.train.engines.pruning import Pruning

EVERY, STEPS = 2, 24


def by_the_rule(recorded, threshold):
    """The first look at which a mask differs from each of the four before by at most the threshold, and the mask."""
    queue = []
    for step, weights in recorded:
        mask = np.concatenate([largest(value).reshape(-1) for _, value in sorted(weights.items())])
        queue = [*queue, mask][-5:]
        if len(queue) == 5 and all(np.mean(mask != other) <= threshold for other in queue[:4]):
            return step, mask
    return None, None


@pytest.fixture(scope="module")
def recorded():
    """Kernels of a dense run at every look."""
    trainer, looks = make_trainer(model(), optimizer(), grids.lay(GridShape())), []
    for step, batch in enumerate(batches(STEPS), start=1):
        trainer.step(batch)
        if step % EVERY == 0:
            params = trainer.engine.params
            looks.append((step, {name: np.asarray(params[name]) for name in prunable(params, "blocks")}))
    return looks


@pytest.mark.parametrize(
    ("axes", "threshold"),
    [
        (GridShape(), 0.12),
        (GridShape(1, 2, 1, 2), 0.06),
        *(pytest.param(GridShape(), other, marks=pytest.mark.slow) for other in (0.06, 1.0)),
        *(pytest.param(GridShape(1, 2, 1, 2), other, marks=pytest.mark.slow) for other in (0.12, 1.0)),
    ],
    ids=str,
)
def test_finds_the_step_and_mask_of_the_rule(axes, threshold, recorded):
    want, mask = by_the_rule(recorded, threshold)
    config = ax.PruneConfig(density=DENSITY, method="early_bird", every=EVERY, threshold=threshold)
    trainer = make_trainer(model(), optimizer(), grids.lay(axes), prune=config, zero=1)
    pruning, losses = Pruning(config, trainer.engine), []
    pruned = None
    for step, batch in enumerate(batches(STEPS), start=1):
        losses.append(float(trainer.step(batch)["loss"]))
        if f"step {step}: pruned 10 kernels to" in pruning.after(step):
            pruned = step
            break
    assert pruned == want
    if axes == GridShape() and pruned is not None:
        params = trainer.engine.params
        names = sorted(prunable(params, "blocks"))
        np.testing.assert_array_equal(
            np.concatenate([np.asarray(params[name]).reshape(-1) != 0 for name in names]), mask
        )
    assert np.isfinite(float(trainer.step(batches(1)[0])["loss"]))


def test_thresholds_of_the_test_are_between_never_and_at_once(recorded):
    steps = [by_the_rule(recorded, threshold)[0] for threshold in (0.0, 0.06, 0.12, 1.0)]
    assert steps[0] is None
    assert steps[-1] == 5 * EVERY
    assert any(step not in (None, 5 * EVERY) for step in steps)
