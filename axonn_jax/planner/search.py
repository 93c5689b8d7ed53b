"""The search: every legal grid with every choice that goes with it; what fits, what does not and why."""

from bisect import insort
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from math import inf
from typing import NamedTuple

from axonn_jax.errors import UserError
from axonn_jax.grid import GridShape
from axonn_jax.planner.communication import Gather
from axonn_jax.planner.cost import CostModel
from axonn_jax.planner.job import Choice, Estimate, Job, Memory, Place
from axonn_jax.planner.memory import Policy as Activations
from axonn_jax.planner.refine import Prices
from axonn_jax.planner.space import Space, depths, legal_grids, microbatch_sizes, pieces

TIE = 0.01
"""Times closer than this are a tie."""
_SIMULATED_TASKS, _COMPARED_TASKS = 100_000, 50_000
"""Tasks of pipelines that are simulated to find the best, a second or two, and to have others beside it."""
_GAIN = 0.998
"""More microbatches in flight must make the closed form shorter by this factor to be worth their memory."""
_HORIZON = 1.1
"""Grids that cannot come closer to the best than this are left out once there are enough others."""
_ENOUGH = 25
_POLICIES, _GATHERS = ("none", "save_collectives", "dots", "full", "offload"), ("layer", "pass", "step")


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


class _Priced(NamedTuple):
    step_s: float
    memory: float
    base: Choice
    place: Place

    @property
    def choice(self) -> Choice:
        """All of it."""
        return replace(self.base, offload=self.place[0], zero=self.place[1])

    @property
    def order(self) -> tuple[float, ...]:
        """By time, then by how little it asks for."""
        return _order(self.step_s, self.base, self.place)


def _order(step_s: float, base: Choice, place: Place) -> tuple[float, ...]:
    asked = _POLICIES.index(base.activations), _GATHERS.index(base.gather)
    return step_s, *asked, *place, base.virtual_stages


def search(job: Job, devices: int, space: Space, limit: float) -> Plan:
    """Prices every legal choice for so many devices; `limit` is the memory a device may use, in bytes.

    Grids are tried in the order of what none of their choices goes below, until no other can come near the best.

    Raises:
        UserError: no grid is legal for model, batch and devices, or none fits the memory.
    """
    model, rules = CostModel(job), Counter[str]()
    misses: list[tuple[Memory, Choice]] = []
    grids: list[tuple[float, GridShape]] = []
    for grid in legal_grids(job, devices, space, rules):
        found = _leanest(model, grid, space)
        if found is None:
            rules["the batch leaves no microbatches for them"] += 1
            continue
        memory, leanest = found
        if memory.total > limit or not _host_fits(job, memory.host, grid):
            misses.append((memory, leanest))
        else:
            grids.append((model.bound(grid), grid))
    fits: list[_Priced] = []
    best, examined = inf, 0
    grids.sort(key=lambda one: one[0])
    for tried, (bound, grid) in enumerate(grids):
        if bound > _HORIZON * best and tried >= _ENOUGH:
            rules[f"they take at least {_HORIZON} times as long as the best"] += len(grids) - tried
            break
        # One stage a rank first: several make a good pipeline better, not a bad grid good.
        priced = list(_price(model, grid, space, limit, space.virtual_stages[:1]))
        if grid.pipe > 1 and min((one.step_s for one in priced), default=0.0) < 1.5 * best:
            priced += _price(model, grid, space, limit, space.virtual_stages[1:])
        examined += len(priced)
        # Of one stage a rank and of several: what the closed form says of these is compared once they are simulated.
        for virtual in sorted({one.base.virtual_stages for one in priced}):
            fits.extend(_front([one for one in priced if one.base.virtual_stages == virtual]))
        best = min([best, *(one.step_s for one in priced)])
    misses.sort(key=lambda miss: miss[0].total)
    rejected = [Rejected(str(choice.grid), _too_large(job, memory, choice, limit)) for memory, choice in misses]
    rejected += [Rejected(f"{count} grid{'s' * (count != 1)}", why) for why, count in rules.most_common()]
    if not fits:
        raise _nothing(devices, rejected)
    fits.sort(key=lambda one: one.order)
    found_best = _refined(Prices(model), fits, limit)
    by_grid: dict[GridShape, Estimate] = {}
    for estimate in found_best:
        by_grid.setdefault(estimate.choice.grid, estimate)
    return Plan(list(by_grid.values()), _pareto(found_best), rejected, examined)


def _refined(prices: Prices, fits: Sequence[_Priced], limit: float) -> list[Estimate]:
    """Prices of what may be among the best or the smallest, fastest first.

    Of choices without a pipeline what nothing beats in both time and memory, and the best of each grid. Pipelines count
    simulated only. The closed form says which are tried first, and what a grid's first one took says how far it is off
    for those that come after: virtual stages, which it takes for equally long, are not where pieces do not divide.
    """
    groups: dict[tuple[GridShape, int], list[_Priced]] = {}
    for one in fits:
        groups.setdefault((one.base.grid, one.base.virtual_stages), []).append(one)
    plain = [group for (grid, _), group in groups.items() if grid.pipe == 1]
    wanted = {one.choice for one in (*(group[0] for group in plain[:_ENOUGH]), *_front(list(chain(*plain))))}
    found = [prices.price(choice) for choice in wanted]
    best = min((one.step_s for one in found), default=inf)
    queue = [(group[0].step_s, key, 0) for key, group in groups.items() if key[0].pipe > 1]
    queue.sort(key=lambda one: one[0])
    while queue:
        expected, key, place = queue.pop(0)
        compared = expected > best * (1 + TIE)
        if found and (expected > _HORIZON * best or prices.tasks > (_COMPARED_TASKS if compared else _SIMULATED_TASKS)):
            break
        group = groups[key]
        estimate = _deepened(prices, group[place].choice, limit)
        if estimate is not None:
            found.append(estimate)
            best = min(best, estimate.step_s)
            if place + 1 < len(group):
                expected = group[place + 1].step_s * estimate.step_s / group[place].step_s
                insort(queue, (expected, key, place + 1), key=lambda one: one[0])
    return sorted(found, key=lambda one: _order(one.step_s, one.choice, one.choice.place))


def _deepened(prices: Prices, choice: Choice, limit: float) -> Estimate | None:
    """A pipeline simulated, None where its memory is not there.

    The default is in flight, fewer only where memory asks for it, and more where there is memory for them, ranks wait
    for each other, and the step becomes shorter by more than a tie.
    """
    fitting = [one for one in depths(prices.model.job, choice) if _fits(prices.model, one, limit)]
    if len(fitting) > 1 and fitting[0].in_flight:
        del fitting[0]
    found: Estimate | None = None
    for deeper in fitting:
        if found is not None and found.bubble + found.exposed["pipe"] / found.step_s < 2 * TIE:
            break
        estimate = prices.price(deeper)
        if found is not None and estimate.step_s > found.step_s * (1 - TIE):
            break
        found = estimate
    return found


def _fits(model: CostModel, choice: Choice, limit: float) -> bool:
    (device, host), *_ = model.footprint.totals(choice, [choice.place])
    return device <= limit and _host_fits(model.job, host, choice.grid)


def _pareto(found: Sequence[Estimate]) -> list[Estimate]:
    """What nothing beats in both time and memory, of estimates in the order of their times."""
    merged: list[Estimate] = []
    for estimate in found:
        if not merged or estimate.memory.total < merged[-1].memory.total:
            merged.append(estimate)
    return merged


def _price(
    model: CostModel, grid: GridShape, space: Space, limit: float, virtual_stages: Sequence[int]
) -> Iterator[_Priced]:
    """Every choice on a grid that fits."""
    too_large: set[tuple[int, Activations, Gather]] = set()
    places = _places(grid, space)
    for base in _choices(model.job, grid, space, virtual_stages):
        # Larger microbatches need more, but for the whole share in one, which need not keep gathered weights.
        kind = (base.virtual_stages, base.activations, base.gather)
        if kind in too_large and (grid.pipe > 1 or base.microbatches > 1):
            continue
        fastest, parts = None, None
        for choice in depths(model.job, base):
            seconds = None
            if parts is not None and fastest is not None:
                seconds = model.pipeline_s(choice, parts)
                if seconds > _GAIN * fastest:  # nor would still more be worth their memory
                    break
            fits = False
            for place, (device, host) in zip(places, model.footprint.totals(choice, places), strict=True):
                if device <= limit and _host_fits(model.job, host, grid):
                    parts = parts or model.busiest(choice)
                    seconds = model.pipeline_s(choice, parts) if seconds is None else seconds
                    fits = True
                    yield _Priced(seconds + model.once_s(grid, place), device, choice, place)
            if not fits:
                break
            fastest = seconds
        if fastest is None:
            too_large.add(kind)


def _front(found: Sequence[_Priced]) -> list[_Priced]:
    """What nothing beats in both time and memory, fastest first."""
    front: list[_Priced] = []
    for one in sorted(found, key=lambda one: one.order):
        if not front or one.memory < front[-1].memory:
            front.append(one)
    return front


def _leanest(model: CostModel, grid: GridShape, space: Space) -> tuple[Memory, Choice] | None:
    """The choice that needs the least device memory among those the host has room for, None where there are none.

    The smallest microbatch is not always the leanest: several of them share gathered weights, which then stay.
    """
    order = ("offload", "full", "save_collectives", "dots", "none")
    each, virtual = model.job.batch // grid.batch_shards, min(space.virtual_stages) if grid.pipe > 1 else 1
    sizes = microbatch_sizes(model.job, grid, space)
    found: list[tuple[bool, float, int, Choice, Place]] = []
    places = _places(grid, space)
    for size in {*sizes[:1], *sizes[-1:]}:
        for activations in sorted(space.activations, key=order.index)[:2]:
            base = Choice(grid, each // size, activations, virtual)
            base = next(depths(model.job, replace(base, gather=space.gathers(base)[0])))
            for place, (device, host) in zip(places, model.footprint.totals(base, places), strict=True):
                found.append((not _host_fits(model.job, host, grid), device, len(found), base, place))
    if not found:
        return None
    *_, base, (offload, zero) = min(found)
    leanest = replace(base, offload=offload, zero=zero)
    return model.footprint.memory(leanest), leanest


def _choices(job: Job, grid: GridShape, space: Space, virtual_stages: Sequence[int]) -> Iterator[Choice]:
    """Choices of a legal grid, offload and ZeRO aside."""
    each = job.batch // grid.batch_shards
    for virtual in virtual_stages if grid.pipe > 1 else (1,):
        if virtual > 1 and (job.policy == "1f1b" or grid.pipe * virtual > pieces(job)):
            continue
        for sequences in microbatch_sizes(job, grid, space):
            for activations in space.activations:
                base = Choice(grid, each // sequences, activations, virtual)
                for gather in space.gathers(base):
                    yield base if gather == base.gather else replace(base, gather=gather)


def _places(grid: GridShape, space: Space) -> list[Place]:
    """Every place and share of the optimizer's state, the leanest last."""
    shares = [zero for zero in space.zero if not zero or grid.data > 1 or len(space.zero) == 1]
    return [(offload, zero) for zero in shares for offload in space.offload]


def _host_fits(job: Job, each: float, grid: GridShape) -> bool:
    return each * min(job.machine.node.devices, grid.devices) <= job.machine.host.memory_bytes


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
