"""Search over every legal grid with its candidates: the best ones, and the reasons for rejected ones."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from heapq import heapify, heappop, heappush
from itertools import chain
from math import inf
from typing import NamedTuple

from axonn_jax.core.errors import UserError
from axonn_jax.core.grid import GridShape
from axonn_jax.planning.cost_model.model import CostModel
from axonn_jax.planning.request import Candidate, Estimate, MemoryUse, PlanRequest, StatePlacement
from axonn_jax.planning.simulate.candidate import Prices
from axonn_jax.planning.space import (
    Priced,
    SearchSpace,
    depths,
    front,
    has_room,
    host_fits,
    legal_grids,
    microbatch_sizes,
    placements_of,
    price,
    smaller,
    sort_key,
)

_REACH = 1.05
"""Grids that cannot come closer to the best than this are left out once there are enough others."""


@dataclass(frozen=True)
class Rejected:
    """The least of a grid that does not fit, or a rule that leaves grids out."""

    grid: str
    why: str


@dataclass(frozen=True)
class SearchResult:
    """Result of a search."""

    best: list[Estimate]
    """Fastest candidate of each grid that fits, fastest first."""
    pareto: list[Estimate]
    """Candidates that fit and are beaten by none in both time and memory, fastest first."""
    rejected: list[Rejected]
    """Grids that do not fit, those that come closest first, and the rules that left others out."""
    examined: int
    """Choices that were priced."""
    prices: Prices
    """Prices of the candidates."""

    def in_order(self) -> list[Estimate]:
        """Return `best`, the simplest one of those as good as the fastest in front."""
        first = min(self.best[: self.alike], key=lambda estimate: _parts(estimate.candidate))
        return [first, *(estimate for estimate in self.best if estimate is not first)]

    @property
    def alike(self) -> int:
        """Number of the fastest whose times differ by less than `TIE`."""
        return sum(estimate.step_s < self.best[0].step_s * (1 + TIE) for estimate in self.best)


def _parts(candidate: Candidate) -> tuple[int, ...]:
    """Return a sort key that puts simpler candidates first: fewer axes, no pipeline, no recomputation, less traffic."""
    grid = candidate.grid
    axes = sum(size > 1 for size in asdict(grid).values())
    return axes, grid.pipe, candidate.activations != "none", grid.y * grid.x, grid.z


def search(request: PlanRequest, devices: int, space: SearchSpace, limit: float) -> SearchResult:
    """Price every legal candidate for so many devices; `limit` is the memory a device may use, in bytes.

    Grids are tried in the order of their lower bounds, until no other can come near the best.

    Raises:
        UserError: no grid is legal for model, batch and devices, or none fits the memory.
    """
    model, rules = CostModel(request), Counter[str]()
    # The heap is ordered by a rough bound first: pricing the reductions is slow, and only grids that reach the front
    # of the heap need them.
    grids: list[tuple[float, int, GridShape]] = []
    rough = set[GridShape]()
    for grid in legal_grids(request, devices, space, rules):
        if microbatch_sizes(request, grid, space):
            grids.append((model.bound(grid, reductions=False), len(grids), grid))
            rough.add(grid)
        else:
            rules["the batch leaves no microbatches for them"] += 1
    misses: list[tuple[MemoryUse, Candidate]] = []
    fits: list[Priced] = []
    best, examined, tried = inf, 0, 0
    heapify(grids)
    while grids:
        bound, serial, grid = heappop(grids)
        if bound > _REACH * best and tried >= ENOUGH:
            rules[f"they take at least {_REACH} times as long as the best"] += len(grids) + 1
            break
        if grid in rough:
            rough.remove(grid)
            heappush(grids, (model.bound(grid), serial, grid))
            continue
        memory, leanest = _leanest(model, grid, space)
        if memory.total > limit or not host_fits(request, memory.host, grid):
            misses.append((memory, leanest))
            continue
        tried += 1
        # Price one stage per rank first: virtual stages improve a good pipeline but do not rescue a bad grid.
        priced = list(price(model, grid, space, limit, space.virtual_stages[:1]))
        if grid.pipe > 1 and min((fit.step_s for fit in priced), default=0.0) < 1.5 * best:
            priced += price(model, grid, space, limit, space.virtual_stages[1:])
        examined += len(priced)
        # Keep a separate front per number of virtual stages, because the closed form does not compare them fairly;
        # the simulation does.
        for virtual in sorted({fit.base.virtual_stages for fit in priced}):
            fits.extend(front(fit for fit in priced if fit.base.virtual_stages == virtual))
        best = min([best, *(fit.step_s for fit in priced)])
    misses.sort(key=lambda miss: miss[0].total)
    rejected = [
        Rejected(str(candidate.grid), _too_large(request, memory, candidate, limit)) for memory, candidate in misses
    ]
    rejected += [Rejected(f"{count} grid{'s' * (count != 1)}", why) for why, count in rules.most_common()]
    if not fits:
        raise _nothing(devices, rejected)
    fits.sort(key=lambda fit: sort_key(fit.step_s, fit.base, fit.placement))
    prices = Prices(model)
    estimates = ranked(prices, fits, space, limit)
    by_grid: dict[GridShape, Estimate] = {}
    for estimate in estimates:
        by_grid.setdefault(estimate.candidate.grid, estimate)
    pareto = smaller(estimates, lambda estimate: estimate.memory.total)
    return SearchResult(list(by_grid.values()), pareto, rejected, examined, prices)


def _leanest(model: CostModel, grid: GridShape, space: SearchSpace) -> tuple[MemoryUse, Candidate]:
    """Return the candidate with the least device memory, preferring candidates that fit in host memory.

    The smallest microbatch is not always the leanest: several microbatches share gathered weights, which then stay
    resident.
    """
    order = ("offload", "full", "save_collectives", "dots", "none")
    share, virtual = model.request.batch // grid.batch_shards, min(space.virtual_stages) if grid.pipe > 1 else 1
    sizes = microbatch_sizes(model.request, grid, space)
    options: list[tuple[bool, float, int, Candidate, StatePlacement]] = []
    placements = placements_of(grid, space)
    for size in {*sizes[:1], *sizes[-1:]}:
        for activations in sorted(space.activations, key=order.index)[:2]:
            base = Candidate(grid, share // size, activations, virtual)
            base = next(depths(model.request, space.reshards(base)[0]))
            for placement, (device, host) in zip(placements, model.footprint.totals(base, placements), strict=True):
                options.append((not host_fits(model.request, host, grid), device, len(options), base, placement))
    *_, base, (offload, zero) = min(options)
    leanest = replace(base, offload=offload, zero=zero)
    return model.footprint.memory(leanest), leanest


def _too_large(request: PlanRequest, memory: MemoryUse, candidate: Candidate, limit: float) -> str:
    if memory.total <= limit:
        devices = min(request.machine.node.devices, candidate.grid.devices)
        need, have = memory.host * devices, request.machine.host.memory_bytes
        return f"needs {need / 1e9:,.0f} GB of host memory a node, of which there are {have / 1e9:,.0f}"
    kinds = {name: float(getattr(memory, name)) for name in MEMORY_KINDS}
    most = max(kinds, key=lambda name: kinds[name])
    return (
        f"needs at least {memory.total / 1e9:,.1f} GB a device, {kinds[most] / 1e9:,.1f} of it {most}; "
        f"{limit / 1e9:,.1f} GB are there"
    )


MEMORY_KINDS = ("weights", "gradients", "optimizer", "activations", "gathered", "buffers")
"""Uses of a device's memory."""


def _nothing(devices: int, rejected: list[Rejected]) -> UserError:
    if not rejected:
        return UserError("--devices", devices, "a multiple of the fixed axes' product")
    first = rejected[0]
    return UserError(
        "--devices", devices, f"a number for which a grid fits model, batch and memory; {first.grid}: {first.why}"
    )


TIE = 0.03
"""Times closer than this are equally good: a machine's own figures differ by as much from hour to hour."""
_SHORTER = 0.01
"""Gain from which more microbatches in flight are worth their memory."""
ENOUGH = 25
"""Grids that are compared in any case."""
_SIMULATED_TASKS, _COMPARED_TASKS = 150_000, 50_000
"""Tasks of pipelines that are simulated to find the best, a second or two, and to have others beside it."""
_HORIZON = 1.1
"""Pipelines this far from the best in closed form, whose error is less, are not simulated."""
_UNEVEN = 1.05
"""Usual ratio of several virtual stages' time to the closed form, before one has been simulated."""


def ranked(prices: Prices, fits: Sequence[Priced], space: SearchSpace, limit: float) -> list[Estimate]:
    """Return the estimates of candidates that may be among the best or the smallest, fastest first.

    Grids without a pipeline contribute their best candidate and the front of time and memory. A pipeline counts only
    once it is simulated, because the closed form assumes that virtual stages take equally long, and they do not where
    the model's segments divide unevenly. Each simulation measures that error for candidates with as many virtual
    stages and for the remaining candidates of its grid; those with a large error are simulated last.
    """
    groups: dict[tuple[GridShape, int], list[Priced]] = {}
    for fit in fits:
        groups.setdefault((fit.base.grid, fit.base.virtual_stages), []).append(fit)
    plain = [group for (grid, _), group in groups.items() if grid.pipe == 1]
    shortlist = {fit.candidate for fit in (*(group[0] for group in plain[:ENOUGH]), *front(chain(*plain)))}
    estimates = [prices.price(candidate) for candidate in shortlist]
    best = min((estimate.step_s for estimate in estimates), default=inf)
    queues = [iter(group) for (grid, _), group in groups.items() if grid.pipe > 1]
    waiting = [_Waiting(next(queue), queue, 1.0, False) for queue in queues]
    off: dict[object, float] = {}  # smallest ratio of simulated to closed-form time, by kind of candidate

    def expected(entry: _Waiting) -> float:
        if entry.calibrated:
            return entry.least
        usual = 1.0 if entry.priced.base.virtual_stages == 1 else _UNEVEN
        return entry.least * max(1.0, off.get(_kind(prices.model.request, entry.priced), usual))

    while waiting:
        compared = min(entry.least for entry in waiting) > best * (1 + _SHORTER)
        if estimates and prices.tasks > (_COMPARED_TASKS if compared else _SIMULATED_TASKS):
            break
        nearest = min(waiting, key=expected)
        if estimates and expected(nearest) > _HORIZON * best:
            break
        waiting.remove(nearest)
        base = nearest.priced.base
        placements = [nearest.priced.placement] if nearest.calibrated else placements_of(base.grid, space)
        estimate = _deepened(prices, base, placements, limit)
        if estimate is None:
            continue
        estimates.append(estimate)
        best = min(best, estimate.step_s)
        ratio = estimate.step_s / nearest.priced.step_s
        kind = _kind(prices.model.request, nearest.priced)
        off[kind] = min(off.get(kind, inf), ratio)
        if (further := next(nearest.queue, None)) is not None:
            waiting.append(_Waiting(further, nearest.queue, ratio, True))
    return sorted(
        estimates,
        key=lambda estimate: sort_key(estimate.step_s, estimate.candidate, estimate.candidate.placement),
    )


class _Waiting(NamedTuple):
    """Next candidate to simulate of a grid and a number of virtual stages."""

    priced: Priced
    queue: Iterator[Priced]
    """Remaining candidates, by closed-form time."""
    ratio: float
    """Simulated time of the previous candidate over its closed form."""
    calibrated: bool
    """True if `ratio` comes from a simulation."""

    @property
    def least(self) -> float:
        """Estimated seconds of the step."""
        return self.priced.step_s * self.ratio


def _kind(request: PlanRequest, priced: Priced) -> tuple[int, bool]:
    """Return a key shared by candidates whose closed forms have similar errors."""
    return priced.base.virtual_stages, request.schedule(priced.base).splits


def _deepened(prices: Prices, base: Candidate, placements: Sequence[StatePlacement], limit: float) -> Estimate | None:
    """Return the simulated estimate of a pipeline, or None if no depth fits in memory.

    The policy's default number of microbatches is in flight. Fewer are only used if memory requires it; more only if
    they fit, ranks wait for each other, and the step gets shorter by more than 1 %. Of the placements that fit, the
    optimizer's state takes the fastest.
    """
    fitting = list[Candidate]()
    for depth in depths(prices.model.request, base):
        options = (replace(depth, offload=offload, zero=zero) for offload, zero in placements)
        roomy = [option for option in options if has_room(prices.model, option, limit)]
        if roomy:
            fitting.append(min(roomy, key=prices.model.outside_s))
    if len(fitting) > 1 and fitting[0].shallow:
        del fitting[0]
    best: Estimate | None = None
    for deeper in fitting:
        if best is not None:
            waits = best.bubble + best.exposed["pipe"] / best.step_s
            if waits < 2 * _SHORTER or prices.tasks > _SIMULATED_TASKS:
                break
        estimate = prices.price(deeper)
        if best is not None and estimate.step_s > best.step_s * (1 - _SHORTER):
            break
        best = estimate
    return best
