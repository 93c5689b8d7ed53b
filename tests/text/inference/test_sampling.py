"""Draws of the next token: the distribution of each sampler, the tokens it may give; the largest of a row."""

import grids
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from axonn_jax import GridShape, Sampling, UserError
from axonn_jax.core.tensor.specs import shard_mapped
from axonn_jax.text.inference.sampling import choose, gumbel, log_probabilities
from axonn_jax.text.inference.select import compacted, largest

DRAWS, VOCAB = 100_000, 48
LOGITS = np.random.default_rng(0).normal(0, 1.5, VOCAB).astype(np.float32)
SEEN = np.arange(VOCAB) % 3 == 0
WAYS = {
    "plain": Sampling(temperature=1.0, top_k=0),
    "temperature": Sampling(temperature=0.7, top_k=0),
    "top_k": Sampling(temperature=1.0, top_k=10),
    "top_p": Sampling(temperature=1.0, top_k=0, top_p=0.8),
    "min_p": Sampling(temperature=1.0, top_k=0, min_p=0.1),
    "penalty": Sampling(temperature=1.0, top_k=0, repetition_penalty=1.7),
    "all": Sampling(temperature=1.3, top_k=30, top_p=0.85, min_p=0.05, repetition_penalty=1.2),
}


def expected(way):
    """Probabilities by numpy, in the order of transformers' processors."""
    scores = LOGITS.astype(np.float64)
    penalty = way.repetition_penalty
    scores = np.where(SEEN, np.where(scores > 0, scores / penalty, scores * penalty), scores) / way.temperature
    if way.top_k:
        scores = np.where(scores < np.sort(scores)[-way.top_k], -np.inf, scores)
    order = np.argsort(-scores)
    weights = np.exp(scores - scores.max())
    weights /= weights.sum()
    before = np.cumsum(weights[order]) - weights[order]
    weights[order[before >= way.top_p]] = 0
    weights[weights < way.min_p * weights.max()] = 0
    return weights / weights.sum()


def drawn(way, rows=DRAWS, y=1, scores=LOGITS):
    grid = grids.lay(GridShape(y=y))
    keys = np.broadcast_to(way.key(0), (rows, 2))
    places = np.arange(rows, dtype=np.int32)
    logits, seen = (np.broadcast_to(a, (rows, VOCAB)) for a in (scores, SEEN))

    def local(logits, keys, places, seen):
        return choose(logits, way.form, way.numbers, keys, places, seen)

    split = P(None, "y")
    program = shard_mapped(local, grid.mesh, (split, P(), P(), split), P(), differentiated=False)
    return np.asarray(jax.jit(program)(logits, keys, places, seen))


@pytest.mark.parametrize("name", WAYS)
def test_draws_have_the_samplers_distribution(name):
    weights, counts = expected(WAYS[name]), np.bincount(drawn(WAYS[name]), minlength=VOCAB)
    assert not counts[weights == 0].any()
    allowed = weights > 0
    wanted = weights[allowed] * DRAWS
    chi = ((counts[allowed] - wanted) ** 2 / wanted).sum()
    freedom = allowed.sum() - 1
    assert freedom < chi + 5 * (2 * freedom) ** 0.5  # not too good either: every draw has noise of its own
    assert chi < freedom + 5 * (2 * freedom) ** 0.5


@pytest.mark.parametrize("name", WAYS)
def test_draws_do_not_depend_on_the_grid(name):
    np.testing.assert_array_equal(drawn(WAYS[name], 2000, y=4), drawn(WAYS[name], 2000))


EQUALS = {
    "all": np.zeros(VOCAB),
    "of a cut-off in every part": np.where(np.arange(VOCAB) % 5 == 3, 1.0, -1.0),
    "behind some": np.where(np.arange(VOCAB) < VOCAB - 3, 0.0, 2.0),
    "of coarse scores": np.round(LOGITS),
    "of the three likeliest, of which two are enough": np.where(np.isin(np.arange(VOCAB), (7, 29, 41)), 20.0, LOGITS),
}


@pytest.mark.parametrize(("top_k", "y"), [(0, 1), (0, 4), (VOCAB, 1)])
def test_top_p_takes_of_equal_tokens_the_lowest_ids_until_it_is_reached(top_k, y):
    """As Hugging Face's warper, which takes tokens in order until `p` is reached; the order of equal ones is ours."""
    way, rows = Sampling(temperature=1.0, top_k=top_k, top_p=0.51), 2000
    chosen = drawn(way, rows * len(EQUALS), y, np.repeat([*EQUALS.values()], rows, 0).astype(np.float32))
    for name, ids in zip(EQUALS, chosen.reshape(-1, rows), strict=True):
        scores = EQUALS[name]
        order, weights = np.argsort(-scores, kind="stable"), np.exp(scores) / np.exp(scores).sum()
        before = np.cumsum(weights[order]) - weights[order]
        assert np.abs(before - way.top_p).min() > 1e-3
        np.testing.assert_array_equal(np.unique(ids), np.sort(order[before < way.top_p]), name)


def test_noise_is_finite_and_as_wide_as_its_words():
    words = np.array([0, 1, 2**8, 2**31, 2**32 - 2**9, 2**32 - 1], np.uint32)
    noise = np.asarray(jax.jit(gumbel)(words))
    uniform = np.minimum((words.astype(np.float32) + np.float32(0.5)).astype(float) / 2**32, 1 - 2.0**-24)
    np.testing.assert_allclose(noise, -np.log(-np.log1p(-uniform)), rtol=1e-6)


@pytest.mark.parametrize("name", ["plain", "top_p", "min_p"])
def test_a_large_vocabulary_gives_no_token_of_probability_0(name):
    """At this key, position and id the random word has all its upper bits set, of which noise was infinite once."""
    key = jax.random.key_data(jax.random.fold_in(jax.random.key(0, impl="threefry2x32"), 0))
    logits, way = np.zeros((1, 151_936), np.float32), WAYS[name]
    logits[0, 7] = 1000
    chosen = jax.jit(lambda a: choose(a, way.form, way.numbers, key[None], jnp.array([210]), None))(logits)
    assert chosen.tolist() == [7]


@pytest.mark.parametrize("y", [1, 2])
def test_the_likeliest_token_of_equals_is_the_first(y):
    grid, way = grids.lay(GridShape(y=y)), Sampling(temperature=0)
    logits = np.zeros((2, 8), np.float32)
    logits[0, [3, 6]] = 1.0
    logits[1, 2] = np.nan

    def local(logits):
        zeros = jnp.zeros(2, jnp.int32)
        chosen = choose(logits, way.form, way.numbers, jnp.zeros((2, 2), jnp.uint32), zeros, None)
        return chosen, log_probabilities(logits, chosen)

    program = shard_mapped(local, grid.mesh, (P(None, "y"),), P(), differentiated=False)
    chosen, logs = jax.jit(program)(logits)
    assert chosen.tolist() == [3, -1]
    assert float(logs[0]) == pytest.approx(1 - np.log(6 + 2 * np.e), abs=1e-6)


@pytest.mark.parametrize(
    ("field", "value"),
    [("temperature", -1.0), ("temperature", float("inf")), ("top_k", -1), ("top_p", 0.0), ("top_p", 1.5),
     ("min_p", -0.1), ("min_p", float("nan")), ("repetition_penalty", 0.0), ("seed", -1), ("seed", 2**32),
     ("top_k", 2.5), ("temperature", "hot"), ("min_p", None)],
)  # fmt: skip
def test_numbers_out_of_range_are_named(field, value):
    with pytest.raises(UserError, match=f"^sampling.{field} = "):
        Sampling(**{field: value})


NUMBERS = st.sampled_from([-np.inf, -3e38, -1.5, -1e-40, 0.0, 1e-40, 0.5, 0.75, 3e38, np.inf])


@pytest.mark.parametrize("n", [1, 7, 40])
def test_the_largest_of_a_row_and_their_places_are_numpys(n):
    size = -(-n // 2)
    found_of = jax.jit(lambda scores, k: (chosen := largest(scores, k), compacted(chosen, size)))
    rows = st.lists(st.lists(NUMBERS, min_size=n, max_size=n), min_size=3, max_size=3)

    @settings(max_examples=60, deadline=None)
    @given(rows=rows, k=st.lists(st.integers(1, n), min_size=3, max_size=3))
    def compare(rows, k):
        scores = np.array(rows, np.float32)
        chosen, (places, counts) = jax.device_get(found_of(scores, np.array(k, np.int32)))
        for row in range(3):
            wanted = np.sort(np.argsort(-scores[row], kind="stable")[: k[row]])
            np.testing.assert_array_equal(np.flatnonzero(chosen[row]), wanted)
            np.testing.assert_array_equal(places[row][counts[row]], wanted[:size])
            assert (places[row] < n).all()

    compare()
