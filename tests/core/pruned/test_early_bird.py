"""Masks and the early-bird search: what numpy keeps, on every grid, and the step that the published rule gives."""

import grids
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import NamedSharding, P
from pruned_runs import DENSITY, batches, largest, model, optimizer
from trainers import make_trainer

import axonn_jax as ax
from axonn_jax import GridShape, PruneConfig
from axonn_jax.core.pruned import masks
from axonn_jax.core.pruned.masks import keep_count, magnitude_masks, random_masks

EVERY, STEPS = 2, 24


def kernels(params):
    """The parameters that are pruned, in numpy."""
    names = [name for name in params if name.startswith("blocks.") and name.endswith(".kernel")]
    return {name: np.asarray(params[name]) for name in names}


def by_the_rule(recorded, threshold):
    """The first look at which a mask differs from each of the four before by at most the threshold, and the mask.

    The threshold is one of what random masks of this density differ in.
    """
    queue, most = [], threshold * 2 * DENSITY * (1 - DENSITY)
    for step, weights in recorded:
        mask = np.concatenate([largest(value).reshape(-1) for _, value in sorted(weights.items())])
        queue = [*queue, mask][-5:]
        if len(queue) == 5 and all(np.mean(mask != other) <= most for other in queue[:4]):
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
            looks.append((step, kernels(params)))
    return looks


@pytest.mark.parametrize(
    ("axes", "threshold"),
    [
        (GridShape(), 0.32),
        (GridShape(1, 2, 1, 2), 0.16),
        *(pytest.param(GridShape(), other, marks=pytest.mark.slow) for other in (0.16, 1.0)),
        *(pytest.param(GridShape(1, 2, 1, 2), other, marks=pytest.mark.slow) for other in (0.32, 1.0)),
    ],
    ids=str,
)
def test_finds_the_step_and_mask_of_the_rule(axes, threshold, recorded):
    want, mask = by_the_rule(recorded, threshold)
    config = ax.PruneConfig(density=DENSITY, method="early_bird", every=EVERY, threshold=threshold)
    trainer = make_trainer(model(), optimizer(), grids.lay(axes), prune=config, zero=1)
    pruned = None
    for step, batch in enumerate(batches(STEPS), start=1):
        trainer.step(batch)
        if any(line.startswith(f"step {step}: pruned 10 kernels to") for line in trainer.pruning.lines()):
            pruned = step
            break
    assert pruned == want
    if axes == GridShape() and pruned is not None:
        params = trainer.engine.params
        names = sorted(kernels(params))
        np.testing.assert_array_equal(
            np.concatenate([np.asarray(params[name]).reshape(-1) != 0 for name in names]), mask
        )
    assert np.isfinite(float(trainer.step(batches(1)[0])["loss"]))


def test_the_time_of_a_look_is_kept_apart_from_that_of_its_step():
    config = ax.PruneConfig(density=DENSITY, method="early_bird", every=EVERY)
    trainer = make_trainer(model(), optimizer(), grids.lay(GridShape()), prune=config)
    for step, batch in enumerate(batches(EVERY), start=1):
        due = trainer.pruning.due(step)
        trainer.step(batch)
        assert (trainer.pruning.took() > 0) == due == (step == EVERY)
    assert trainer.pruning.took() == 0


def test_thresholds_of_the_test_are_between_never_and_at_once(recorded):
    steps = [by_the_rule(recorded, threshold)[0] for threshold in (0.0, 0.16, 0.32, 1.0)]
    assert steps[0] is None
    assert steps[-1] == 5 * EVERY
    assert any(step not in (None, 5 * EVERY) for step in steps)


@pytest.mark.parametrize("scope", ["layer", "global"])
@pytest.mark.parametrize("density", [0.3, 0.05, 0.01])
def test_masks_that_have_nothing_to_do_with_each_other_are_not_alike(density, scope):
    rng, search = np.random.default_rng(0), masks.EarlyBird(PruneConfig().threshold)
    for _ in range(12):
        drawn = {name: rng.normal(size=(96, 64), scale=scale) for name, scale in (("a", 1.0), ("b", 1.0), ("c", 0.1))}
        weights = {name: jnp.asarray(value, jnp.float32) for name, value in drawn.items()}
        assert not search.done(magnitude_masks(weights, density, scope))
    assert search.distance == pytest.approx(1.0, abs=0.15)


def test_masks_that_stay_the_same_are_alike():
    weights = {"a": jnp.asarray(np.random.default_rng(0).normal(size=(64, 64)), jnp.float32)}
    search = masks.EarlyBird(0.0)
    assert [search.done(magnitude_masks(weights, 0.05, "layer")) for _ in range(6)] == [False] * 4 + [True] * 2


def test_differing_entries_of_more_than_32_bits_count():
    shape = (2**17, 2**15)
    counted = masks.counting(lambda: masks._differing([jnp.ones(shape, bool)], [jnp.zeros(shape, bool)]))
    assert np.asarray(counted()).tolist() == [[2**32], [2**32], [0]]


def test_a_trainer_without_a_loop_prunes_when_it_is_time(tmp_path):
    trainer = make_trainer(model(), optimizer(), grids.lay(GridShape()), prune=PruneConfig(density=DENSITY, at_step=2))
    want = make_trainer(model(), optimizer(), grids.lay(GridShape()))
    for batch in batches(2):
        assert all(value.all() for value in kernels(trainer.engine.params).values())
        trainer.step(batch)
        want.step(batch)
    for loads in (False, True):
        if loads:
            trainer.load(want.save(tmp_path, 2))
            trainer.step(batches(1)[0])
        pruned = kernels(trainer.engine.params)
        for name, value in kernels(want.engine.params).items():
            np.testing.assert_array_equal(pruned[name] != 0, largest(value), err_msg=name)


AXES = [GridShape(), GridShape(1, 2, 2, 2), GridShape(1, 1, 1, 4, 2)]


def weights(ties):
    rng = np.random.default_rng(0)
    drawn = {name: rng.normal(size=(24, 16)).astype(np.float32) for name in ("b", "a", "c")}
    return {name: np.round(value * 2) / 2 for name, value in drawn.items()} if ties else drawn


def laid(values, axes):
    mesh = grids.lay(axes).mesh
    return {name: jax.device_put(value, NamedSharding(mesh, P(("x", "z"), "y"))) for name, value in values.items()}


@pytest.mark.parametrize("axes", AXES, ids=grids.name)
@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("density", [0.001, 0.1, 0.5, 0.999, 1.0])
def test_magnitude_by_layer(axes, ties, density):
    given = weights(ties)
    found = magnitude_masks(laid(given, axes), density, "layer")
    for name, value in given.items():
        np.testing.assert_array_equal(np.asarray(found[name]), largest(value, keep_count(value.size, density)))


@pytest.mark.parametrize("axes", AXES, ids=grids.name)
@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("density", [0.001, 0.1, 0.9])
def test_magnitude_of_all_together(axes, ties, density):
    given = weights(ties) | {"z": np.zeros((8, 8), np.float32)}
    names = sorted(given)
    together = np.concatenate([given[name].reshape(-1) for name in names])
    want = largest(together, keep_count(together.size, density))
    found = magnitude_masks(laid(given, axes), density, "global")
    np.testing.assert_array_equal(np.concatenate([np.asarray(found[name]).reshape(-1) for name in names]), want)


@pytest.mark.parametrize("scope", ["layer", "global"])
def test_random_masks_do_not_depend_on_the_grid(scope):
    given = weights(ties=False)
    want = random_masks(laid(given, AXES[0]), 0.3, scope, 5)
    other = random_masks(laid(given, AXES[0]), 0.3, scope, 6)
    for axes in AXES[1:]:
        found = random_masks(laid(given, axes), 0.3, scope, 5)
        for name in given:
            np.testing.assert_array_equal(np.asarray(found[name]), np.asarray(want[name]))
    assert sum(np.asarray(mask).sum() for mask in want.values()) == pytest.approx(0.3 * 3 * 24 * 16, abs=2)
    assert any((np.asarray(other[name]) != np.asarray(want[name])).any() for name in given)
    assert (np.asarray(want["a"]) != np.asarray(want["b"])).any()


def test_counts_of_more_entries_than_32_bits_have():
    masked = masks.counting(lambda: masks.totals([jnp.ones((2**17, 2**15), bool)]))
    assert int(masked()[0]) == 2**32
