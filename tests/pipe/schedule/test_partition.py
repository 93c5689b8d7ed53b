"""Layers to stages: against brute force, ties, a user's own split, refusals."""

import random
from itertools import combinations, pairwise

import pytest

from axonn_jax.core.errors import UserError
from axonn_jax.pipe.schedule import partition as module
from axonn_jax.pipe.schedule.partition import SegmentCost, explicit, partition


def costs(times, params=None):
    params = params or [1] * len(times)
    return [SegmentCost(f"piece {i}", t / 3, 2 * t / 3, p) for i, (t, p) in enumerate(zip(times, params, strict=True))]


def loads(values, ranges, pipe):
    sums = [0.0] * pipe
    for stage, segments in enumerate(ranges):
        sums[stage % pipe] += sum(values[i] for i in segments)
    return sums


def brute_force(times, params, pipe, stages):
    """The smallest maximum of times over ranks, and of parameters among the splits that reach it."""
    best = (float("inf"), 0)
    for inner in combinations(range(1, len(times)), stages - 1):
        ranges = [range(a, b) for a, b in pairwise((0, *inner, len(times)))]
        found = (round(max(loads(times, ranges, pipe)), 6), max(loads(params, ranges, pipe)))
        best = min(best, found)
    return best


def random_model(rng, segments):
    """Equal blocks between a light embedding and a heavy head, or anything."""
    if rng.random() < 0.5:
        times = [rng.random() * 0.3, *[1.0] * (segments - 2), rng.random() * 4] if segments > 1 else [1.0]
    else:
        times = [rng.expovariate(1.0) for _ in range(segments)]
    return times, [rng.randint(1, 5) for _ in range(segments)]


def check_shape(ranges, segments, stages):
    assert len(ranges) == stages
    assert all(len(r) for r in ranges)
    assert [i for r in ranges for i in r] == list(range(segments))


@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_partition_is_as_good_as_brute_force(chunks):
    rng = random.Random(chunks)
    for _ in range(60):
        pipe = rng.randint(1, 4 if chunks < 3 else 2)
        segments = rng.randint(pipe * chunks, 12)
        times, params = random_model(rng, segments)
        ranges = partition(costs(times, params), pipe, chunks)
        check_shape(ranges, segments, pipe * chunks)
        best_time, best_params = brute_force(times, params, pipe, pipe * chunks)
        assert max(loads(times, ranges, pipe)) == pytest.approx(best_time, abs=2e-6)
        assert max(loads(params, ranges, pipe)) <= best_params


def test_the_local_search_finds_the_optimum_of_transformers_and_comes_close_elsewhere(monkeypatch):
    monkeypatch.setattr(module, "_MAX_ENUMERATED", 0)  # no enumeration
    rng = random.Random(5)
    ratios = []
    for _ in range(60):
        pipe, chunks = rng.choice([(2, 2), (3, 2), (2, 3)])
        segments = rng.randint(pipe * chunks, 12)
        times, params = random_model(rng, segments)
        ranges = partition(costs(times, params), pipe, chunks)
        check_shape(ranges, segments, pipe * chunks)
        ratio = max(loads(times, ranges, pipe)) / brute_force(times, params, pipe, pipe * chunks)[0]
        assert ratio < (1.00001 if 1.0 in times else 1.1)
        ratios.append(ratio)
    assert sum(ratios) / len(ratios) < 1.005


@pytest.mark.parametrize(("segments", "pipe", "chunks"), [(400, 16, 1), (400, 16, 4), (130, 16, 2), (200, 8, 3)])
def test_large_models_are_balanced(segments, pipe, chunks):
    times = [0.2, *[1.0] * (segments - 2), 3.0]
    ranges = partition(costs(times), pipe, chunks)
    check_shape(ranges, segments, pipe * chunks)
    # No split of whole segments is better than the mean rounded up to whole blocks.
    assert max(loads(times, ranges, pipe)) <= -(-sum(times) // pipe) + 0.2


def test_ties_go_to_equal_parameters():
    ranges = partition(costs([1.0] * 5, params=[9, 1, 1, 1, 1]), 2)
    assert ranges == [range(0, 2), range(2, 5)]
    ranges = partition(costs([1.0] * 5, params=[1, 1, 1, 1, 9]), 2)
    assert ranges == [range(0, 3), range(3, 5)]


def test_with_virtual_stages_a_rank_sums_its_chunks():
    # Rank 0 has the light embedding, rank 1 the heavy head: the blocks make up for it.
    ranges = partition(costs([0.0, 1, 1, 1, 1, 1, 1, 2.0]), 2, 2)
    assert loads([0.0, 1, 1, 1, 1, 1, 1, 2.0], ranges, 2) == [4.0, 4.0]


def test_segments_without_cost_are_spread_too():
    check_shape(partition(costs([0.0] * 7), 3, 2), 7, 6)


def test_too_few_segments():
    with pytest.raises(UserError, match=r"grid\.pipe = 4: at most 3: .*6 segments"):
        partition(costs([1.0] * 6), 4, 2)


def test_explicit():
    assert explicit([1, 3, 2], 6, 3) == [range(0, 1), range(1, 4), range(4, 6)]


@pytest.mark.parametrize(
    ("split", "words"),
    [
        ([1, 3], "3 numbers of at least 1 that add up to the model's 6 segments, one a virtual stage; these are 2"),
        ([3, 0, 3], "stage 1 is empty"),
        ([1, 2, 2], "these add up to 5"),
        ([], "these are 0 numbers"),
    ],
)
def test_a_split_that_does_not_fit_is_refused(split, words):
    with pytest.raises(UserError, match=words) as error:
        explicit(split, 6, 3)
    assert error.value.field == "pipeline.split"
