"""Other choices of keys, as Loki's paper compares with; the fingerprint of the weights that a calibration is of."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import grids
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from loki_baselines import ExactTopK, HeavyHitters, NewestKeys, RandomKeys
from reduced_keys import ReducedKeys
from steps import CAPACITY, FIRST, KV_HEADS, SLOTS, WIDTH, Step, oracle, seen_of, softmax
from tiny import LLAMA, PROMPTS, model

import axonn_jax as ax
from axonn_jax import GridShape, Sampling, UserError
from axonn_jax.text.inference.attend import FullAttention
from axonn_jax.text.inference.generator import Request
from axonn_jax.text.inference.weights import load_model, of_model
from axonn_jax.text.loki.components import calibrate, check_weights, fingerprint
from axonn_jax.text.loki.options import LokiOptions

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


SHAPE = ax.models.ModelShape(**LLAMA | {"hidden": 48, "heads": 6})
RNG = np.random.default_rng(0)
CHANGES = {
    "heads in reverse order": lambda w: w[:, ::-1],
    "inputs permuted": lambda w: w[::-1],
    "negated": lambda w: -w,
    "doubled": lambda w: 2 * w,
    "trained": lambda w: w + 0.03 * jnp.std(w) * RNG.standard_normal(w.shape, np.float32),
    "one of its heads": lambda w: w.at[:, :8].set(w[:, 8:16]),
    "not finite": lambda w: w.at[0, 0].set(jnp.nan),
}


@pytest.fixture(scope="module")
def loaded():
    return of_model(ax.models.Transformer(SHAPE, rngs=nnx.Rngs(0)), grids.lay(GridShape()), "float32")


@pytest.fixture(scope="module")
def facts(loaded):
    weights = fingerprint(loaded.parts, loaded.params, SHAPE.kv_heads)
    return {"model": json.dumps(asdict(SHAPE)), "weights": json.dumps(weights)}


def test_components_are_those_of_all_keys_together():
    """Of two batches of unequal size, whose keys a function gives in place of a model."""
    rng = np.random.default_rng(0)
    keys = [rng.normal(3.0, [1, 2, 4], (rows, 5, 2, 3)) for rows in (1, 4)]

    def program(params, batch):
        own = keys[batch[0, 0]]
        return {"post": [(own.sum((0, 1)), np.einsum("bskd,bske->kde", own, own))]}

    found = calibrate(program, {}, [np.full((len(own), 5), number) for number, own in enumerate(keys)])["post"]
    whole = np.concatenate(keys).reshape(-1, 2, 3)
    np.testing.assert_allclose(found.means[0], whole.mean(0), rtol=1e-6)
    for head in range(2):
        vectors, variances = found.vectors[0, head], found.variances[0, head]
        np.testing.assert_allclose(vectors * variances @ vectors.T, np.cov(whole[:, head].T, bias=True), atol=1e-5)


@pytest.mark.parametrize("axes", [GridShape(), GridShape(y=2, x=2), GridShape(data=2)], ids=grids.name)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_same_weights_are_known_on_every_grid(facts, axes, dtype):
    made = load_model(ax.models.Transformer(SHAPE, rngs=nnx.Rngs(0)), grids.lay(axes), dtype)
    check_weights(facts, made.parts, made.params, Path("run"))


@pytest.mark.parametrize("change", CHANGES)
def test_other_weights_are_known(loaded, facts, change):
    name = "blocks.1.attention.qkv.kernel"
    params = {**loaded.params, name: CHANGES[change](loaded.params[name])}
    with pytest.raises(UserError, match="a calibration of these weights"):
        check_weights(facts, loaded.parts, params, Path("run"))


@pytest.mark.parametrize(("group", "share"), [(1, 0.34), (2, 0.56), (4, 1.0), (8, 1.88)])
def test_numbers_read_of_a_kv_heads_cache(group, share):
    """Beside those that a traced step gathers and multiplies, with a quarter of features and keys."""
    shape = ax.models.ModelShape(**LLAMA | {"hidden": 128 * 8, "heads": 8, "kv_heads": 8 // group})
    assert LokiOptions().share_read(shape) == pytest.approx(share, abs=0.005)
