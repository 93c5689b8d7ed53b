"""The search: every legal grid with every choice that goes with it; what fits, what does not and why."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from axonn_jax.errors import UserError
from axonn_jax.grid import GridShape
from axonn_jax.planner.communication import Gather
from axonn_jax.planner.cost import CostModel
from axonn_jax.planner.job import Choice, Estimate, Job, Memory, Place
from axonn_jax.planner.memory import Policy as Activations
from axonn_jax.planner.refine import refine, tasks_to_refine
from axonn_jax.planner.space import Space, depths, legal_grids, microbatch_sizes, pieces

TIE = 0.01
"""Times closer than this are a tie."""
_SIMULATED_TASKS = 50_000
"""Tasks of pipelines that are simulated in a search: a few tenths of a second."""
_GAIN = 0.998
"""More microbatches in flight must make the closed form shorter by this factor to be worth their memory."""
_HORIZON = 1.1
"""Grids that cannot come closer to the best than this are left out once there are enough others."""
_ENOUGH = 25
_SHOWN = 10
"""The pipelines among so many of the best in closed form are simulated in any case, as far as there are tasks left."""
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
    def order(self) -> tuple[float, int, int, bool, int, int]:
        """By time, then by how little it asks for."""
        base = self.base
        asked = _POLICIES.index(base.activations), _GATHERS.index(base.gather)
        return self.step_s, *asked, *self.place, base.virtual_stages


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
    best, examined = float("inf"), 0
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
    best_of = _refined(model, fits, limit)
    by_grid: dict[GridShape, Estimate] = {}
    for estimate in best_of:
        by_grid.setdefault(estimate.choice.grid, estimate)
    return Plan(list(by_grid.values()), _pareto(model, fits, best_of), rejected, examined)


def _refined(model: CostModel, fits: Sequence[_Priced], limit: float) -> list[Estimate]:
    """The best of each grid and number of virtual stages, fastest first.

    Pipelines that may be among the best are simulated by their dispatchers. The closed form takes virtual stages for
    equally long, which they are not where a model's pieces do not divide evenly: several of them count only once
    simulated.
    """
    kept: dict[tuple[GridShape, int], Choice] = {}
    for one in fits:
        key = (one.base.grid, one.base.virtual_stages)
        if key not in kept:
            kept[key] = one.choice
    found, left, best = list[Estimate](), _SIMULATED_TASKS, float("inf")
    for choice in list(kept.values())[: 2 * _ENOUGH]:
        estimate = model.estimate(choice)
        near = choice.grid.pipe > 1 and (estimate.step_s <= _HORIZON * best or len(found) < _SHOWN)
        if near and (tasks_to_refine(choice) <= left or not found):
            estimate, spent = _deepened(model, estimate, limit, left)
            left -= spent
        if estimate.simulated or choice.virtual_stages == 1:
            found.append(estimate)
            best = min(best, estimate.step_s)
    return sorted(found, key=lambda one: one.step_s)


def _deepened(model: CostModel, one: Estimate, limit: float, left: int) -> tuple[Estimate, int]:
    """A pipeline simulated, and the tasks that took.

    The default is in flight, fewer only where memory asks for it, and more where there is memory for them and the step
    becomes shorter by more than a tie.
    """
    fitting = [choice for choice in depths(model.job, one.choice) if _fits(model, choice, limit)]
    if len(fitting) > 1 and fitting[0].in_flight:
        del fitting[0]
    found, spent = one, 0
    for choice in fitting:
        if found.simulated and spent + tasks_to_refine(choice) > left:
            break
        estimate = refine(model, model.estimate(choice))
        spent += tasks_to_refine(choice)
        if found.simulated and estimate.step_s > found.step_s * (1 - TIE):
            break
        found = estimate
        if found.bubble + found.exposed["pipe"] / found.step_s < 2 * TIE:
            break
    return found, spent


def _fits(model: CostModel, choice: Choice, limit: float) -> bool:
    (device, host), *_ = model.footprint.totals(choice, [choice.place])
    return device <= limit and _host_fits(model.job, host, choice.grid)


def _pareto(model: CostModel, fits: Sequence[_Priced], refined: Sequence[Estimate]) -> list[Estimate]:
    """What nothing beats in both time and memory; virtual stages as simulated, the rest in closed form."""
    simulated = {one.choice: one for one in refined}
    front = [one.choice for one in _front([one for one in fits if one.base.virtual_stages == 1])]
    estimates = [*refined, *(model.estimate(choice) for choice in front if choice not in simulated)]
    merged: list[Estimate] = []
    for estimate in sorted(estimates, key=lambda one: (one.step_s, one.memory.total)):
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
