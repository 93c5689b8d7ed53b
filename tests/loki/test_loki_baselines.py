"""Other choices of keys, as Loki's paper compares with: beside numpy, and all of them full attention at all keys."""

from dataclasses import replace

import grids
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from reduced_keys import ReducedKeys
from steps import CAPACITY, FIRST, KV_HEADS, SLOTS, WIDTH, Step, oracle, seen_of, softmax
from tiny import LLAMA, PROMPTS, model

import axonn_jax as ax
from axonn_jax import GridShape, Sampling
from axonn_jax.inference.attend import FullAttention
from axonn_jax.inference.generator import Request
from axonn_jax.loki.baselines import ExactTopK, HeavyHitters, NewestKeys, RandomKeys

GROUP = 2
ALL = [FullAttention(), ExactTopK(1.0), RandomKeys(1.0), NewestKeys(1.0), HeavyHitters(1.0, GROUP)]


@pytest.mark.parametrize("attention", [*ALL, ReducedKeys(WIDTH, 1.0)], ids=lambda attention: attention.name)
def test_all_keys_are_full_attention(attention):
    step = Step(GROUP)
    out, _, _ = step.take(attention, step.components if attention.name == "reduced" else None)
    step.check(out, lambda row, tokens: np.arange(tokens))


def test_exact_top_k_ranks_by_all_features():
    step = Step(GROUP)
    ranked = step.scores()
    out, _, _ = step.take(ExactTopK(0.25))
    step.check(out, lambda row, tokens: oracle(ranked[row], tokens, 0.25))


def test_newest_keys():
    step = Step(GROUP)
    out, _, _ = step.take(NewestKeys(0.25))
    step.check(out, lambda row, tokens: np.arange(tokens - max(tokens // 4, 1), tokens))


def test_random_keys_are_drawn_anew_for_every_token_and_for_all_heads_alike():
    step = Step(GROUP, (10, 63, 64))
    out, _, _ = step.take(RandomKeys(0.25))
    drawn = [np.flatnonzero(out[slot, 0, 0]) for slot in range(SLOTS)]
    step.check(out, lambda row, tokens: drawn[row[0]])
    assert [len(places) for places in drawn] == [2, 15, 16]
    assert [places[-1] for places in drawn] == [9, 62, 63]
    assert len(np.intersect1d(*drawn[1:])) < 12


def test_reduced_keys_attend_to_all_by_the_first_features_alone():
    step = Step(GROUP)
    out, _, _ = step.take(ReducedKeys(FIRST, 0.25), step.components)
    step.check(out, lambda row, tokens: np.arange(tokens), step.scores(FIRST))
    assert np.abs(out - step.take(FullAttention())[0]).max() > 0.1


def heavy_hitters(q, k, keys):
    """The places that each token attends to, and how much, of one query head's [tokens, features]."""
    sums = np.zeros(len(k))
    for newest in range(len(k)):
        number = max(int((newest + 1) * keys), 1)
        recent = max(number // 2, 1)
        old = np.flatnonzero(np.isfinite(sums[: newest + 1 - recent]))
        heavy = old[np.argsort(-sums[old], kind="stable")[: number - recent]]
        kept = np.append(np.sort(heavy), np.arange(newest + 1 - recent, newest + 1))
        sums[np.setdiff1d(np.arange(newest), kept)] = -np.inf
        weights = softmax(k[kept] @ q[newest] / q.shape[1] ** 0.5)
        sums[kept] += weights
        yield kept, weights


@pytest.mark.parametrize("keys", [0.25, 0.5])
def test_heavy_hitters_are_those_of_numpy_also_in_a_slot_that_waits(keys):
    tokens, rng = 40, np.random.default_rng(0)
    q, k = (rng.standard_normal((tokens, 2, KV_HEADS, n, WIDTH)).astype(np.float32) for n in (GROUP, 1))
    rows = [(slot, head, query) for slot, head, query in np.ndindex(2, KV_HEADS, GROUP)]
    wanted = {row: list(heavy_hitters(q[(slice(None), *row)], k[:, *row[:2], 0], keys)) for row in rows}
    attention, v = HeavyHitters(keys, GROUP), np.eye(CAPACITY, dtype=np.float32)
    step = jax.jit(attention.step)
    arrays = attention.stored(*[jnp.full((2, KV_HEADS, CAPACITY, WIDTH), 1000.0)] * 2, None)
    for at in range(tokens):
        own = (at, at // 2)  # the second slot waits with every token first
        seen = seen_of([place + 1 for place in own])
        seen = replace(seen, tokens=seen.tokens * jnp.array([1, at % 2]))
        new = [np.stack([a[place, slot] for slot, place in enumerate(own)]) for a in (q, k)]
        values = np.broadcast_to(v[list(own)][:, None, None], (2, KV_HEADS, 1, CAPACITY))
        stored = attention.stored(jnp.asarray(new[1]), jnp.asarray(values), None)
        out, arrays = step(jnp.asarray(new[0]), stored, arrays, seen, None)
        for row in rows:
            if row[0] and not at % 2:
                continue
            places, weights = wanted[row][own[row[0]]]
            np.testing.assert_array_equal(np.flatnonzero(out[row]), places)
            np.testing.assert_allclose(out[row][places], weights, rtol=2e-6)


def test_texts_by_heavy_hitters_do_not_depend_on_other_texts():
    generator = ax.Generator(
        model(**LLAMA | {"layers": 1}), grids.lay(GridShape()), slots=2, attention=HeavyHitters(0.25, 2)
    )
    greedy, prompts = Sampling(temperature=0), [PROMPTS[n] for n in (2, 1, 2, 0)]
    texts, logs = [list(prompt) for prompt in prompts], [[] for _ in prompts]
    for piece in generator.stream([Request(tuple(prompt), 40) for prompt in prompts], greedy, logs=True):
        texts[piece.request] += piece.ids
        logs[piece.request] += piece.log_probabilities
    for found, scores in zip(logs, generator.score(texts), strict=True):
        np.testing.assert_allclose(found, scores[-40:], atol=5e-6)
