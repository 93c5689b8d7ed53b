"""The scaling curve beside a plan: what the search says for fewer devices, without another search."""

import pytest

from axonn_jax.core.models.presets import preset
from axonn_jax.planning import report as module
from axonn_jax.planning.machines.machine_file import load_machine
from axonn_jax.planning.report import scaling
from axonn_jax.planning.request import PlanRequest
from axonn_jax.planning.search import search
from axonn_jax.planning.space import SearchSpace

MACHINE = load_machine("summit")


def job_on(devices):
    return PlanRequest(preset("gpt-12b"), MACHINE.shared(devices), 192, "fp16")


@pytest.mark.parametrize("least", [1, 3])
def test_points_are_what_a_search_finds(least):
    kept = ("forward", "backward", "step")
    space, limit = SearchSpace(axes={"pipe": least}, virtual_stages=(1,), reshard_after=kept), 14e9
    found = search(job_on(48), 48, space, limit)
    points = scaling([job_on(24), job_on(12)], found.best, space, limit)
    assert [devices for devices, _ in points] == [48, 24, 12]
    assert points[0][1] == found.best[0].step_s
    for devices, seconds in points[1:]:
        assert seconds == pytest.approx(search(job_on(devices), devices, space, limit).best[0].step_s, rel=0.01)


def test_it_ends_where_nothing_fits():
    space = SearchSpace(axes={"pipe": 1}, offload=(False,))
    found = search(job_on(48), 48, space, 14e9)
    assert len(scaling([job_on(24), job_on(12), job_on(6)], found.best, space, 14e9)) == 2


def test_axes_that_are_fixed_stay(monkeypatch):
    space, seen = SearchSpace(axes={"pipe": 1, "y": 2}), []
    found = search(job_on(48), 48, space, 14e9)
    monkeypatch.setattr(module, "search", lambda *asked: seen.append(asked) or search(*asked))
    scaling([job_on(24)], found.best, space, 14e9)
    ((_, devices, chosen, _),) = seen
    assert devices == 24
    assert {(grid.pipe, grid.y, grid.devices) for grid in chosen.grids} == {(1, 2, 24)}
