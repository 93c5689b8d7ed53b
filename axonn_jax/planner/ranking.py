"""The best of what was priced in closed form: pipelines count simulated, in the order in which they promise most."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from math import inf
from typing import NamedTuple

from axonn_jax.grid import GridShape
from axonn_jax.planner.job import Choice, Estimate, Job, Place
from axonn_jax.planner.priced import Priced, front, has_room, places_of, sort_key
from axonn_jax.planner.refine import Prices
from axonn_jax.planner.space import Space, depths

TIE = 0.01
"""Times closer than this are a tie."""
ENOUGH = 25
"""Grids that are compared in any case."""
_SIMULATED_TASKS, _COMPARED_TASKS = 150_000, 50_000
"""Tasks of pipelines that are simulated to find the best, a second or two, and to have others beside it."""
_HORIZON = 1.1
"""Pipelines this far from the best in closed form, whose error is less, are not simulated."""
_UNEVEN = 1.05
"""How much longer several virtual stages are than in closed form, as a rule, where none has been simulated yet."""


def ranked(prices: Prices, fits: Sequence[Priced], space: Space, limit: float) -> list[Estimate]:
    """Prices of what may be among the best or the smallest, fastest first.

    Of choices without a pipeline what nothing beats in both time and memory, and the best of each grid. Pipelines count
    simulated only. The closed form takes virtual stages for equally long, which they are not where a model's pieces do
    not divide evenly: those that were simulated say how much it is off for others of as many, which are tried later if
    it is much, and what a grid's first one took says it for those that come after.
    """
    groups: dict[tuple[GridShape, int], list[Priced]] = {}
    for one in fits:
        groups.setdefault((one.base.grid, one.base.virtual_stages), []).append(one)
    plain = [group for (grid, _), group in groups.items() if grid.pipe == 1]
    wanted = {one.choice for one in (*(group[0] for group in plain[:ENOUGH]), *front(list(chain(*plain))))}
    found = [prices.price(choice) for choice in wanted]
    best = min((one.step_s for one in found), default=inf)
    queues = [iter(group) for (grid, _), group in groups.items() if grid.pipe > 1]
    waiting = [_Waiting(next(queue), queue, 1.0, False) for queue in queues]
    off: dict[object, float] = {}  # the least that choices of a kind were off

    def expected(one: _Waiting) -> float:
        if one.known:
            return one.least
        usual = 1.0 if one.priced.base.virtual_stages == 1 else _UNEVEN
        return one.least * max(1.0, off.get(_kind(prices.model.job, one.priced), usual))

    while waiting:
        compared = min(one.least for one in waiting) > best * (1 + TIE)
        if found and prices.tasks > (_COMPARED_TASKS if compared else _SIMULATED_TASKS):
            break
        nearest = min(waiting, key=expected)
        if found and expected(nearest) > _HORIZON * best:
            break
        waiting.remove(nearest)
        places = [nearest.priced.place] if nearest.known else places_of(nearest.priced.base.grid, space)
        estimate = _deepened(prices, nearest.priced.base, places, limit)
        if estimate is None:
            continue
        found.append(estimate)
        best = min(best, estimate.step_s)
        ratio = estimate.step_s / nearest.priced.step_s
        kind = _kind(prices.model.job, nearest.priced)
        off[kind] = min(off.get(kind, inf), ratio)
        if (further := next(nearest.queue, None)) is not None:
            waiting.append(_Waiting(further, nearest.queue, ratio, True))
    return sorted(found, key=lambda one: sort_key(one.step_s, one.choice, one.choice.place))


class _Waiting(NamedTuple):
    """The next choice of a grid and a number of virtual stages."""

    priced: Priced
    queue: Iterator[Priced]
    """Those that come after it."""
    ratio: float
    """What the one before took, over its closed form."""
    known: bool
    """Whether there was one before."""

    @property
    def least(self) -> float:
        """Seconds that it may take."""
        return self.priced.step_s * self.ratio


def _kind(job: Job, one: Priced) -> tuple[int, bool]:
    """What closed forms are off alike for."""
    return one.base.virtual_stages, job.splits(one.base.activations)


def _deepened(prices: Prices, base: Choice, places: Sequence[Place], limit: float) -> Estimate | None:
    """A pipeline simulated, None where its memory is not there.

    The default is in flight, fewer only where memory asks for it, and more where there is memory for them, ranks wait
    for each other, and the step becomes shorter by more than a tie. The optimizer's state is where it takes the least
    time of all places that leave memory enough.
    """
    fitting = list[Choice]()
    for depth in depths(prices.model.job, base):
        chosen = (replace(depth, offload=offload, zero=zero) for offload, zero in places)
        roomy = [one for one in chosen if has_room(prices.model, one, limit)]
        if roomy:
            fitting.append(min(roomy, key=lambda one: prices.model.once_s(one.grid, one.place)))
    if len(fitting) > 1 and 0 < fitting[0].in_flight <= base.grid.pipe:
        del fitting[0]
    found: Estimate | None = None
    for deeper in fitting:
        if found is not None and (_always_at_work(found) or prices.tasks > _SIMULATED_TASKS):
            break
        estimate = prices.price(deeper)
        if found is not None and estimate.step_s > found.step_s * (1 - TIE):
            break
        found = estimate
    return found


def _always_at_work(one: Estimate) -> bool:
    return one.bubble + one.exposed["pipe"] / one.step_s < 2 * TIE
