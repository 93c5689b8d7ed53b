"""Partition of a model into contiguous virtual stages with balanced ranks, and of stages into groups of layers.

The groups of a stage share one program of a few layers, so that depth costs no compile time.
"""

import random
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, combinations, pairwise
from math import ceil, comb, inf

from axonn_jax.core.errors import UserError


@dataclass(frozen=True)
class SegmentCost:
    """Cost of one segment of a model (embedding, a block, the head) for a microbatch."""

    name: str
    """Name of the segment in messages."""
    forward: float
    """Time or FLOPs of the forward pass; any unit, the same for all segments."""
    backward: float
    """Time or FLOPs of the full backward pass."""
    params: int
    """Parameters."""

    @property
    def total(self) -> float:
        """Cost of forward and backward."""
        return self.forward + self.backward


def partition(costs: Sequence[SegmentCost], pipe: int, virtual_stages: int = 1) -> list[range]:
    """Return one contiguous, non-empty range of segments for each of the `pipe * virtual_stages` virtual stages.

    The split minimizes the cost of the busiest rank (the sum over its virtual stages), and among equal ones the
    largest number of parameters on a rank. The optimum is exact with one virtual stage per rank, and for small models.
    Otherwise it is the best that a local search finds: optimal for equal blocks between an embedding and a head,
    wherever the tests could compare; within a few percent of the optimum for random costs.

    Args:
        costs: Costs of the model's segments, in order.
        pipe: Number of ranks.
        virtual_stages: Virtual stages per rank.

    Raises:
        UserError: There are fewer segments than virtual stages.
    """
    stages = pipe * virtual_stages
    if len(costs) < virtual_stages:
        raise UserError(
            "pipeline.virtual_stages",
            virtual_stages,
            f"at most {max(1, len(costs) // pipe)}: each of the {virtual_stages} * pipe virtual stages needs one of "
            f"the model's {len(costs)} segments",
        )
    if len(costs) < stages:
        raise UserError(
            "grid.pipe",
            pipe,
            f"at most {len(costs) // virtual_stages}: each of the {virtual_stages} * pipe virtual stages needs one of "
            f"the model's {len(costs)} segments",
        )
    times, params = _integers([c.total for c in costs]), [c.params for c in costs]
    if len(costs) > _MAX_SEGMENTS:
        return [range(a, b) for a, b in pairwise(_even(times, pipe * virtual_stages))]
    if virtual_stages == 1:
        cuts = _chain(times, params, pipe)
    elif comb(len(costs) - 1, stages - 1) <= _MAX_ENUMERATED:
        cuts = _enumerate(times, params, pipe, stages)
    else:
        cuts = _search(times, params, pipe, stages)
    return [range(a, b) for a, b in pairwise(cuts)]


_MAX_SEGMENTS = 512
"""Segments up to which the best cuts are searched for, in time that grows with their square; more get even shares."""


def _even(times: Sequence[int], stages: int) -> list[int]:
    """Cut where the accumulated time is nearest to a multiple of a stage's share."""
    elapsed = list(accumulate(times, initial=0))
    cuts = [0]
    for stage in range(1, stages):
        share = elapsed[-1] * stage // stages
        at = bisect_left(elapsed, share)
        at -= at > 0 and share - elapsed[at - 1] < elapsed[at] - share
        # Every stage needs a segment, including those that are still to come.
        cuts.append(min(max(at, cuts[-1] + 1), len(times) - stages + stage))
    return [*cuts, len(times)]


def explicit(split: Sequence[int], segments: int, stages: int) -> list[range]:
    """Return the ranges of a split that the user has chosen.

    Args:
        split: Number of segments of each virtual stage.
        segments: Number of segments of the model.
        stages: Number of virtual stages.

    Raises:
        UserError: There are not `stages` numbers, a number is below 1, or they do not add up to `segments`.
    """
    expected = f"{stages} numbers of at least 1 that add up to the model's {segments} segments"
    if len(split) != stages:
        raise UserError(
            "pipeline.split", list(split), f"{expected}, one a virtual stage; these are {len(split)} numbers"
        )
    if min(split) < 1:
        raise UserError("pipeline.split", list(split), f"{expected}; stage {split.index(min(split))} is empty")
    if sum(split) != segments:
        raise UserError("pipeline.split", list(split), f"{expected}; these add up to {sum(split)}")
    return [range(a, b) for a, b in pairwise(accumulate(split, initial=0))]


_MAX_ENUMERATED = 5_000
"""Number of splits up to which all of them are tried, in well under a second."""

_SHAKES = 600
"""Product of the local search's restarts and the virtual stages: under a second for 400 segments and 64 stages."""


def _integers(times: list[float]) -> list[int]:
    """Return times as integer multiples of 2^-40 of their sum."""
    # Sums of integers do not depend on the order of addition: incremental updates of loads equal fresh sums.
    unit = sum(times) / 2**40 or 1.0
    return [round(time / unit) for time in times]


def _chain(times: list[int], params: list[int], ranges: int) -> list[int]:
    """Return the optimal cuts into `ranges` ranges: the smallest maximum of times, then of parameters."""
    sums, weights = list(accumulate(times, initial=0)), list(accumulate(params, initial=0))
    limit = _bottleneck(len(times), ranges, lambda a, b: sums[b] - sums[a])[0]
    within = lambda a, b: weights[b] - weights[a] if sums[b] - sums[a] <= limit else inf  # noqa: E731
    return _bottleneck(len(times), ranges, within)[1]


def _bottleneck(segments: int, ranges: int, price: Callable[[int, int], float]) -> tuple[float, list[int]]:
    """Minimize the largest price of a range by dynamic programming; return that price, and the cuts with both ends."""
    best = [0.0] + [inf] * segments
    starts: list[list[int]] = []
    for number in range(1, ranges + 1):
        row, start = [inf] * (segments + 1), [0] * (segments + 1)
        for end in range(number, segments - (ranges - number) + 1):
            for begin in range(end - 1, number - 2, -1):
                last = price(begin, end)
                # The price only grows as the start moves left: no start further left can be better.
                if last >= row[end]:
                    break
                worst = max(best[begin], last)
                if worst < row[end]:
                    row[end], start[end] = worst, begin
        best = row
        starts.append(start)
    cuts = [segments]
    for start in reversed(starts):
        cuts.append(start[cuts[-1]])
    return best[segments], cuts[::-1]


def _loads(sizes: list[int], cuts: list[int], pipe: int) -> list[int]:
    """Return the sums of sizes by rank."""
    loads = [0] * pipe
    for stage, (a, b) in enumerate(pairwise(cuts)):
        loads[stage % pipe] += sum(sizes[a:b])
    return loads


def _enumerate(times: list[int], params: list[int], pipe: int, stages: int) -> list[int]:
    n = len(times)
    splits = ([0, *inner, n] for inner in combinations(range(1, n), stages - 1))
    return min(splits, key=lambda cuts: (max(_loads(times, cuts, pipe)), max(_loads(params, cuts, pipe))))


def _search(times: list[int], params: list[int], pipe: int, stages: int) -> list[int]:
    """Search locally from two starts, then from random perturbations of the best split.

    Each descent minimizes the times first, then the parameters as long as the times get no worse.
    """
    # Loads are compared sorted, largest first, and not by their maximum alone: where several ranks are equally busy, no
    # single move lowers the maximum, but relieving any of them makes progress.

    def improve(start: list[int]) -> tuple[int, int, list[int]]:
        def faster(loads: list[int], weights: list[int], most: float) -> list[int] | None:
            return sorted(loads, reverse=True) if max(loads) <= most else None

        cuts = _descend(start, times, params, pipe, faster)
        limit = max(_loads(times, cuts, pipe))

        def lighter(loads: list[int], weights: list[int], most: float) -> list[int] | None:
            return sorted(weights, reverse=True) if max(weights) <= most and max(loads) <= limit else None

        cuts = _descend(cuts, times, params, pipe, lighter)
        return limit, max(_loads(params, cuts, pipe)), cuts

    segments, rng = len(times), random.Random(0)
    best = min(improve(_chain(times, params, stages)), improve([segments * s // stages for s in range(stages + 1)]))
    for _ in range(_SHAKES // stages):
        cuts = best[2][:]
        for cut in rng.sample(range(1, stages), min(stages - 1, 4)):
            cuts[cut] = rng.randint(cuts[cut - 1] + 1, cuts[cut + 1] - 1)
        best = min(best, improve(cuts))
    return best[2]


Key = Callable[[list[int], list[int], float], list[int] | None]
"""Key that a search minimizes: (times by rank, parameters by rank, best key's largest entry) -> key, None if worse."""


def _descend(cuts: list[int], times: list[int], params: list[int], pipe: int, key: Key) -> list[int]:
    """Move single segments between stages until no move lowers the key."""
    loads, weights = _loads(times, cuts, pipe), _loads(params, cuts, pipe)
    best = key(loads, weights, inf)
    assert best is not None
    moved = True
    while moved:
        moved = False
        for taker in range(len(cuts) - 1):
            for (step, low, high), new_loads, new_weights in _moves(cuts, taker, times, params, loads, weights):
                loads_key = key(new_loads, new_weights, best[0])
                if loads_key is not None and loads_key < best:
                    cuts = [cut + step * (low <= index <= high) for index, cut in enumerate(cuts)]
                    loads, weights, best, moved = new_loads[:], new_weights[:], loads_key, True
                    break
    return cuts


def _moves(
    cuts: list[int], taker: int, times: list[int], params: list[int], loads: list[int], weights: list[int]
) -> Iterator[tuple[tuple[int, int, int], list[int], list[int]]]:
    """Try every way to grow the stage `taker` by a segment: another stage shrinks, the cuts between them move by one.

    Yields:
        (step, first moved cut, last moved cut), and the new times and parameters by rank, valid until the next item.
    """
    ranks, stages = len(loads), len(cuts) - 1
    for step in (1, -1):
        new_loads, new_weights = loads[:], weights[:]
        for giver in range(taker + 1, stages) if step == 1 else range(taker - 1, -1, -1):
            # One more stage takes part: the segment at its cut goes to its neighbour on the taker's side.
            segment = cuts[giver] if step == 1 else cuts[giver + 1] - 1
            for stage, sign in ((giver - step, 1), (giver, -1)):
                new_loads[stage % ranks] += sign * times[segment]
                new_weights[stage % ranks] += sign * params[segment]
            if cuts[giver + 1] - cuts[giver] > 1:
                first, last = (taker + 1, giver) if step == 1 else (giver + 1, taker)
                yield (step, first, last), new_loads, new_weights


SIZES = (4, 3)
"""Possible numbers of layers in a group, within which XLA fuses and overlaps; a stage of up to four is one group."""


def group_size(layers: int) -> int:
    """Return the number of layers in a group of a stage."""
    # Compiled are one group and the remainder of the stage: choose the size with the fewest layers in both.
    return layers if layers <= SIZES[0] else min(SIZES, key=lambda size: size + layers % size)


def group_count(layers: float) -> int:
    """Return the number of groups for a number of layers; half a layer adds a group."""
    return 1 if layers < SIZES[0] + 1 else ceil(int(layers) / group_size(int(layers))) + (layers % 1 > 0)


def group_ranges(kinds: Sequence[str], stage: range) -> list[range]:
    """Return the segments of a stage's groups, in order.

    Args:
        kinds: Kind of every segment of the model. Segments of one kind differ only in the values of their parameters;
            a segment of kind "" is unique.
        stage: Segments of the stage.
    """
    start = next((i for i in stage if kinds[i]), stage.stop)
    stop = next((i for i in range(start, stage.stop) if not kinds[i]), stage.stop)
    # Find the shortest period with which the kinds repeat, such as attention and MLP: the segments of one layer.
    run = kinds[start:stop]
    period = next((n for n in range(1, len(run)) if run[n:] == run[:-n]), len(run) or 1)
    layers = len(run) // period
    if layers <= SIZES[0]:
        return [stage]
    end = start + layers * period
    cuts = sorted({stage.start, *range(start, end, group_size(layers) * period), end, stop})
    tail = group_ranges(kinds, range(stop, stage.stop)) if stop < stage.stop else []
    return [*(range(*ends) for ends in pairwise(cuts)), *tail]
