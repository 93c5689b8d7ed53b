"""Strong scaling around a plan: step times of its best grids with fewer devices, searched among grids like them."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from axonn_jax.errors import UserError
from axonn_jax.grid import GridShape
from axonn_jax.planner.job import Estimate, Job
from axonn_jax.planner.search import search
from axonn_jax.planner.space import AXES, Space

_KEPT = 5
"""Grids of a number of devices from which those of half as many come."""


def scaling(jobs: Sequence[Job], best: Sequence[Estimate], space: Space, limit: float) -> list[tuple[int, float]]:
    """Devices and seconds a step: of a plan, and of half as many devices for each further job.

    Searched are the best grids with an axis halved, and these with a factor of two on another axis. It ends where none
    of them fits.
    """
    points = [(best[0].choice.grid.devices, best[0].step_s)]
    for job in jobs:
        halves = set(_halved((one.choice.grid for one in best[:_KEPT]), space))
        grids = halves | set(_doubled(_halved(halves, space), space))
        devices = points[-1][0] // 2
        try:
            best = search(job, devices, replace(space, grids=sorted(grids, key=str)), limit).best
        except UserError:
            break
        points.append((devices, best[0].step_s))
    return points


def _halved(grids: Iterable[GridShape], space: Space) -> Iterator[GridShape]:
    """Grids with one axis halved that is not fixed."""
    for grid in grids:
        for axis in AXES:
            if axis not in space.axes and getattr(grid, axis) % 2 == 0:
                yield replace(grid, **{axis: getattr(grid, axis) // 2})


def _doubled(grids: Iterable[GridShape], space: Space) -> Iterator[GridShape]:
    """Grids with one axis doubled that is not fixed."""
    for grid in grids:
        for axis in AXES:
            if axis not in space.axes:
                yield replace(grid, **{axis: getattr(grid, axis) * 2})
