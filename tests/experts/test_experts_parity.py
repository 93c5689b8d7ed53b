"""Models with experts on every grid: loss, gradients and norm equal a plain float64 model's."""

from itertools import product

import grids
import pytest

from axonn_jax.grid import GridShape


def all_grids(experts):
    """Every `(data, expert, z, y, x)` of 1, 2, 4 or 8 devices."""
    sizes = [1, 2, 4, 8]
    found = [GridShape(1, d, z, y, x, expert=e) for d, e, z, y, x in product(sizes, repeat=5) if experts % e == 0]
    return [grid for grid in found if grid.devices <= 8]


# Every pair of axes is above one in one of them.
QUICK = ("d1z1y1x1", "d1e2z2y2x1", "d2e2z1y1x2", "d1e4z1y2x1", "d2z2y2x1", "d1e2z1y2x2")
CASES = [
    pytest.param(grid, marks=[] if grids.name(grid) in QUICK else [pytest.mark.slow], id=grids.name(grid))
    for grid in all_grids(4)
]


@pytest.mark.parametrize("axes", CASES)
def test_loss_gradients_and_norm_equal_the_plain_model(axes):
    grids.check_gradients(grids.gradients(grids.MIXTRAL, axes, bucket=3000), grids.reference("mixtral"))


def test_experts_in_all_layers_but_the_first():
    axes = GridShape(1, 1, 2, 2, 1, expert=2)
    grids.check_gradients(grids.gradients(grids.DENSE_FIRST, axes), grids.reference("dense first"))
