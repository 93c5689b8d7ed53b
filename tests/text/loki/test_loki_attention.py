"""Loki attends to the keys that rank first by a few features, and to no others: beside numpy, and full attention."""

import functools

import grids
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from steps import CAPACITY, EPS, FIRST, KV_HEADS, SLOTS, WIDTH, Step, oracle, orthonormal, seen_of
from tiny import LLAMA, PROMPTS, model

import axonn_jax as ax
from axonn_jax import GridShape, Sampling
from axonn_jax.text.inference.attend import FullAttention
from axonn_jax.text.loki.attention import LokiAttention, turn
from axonn_jax.text.loki.components import Components, laid_out


@pytest.mark.parametrize(
    ("group", "block", "keys"), [(1, 1, 0.25), (4, 1, 0.25), (1, 16, 0.1), (4, 16, 0.25), (4, 1, 1.0)]
)
def test_a_step_is_the_softmax_over_what_ranks_first(group, block, keys):
    step, outs = Step(group), []
    ranked, turned = step.scores(FIRST), np.einsum("bknd,kde->bkne", step.k, step.components)
    for by_head in (True, False):
        out, before, after = step.take(LokiAttention(FIRST, keys, block, by_head), step.components)
        step.check(out, lambda row, tokens: oracle(ranked[row], tokens, keys, block))
        here = np.arange(CAPACITY)[:, None] == step.newest
        for *cache, tokens in zip(before, after, (turned[..., :FIRST], turned[..., FIRST:], step.v), strict=True):
            np.testing.assert_array_equal(cache[1], np.where(here, tokens, cache[0]))
        outs.append(out)
    np.testing.assert_allclose(*outs, rtol=16 * EPS)


@pytest.mark.parametrize("keys", [0.1, 0.25, 1.0])
@pytest.mark.parametrize("block", [1, 16])
@pytest.mark.parametrize("group", [1, 4])
def test_chosen_keys_are_the_oracles(group, block, keys):
    attention = LokiAttention(FIRST, keys, block)
    chosen = jax.jit(attention.select_blocks)

    @settings(max_examples=20, deadline=None)
    @given(lengths=st.lists(st.integers(1, CAPACITY), min_size=SLOTS, max_size=SLOTS), seed=st.integers(0, 2**32 - 1))
    def compare(lengths, seed):
        rng = np.random.default_rng(seed)
        ranked = rng.integers(-3, 4, (SLOTS, KV_HEADS, group, CAPACITY)).astype(np.float32)
        found = np.asarray(chosen(jnp.asarray(ranked), seen_of(lengths)))
        for slot, tokens in enumerate(lengths):
            number = -(-max(int(np.float32(tokens) * np.float32(keys)), 1) // block)
            for head, query in np.ndindex(KV_HEADS, group):
                blocks = found[slot, head, query]
                assert blocks.sum() == number
                assert blocks[(tokens - 1) // block]
                places = np.flatnonzero(np.repeat(blocks, block)[:tokens])
                np.testing.assert_array_equal(places, oracle(ranked[slot, head, query], tokens, keys, block))

    compare()


@given(keys=st.floats(0, 1, exclude_min=True) | st.sampled_from([0.145, 1 - 1e-9]), block=st.sampled_from([1, 16, 64]))
@settings(max_examples=100, deadline=None)
def test_there_is_room_for_all_that_is_chosen_of_a_full_cache(keys, block):
    """By the same rounding: else the newest, the last of them, would be left out."""
    attention, capacities = LokiAttention(FIRST, keys, block), [64, 512, 1536, 12_800, 115_200]
    chosen = attention.block_count(jnp.array(capacities))
    assert chosen.tolist() == [attention.max_blocks(capacity) for capacity in capacities]


def test_turned_queries_and_keys_have_the_same_scores_and_turn_back():
    rng = np.random.default_rng(1)
    components = orthonormal(rng, KV_HEADS)
    q, k = (rng.standard_normal((SLOTS, KV_HEADS, n, WIDTH)).astype(np.float32) for n in (4, 100))
    turned = [np.asarray(turn(jnp.asarray(a), jnp.asarray(components)), np.float64) for a in (q, k)]
    plain, scores = (np.einsum("bkgd,bknd->bkgn", *pair) for pair in ((q.astype(np.float64), k), turned))
    np.testing.assert_allclose(scores, plain, rtol=0, atol=1e-6 * np.abs(plain).max())
    attention, extra = LokiAttention(FIRST, 0.25), jnp.asarray(components)
    back = attention.keys_and_values(attention.stored(jnp.asarray(k), jnp.asarray(k), extra), extra)
    np.testing.assert_allclose(back[0], k, atol=1e-6 * np.abs(k).max())
    np.testing.assert_array_equal(back[1], k)


@pytest.mark.parametrize("by_head", [True, False])
def test_all_features_and_keys_are_full_attention(by_head):
    step, rng = Step(4), np.random.default_rng(2)
    step.q, step.v = (rng.standard_normal(a.shape).astype(np.float32) for a in (step.q, step.v))
    full, _, _ = step.take(FullAttention())
    out, _, _ = step.take(LokiAttention(WIDTH, 1.0, by_head=by_head), orthonormal(rng, KV_HEADS))
    np.testing.assert_allclose(out, full, atol=1e-6 * np.abs(step.v).max())  # scores are up to 8, each to 1e-6 of that


@functools.cache
def made():
    return model(**LLAMA | {"layers": 1})


def generated(axes, attention, sampling):
    generator = ax.Generator(made(), grids.lay(axes), slots=2, attention=attention)
    if attention is not None:
        shape, programs = generator.shape, generator.programs
        vectors = orthonormal(np.random.default_rng(3), shape.layers, shape.kv_heads, width=shape.head_dim)
        none = np.zeros(vectors.shape[:3], np.float32)
        generator.extras = laid_out(Components(vectors, none, none, 0), programs.extra_spec, programs.mesh)
    return generator.generate(PROMPTS[1:3], tokens=30, sampling=sampling)


def test_texts_by_all_features_and_keys_are_those_of_full_attention():
    greedy, whole = Sampling(temperature=0), LokiAttention(8, 1.0)
    full = generated(GridShape(), None, greedy)
    for axes in (GridShape(), GridShape(y=2)):
        assert generated(axes, whole, greedy) == full


def test_texts_by_half_the_features_and_keys_are_the_same_on_every_grid():
    warm, half = Sampling(temperature=1.5, top_k=10, seed=3), LokiAttention(4, 0.5)
    assert generated(GridShape(y=2), half, warm) == generated(GridShape(), half, warm)
