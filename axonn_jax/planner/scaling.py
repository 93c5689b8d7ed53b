"""Strong scaling around a plan: step times of its best grids with fewer devices, without another search."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from axonn_jax.errors import UserError
from axonn_jax.grid import GridShape
from axonn_jax.planner.cost import CostModel
from axonn_jax.planner.job import Choice, Estimate, Job, Place
from axonn_jax.planner.refine import refine, tasks_to_refine
from axonn_jax.planner.space import AXES, Space, depths, microbatch_sizes, pieces

_KEPT = 8
"""Choices of a number of devices from which those of half as many come."""
_ROUNDS = 2
"""How often good grids are looked for beside those that were good."""
_HORIZON = 1.05
"""Grids that cannot come closer to the best than this are left out."""
_TASKS = 25_000
"""Tasks of pipelines that are simulated for a point."""


def scaling(jobs: Sequence[Job], best: Sequence[Estimate], space: Space, limit: float) -> list[tuple[int, float]]:
    """Devices and seconds a step: of a plan, and of half as many devices for each further job.

    A choice for half the devices is a good one with an axis halved, in the best of what changes with that: size of
    microbatches, activations, how long gathered weights live, place of the optimizer's state. It ends where none fits.
    """
    points = [(best[0].choice.grid.devices, best[0].step_s)]
    kept = [one.choice for one in best[:_KEPT]]
    for job in jobs:
        model = CostModel(job)
        priced = _fewer(model, kept, space, limit)
        if not priced:
            break
        kept = [choice for _, choice in priced[:_KEPT]]
        points.append((kept[0].grid.devices, _simulated(model, priced)))
    return points


def _simulated(model: CostModel, priced: Sequence[tuple[float, Choice]]) -> float:
    """The best step time once pipelines are simulated, as far as there are tasks for that.

    In closed form several virtual stages take too little time: unless they are simulated they do not count.
    """
    best, tasks = float("inf"), _TASKS
    for seconds, choice in priced:
        if seconds >= best:
            break
        if 0 < tasks_to_refine(choice) <= tasks:
            tasks -= tasks_to_refine(choice)
            best = min(best, refine(model, model.estimate(choice)).step_s)
        elif choice.virtual_stages == 1:
            best = seconds
    return min(best, priced[-1][0])


def _fewer(model: CostModel, kept: Sequence[Choice], space: Space, limit: float) -> list[tuple[float, Choice]]:
    """Of each grid and number of virtual stages the fastest choice that fits, and its time in closed form."""
    halved = {half for choice in kept for half in _scaled(choice.grid, space, 1)}
    found: dict[tuple[GridShape, int], tuple[float, Choice]] = {}
    tried: set[GridShape] = set()
    for _ in range(_ROUNDS):
        best = min((one[0] for one in found.values()), default=float("inf"))
        bounds = sorted(((model.bound(grid), grid) for grid in halved if _legal(model.job, grid)), key=_first)
        for bound, grid in bounds:
            if bound > _HORIZON * best:
                break
            tried.add(grid)
            for priced in _choices(model, grid, space, limit):
                key = (grid, priced[1].virtual_stages)
                found[key] = min(found.get(key, priced), priced, key=_first)
                best = min(best, priced[0])
        shown = sorted(found.values(), key=_first)[:_KEPT]
        halved = {moved for _, one in shown for moved in _moved(one.grid, space)} - tried
    return sorted(found.values(), key=_first)


def _scaled(grid: GridShape, space: Space, up: int) -> Iterator[GridShape]:
    """Grids with one axis that is not fixed halved, or doubled `up` - 1 times."""
    for axis in AXES:
        size = getattr(grid, axis)
        if axis not in space.axes and (up > 1 or size % 2 == 0):
            yield replace(grid, **{axis: size * up if up > 1 else size // 2})


def _moved(grid: GridShape, space: Space) -> Iterator[GridShape]:
    """Grids with a factor of two on another axis."""
    for half in _scaled(grid, space, 1):
        yield from _scaled(half, space, 2)


def _first(priced: tuple[float, object]) -> float:
    return priced[0]


def _legal(job: Job, grid: GridShape) -> bool:
    try:
        grid.check_model(job.shape, sequence_parallel=job.sequence_parallel)
        job.inner(grid, "full")
    except UserError:
        return False
    return job.batch % grid.batch_shards == 0 and grid.pipe <= pieces(job)


def _choices(model: CostModel, grid: GridShape, space: Space, limit: float) -> Iterator[tuple[float, Choice]]:
    """What fits on a grid."""
    job = model.job
    each = job.batch // grid.batch_shards
    stages = [many for many in space.virtual_stages if grid.pipe * many <= pieces(job)] if grid.pipe > 1 else [1]
    stages = [many for many in stages if many == 1 or job.policy != "1f1b"]
    places = [(offload, zero) for offload in space.offload for zero in space.zero]
    for size in microbatch_sizes(job, grid, space):
        for activations in space.activations:
            for many in stages:
                base = Choice(grid, each // size, activations, many)
                for gather in space.gathers(base):
                    for kind in depths(job, replace(base, gather=gather)):
                        if kind.in_flight <= grid.pipe:
                            yield from _placed(model, kind, places, limit)


def _placed(model: CostModel, kind: Choice, places: list[Place], limit: float) -> Iterator[tuple[float, Choice]]:
    seconds = None
    nodes = min(model.job.machine.node.devices, kind.grid.devices)
    for place, (device, host) in zip(places, model.footprint.totals(kind, places), strict=True):
        if device <= limit and host * nodes <= model.job.machine.host.memory_bytes:
            seconds = model.pipeline_s(kind) if seconds is None else seconds
            yield seconds + model.once_s(kind.grid, place), replace(kind, offload=place[0], zero=place[1])
