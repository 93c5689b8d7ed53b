"""Masks: what numpy's stable sort keeps, the same on every grid, ties and all."""

import grids
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import NamedSharding, P

from axonn_jax.grid import GridShape
from axonn_jax.pruned import masks
from axonn_jax.pruned.masks import kept, magnitude_masks, random_masks

AXES = [GridShape(), GridShape(1, 2, 2, 2), GridShape(1, 1, 1, 4, 2)]


def weights(ties):
    rng = np.random.default_rng(0)
    drawn = {name: rng.normal(size=(24, 16)).astype(np.float32) for name in ("b", "a", "c")}
    return {name: np.round(value * 2) / 2 for name, value in drawn.items()} if ties else drawn


def laid(values, axes):
    mesh = grids.lay(axes).mesh
    return {name: jax.device_put(value, NamedSharding(mesh, P(("x", "z"), "y"))) for name, value in values.items()}


def largest(value, count):
    mask = np.zeros(value.size, bool)
    mask[np.argsort(-np.abs(value.reshape(-1)), kind="stable")[:count]] = True
    return mask.reshape(value.shape)


@pytest.mark.parametrize("axes", AXES, ids=grids.name)
@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("density", [0.001, 0.1, 0.5, 0.999, 1.0])
def test_magnitude_by_layer(axes, ties, density):
    given = weights(ties)
    found = magnitude_masks(laid(given, axes), density, "layer")
    for name, value in given.items():
        np.testing.assert_array_equal(np.asarray(found[name]), largest(value, kept(value.size, density)))


@pytest.mark.parametrize("axes", AXES, ids=grids.name)
@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("density", [0.001, 0.1, 0.9])
def test_magnitude_of_all_together(axes, ties, density):
    given = weights(ties) | {"z": np.zeros((8, 8), np.float32)}
    names = sorted(given)
    together = np.concatenate([given[name].reshape(-1) for name in names])
    want = largest(together, kept(together.size, density))
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
