"""The search: every legal grid with every choice that goes with it; what fits, what does not and why."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from math import inf

from axonn_jax.errors import UserError
from axonn_jax.grid import GridShape
from axonn_jax.planner.cost import CostModel
from axonn_jax.planner.job import Choice, Estimate, Job, Memory, Place
from axonn_jax.planner.priced import Priced, front, host_fits, places_of, price
from axonn_jax.planner.ranking import ENOUGH, ranked
from axonn_jax.planner.refine import Prices
from axonn_jax.planner.space import Space, depths, legal_grids, microbatch_sizes

_REACH = 1.05
"""Grids that cannot come closer to the best than this are left out once there are enough others."""


@dataclass(frozen=True)
class Rejected:
    """The least of a grid that does not fit, or a rule that leaves grids out."""

    grid: str
    why: str


@dataclass(frozen=True)
class Plan:
    """What the search found."""

    best: list[Estimate]
    """Of what fits, the fastest of each grid, fastest first."""
    pareto: list[Estimate]
    """What fits and is beaten by nothing in both time and memory, fastest first."""
    rejected: list[Rejected]
    """Grids that do not fit, those that come closest first, and the rules that left others out."""
    examined: int
    """Choices that were priced."""
    prices: Prices
    """What prices them."""


def search(job: Job, devices: int, space: Space, limit: float) -> Plan:
    """Prices every legal choice for so many devices; `limit` is the memory a device may use, in bytes.

    Grids are tried in the order of what none of their choices goes below, until no other can come near the best.

    Raises:
        UserError: no grid is legal for model, batch and devices, or none fits the memory.
    """
    model, rules = CostModel(job), Counter[str]()
    # By their bound, at first without reductions: those take long to price, and what comes to the front needs them.
    grids: list[tuple[float, int, GridShape]] = []
    rough = set[GridShape]()
    for grid in legal_grids(job, devices, space, rules):
        if microbatch_sizes(job, grid, space):
            grids.append((model.bound(grid, reductions=False), len(grids), grid))
            rough.add(grid)
        else:
            rules["the batch leaves no microbatches for them"] += 1
    misses: list[tuple[Memory, Choice]] = []
    fits: list[Priced] = []
    best, examined, tried = inf, 0, 0
    heapify(grids)
    while grids:
        bound, place, grid = heappop(grids)
        if bound > _REACH * best and tried >= ENOUGH:
            rules[f"they take at least {_REACH} times as long as the best"] += len(grids) + 1
            break
        if grid in rough:
            rough.remove(grid)
            heappush(grids, (model.bound(grid), place, grid))
            continue
        memory, leanest = _leanest(model, grid, space)
        if memory.total > limit or not host_fits(job, memory.host, grid):
            misses.append((memory, leanest))
            continue
        tried += 1
        # One stage a rank first: several make a good pipeline better, not a bad grid good.
        priced = list(price(model, grid, space, limit, space.virtual_stages[:1]))
        if grid.pipe > 1 and min((one.step_s for one in priced), default=0.0) < 1.5 * best:
            priced += price(model, grid, space, limit, space.virtual_stages[1:])
        examined += len(priced)
        # Of one stage a rank and of several: what the closed form says of these is compared once they are simulated.
        for virtual in sorted({one.base.virtual_stages for one in priced}):
            fits.extend(front([one for one in priced if one.base.virtual_stages == virtual]))
        best = min([best, *(one.step_s for one in priced)])
    misses.sort(key=lambda miss: miss[0].total)
    rejected = [Rejected(str(choice.grid), _too_large(job, memory, choice, limit)) for memory, choice in misses]
    rejected += [Rejected(f"{count} grid{'s' * (count != 1)}", why) for why, count in rules.most_common()]
    if not fits:
        raise _nothing(devices, rejected)
    fits.sort(key=lambda one: one.order)
    prices = Prices(model)
    found_best = ranked(prices, fits, space, limit)
    by_grid: dict[GridShape, Estimate] = {}
    for estimate in found_best:
        by_grid.setdefault(estimate.choice.grid, estimate)
    return Plan(list(by_grid.values()), _pareto(found_best), rejected, examined, prices)


def _pareto(found: Sequence[Estimate]) -> list[Estimate]:
    """What nothing beats in both time and memory, of estimates in the order of their times."""
    merged: list[Estimate] = []
    for estimate in found:
        if not merged or estimate.memory.total < merged[-1].memory.total:
            merged.append(estimate)
    return merged


def _leanest(model: CostModel, grid: GridShape, space: Space) -> tuple[Memory, Choice]:
    """The choice that needs the least device memory, of those that the host has room for if there are such.

    The smallest microbatch is not always the leanest: several of them share gathered weights, which then stay.
    """
    order = ("offload", "full", "save_collectives", "dots", "none")
    each, virtual = model.job.batch // grid.batch_shards, min(space.virtual_stages) if grid.pipe > 1 else 1
    sizes = microbatch_sizes(model.job, grid, space)
    found: list[tuple[bool, float, int, Choice, Place]] = []
    places = places_of(grid, space)
    for size in {*sizes[:1], *sizes[-1:]}:
        for activations in sorted(space.activations, key=order.index)[:2]:
            base = Choice(grid, each // size, activations, virtual)
            base = next(depths(model.job, replace(base, gather=space.gathers(base)[0])))
            for place, (device, host) in zip(places, model.footprint.totals(base, places), strict=True):
                found.append((not host_fits(model.job, host, grid), device, len(found), base, place))
    *_, base, (offload, zero) = min(found)
    leanest = replace(base, offload=offload, zero=zero)
    return model.footprint.memory(leanest), leanest


def _too_large(job: Job, memory: Memory, choice: Choice, limit: float) -> str:
    if memory.total <= limit:
        need, have = memory.host * min(job.machine.node.devices, choice.grid.devices), job.machine.host.memory_bytes
        return f"needs {need / 1e9:,.0f} GB of host memory a node, of which there are {have / 1e9:,.0f}"
    kinds = {name: float(getattr(memory, name)) for name in MEMORY_KINDS}
    most = max(kinds, key=lambda name: kinds[name])
    return (
        f"needs at least {memory.total / 1e9:,.1f} GB a device, {kinds[most] / 1e9:,.1f} of it {most}; "
        f"{limit / 1e9:,.1f} GB are there"
    )


MEMORY_KINDS = ("weights", "gradients", "optimizer", "activations", "gathered", "buffers")
"""What a device's memory goes to."""


def _nothing(devices: int, rejected: list[Rejected]) -> UserError:
    if not rejected:
        return UserError("--devices", devices, "a multiple of the fixed axes' product")
    first = rejected[0]
    return UserError(
        "--devices", devices, f"a number for which a grid fits model, batch and memory; {first.grid}: {first.why}"
    )
