"""The published communication model against the values its authors' code gives (regression table of the papers)."""

import pytest
from published_model import MIN_TENSOR, communication, search

from axonn_jax.core.errors import UserError
from axonn_jax.core.grid import GridShape
from axonn_jax.core.models.presets import preset
from axonn_jax.planning.machines.machine_file import load_machine

BATCH = 8192


@pytest.mark.parametrize(
    ("machine", "model", "devices", "best", "seconds"),
    [
        ("perlmutter", "gpt-5b", 512, (1, 512, 1, 1), 0.3368),
        ("perlmutter", "gpt-10b", 1024, (1, 1024, 1, 1), 0.7024),
        ("perlmutter", "gpt-40b", 4096, (1, 4096, 1, 1), 2.7046),
        ("perlmutter", "gpt-80b", 1024, (1, 1024, 1, 1), 5.3104),
        ("frontier", "gpt-5b", 512, (1, 512, 1, 1), 0.6737),
    ],
)
def test_best_grids(machine, model, devices, best, seconds):
    """The published table has two decimals (0.34, 0.70, 2.70, 5.31, 0.67); within 1 % of these."""
    found = search(preset(model), load_machine(machine), devices, BATCH, min_tensor=MIN_TENSOR[model])
    grid = found[0].grid
    assert (grid.data, grid.z, grid.y, grid.x) == best
    assert found[0].total_s == pytest.approx(seconds, rel=1e-3)
    published = {"gpt-5b": 0.34 if machine == "perlmutter" else 0.67, "gpt-10b": 0.70, "gpt-40b": 2.70, "gpt-80b": 5.31}
    assert found[0].total_s == pytest.approx(published[model], abs=0.005)


def test_second_places():
    second = search(preset("gpt-80b"), load_machine("perlmutter"), 1024, BATCH, min_tensor=64)[1]
    assert (second.grid.data, second.grid.z) == (2, 512)
    assert second.total_s == pytest.approx(5.33, rel=0.01)
    second = search(preset("gpt-5b"), load_machine("perlmutter"), 512, BATCH, min_tensor=4)[1]
    assert (second.grid.data, second.grid.z) == (2, 256)


def volume(batch, seq, k, hidden, data, z, row, column, transposed):
    """GiB by axis of one matmul, written out from the published formula."""
    tokens, gib = batch / data / z * seq, 2**30
    gradients = 4 * (data - 1) / data * k * hidden**2 / (column * row * z) * 2 / gib
    depth = 3 / 2 * 2 * (z - 1) / z * k * hidden**2 / (column * row) * 2 / gib
    wide, narrow = (row, column) if transposed else (column, row)
    large = 2 * 2 * (wide - 1) / wide * tokens * k * hidden / narrow * 2 / gib
    small = 2 * (narrow - 1) / narrow * tokens * hidden / wide * 2 / gib
    return {"data": gradients, "z": depth, "y": large if transposed else small, "x": small if transposed else large}


def test_every_axis_is_the_formula():
    shape, grid = preset("gpt-20b"), GridShape(1, 4, 8, 4, 2)
    expected = dict.fromkeys(("x", "y", "z", "data"), 0.0)
    for k, transposed in ((3, False), (1, True), (4, False), (4, True)):
        for axis, size in volume(1024, 2048, k, 7168, 4, 8, 4, 2, transposed).items():
            expected[axis] += 32 * size
    # Perlmutter: inner product 1 of size 2; 2 of size 4; 8; 64.
    rates = {"x": 76, "y": 40, "z": 20, "data": 20}
    found = communication(shape, grid, 1024, load_machine("perlmutter"))
    assert found == pytest.approx({axis: expected[axis] / rates[axis] for axis in rates})


@pytest.mark.parametrize(
    ("model", "flops"), [("gpt-5b", 7.237e17), ("gpt-20b", 2.811e18), ("gpt-80b", 1.056e19), ("gpt-320b", 4.245e19)]
)
def test_published_flops(model, flops):
    """F = 96 B S L H^2 (1 + S/6H + V/16LH), to the digits given."""
    assert f"{preset(model).step_flops(BATCH, recompute=True):.3e}" == f"{flops:.3e}"


def test_a_machine_without_measurements_is_refused():
    with pytest.raises(UserError, match="measured bandwidths"):
        search(preset("gpt-5b"), load_machine("laptop"), 8, 64)


def test_what_leaves_nothing_is_refused():
    with pytest.raises(UserError, match="--devices = 48"):
        search(preset("gpt-5b"), load_machine("perlmutter"), 48, 64)
