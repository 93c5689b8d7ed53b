"""Generation in slots: the same texts as without a cache, on every grid, whatever the slots and the calls."""

import functools

import grids
import jax
import numpy as np
import pytest
from tiny import GPT, KINDS, LLAMA, PROMPTS, continued, forward, model

import axonn_jax as ax
from axonn_jax import GridShape, Sampling, UserError
from axonn_jax.text.inference.generator import Request

GREEDY = Sampling(temperature=0)
WARM = Sampling(temperature=1.5, top_k=0, top_p=0.9, min_p=0.01, repetition_penalty=1.1, seed=7)
CANDIDATES = Sampling(temperature=1.5, top_k=10, top_p=0.9, seed=7)
WAYS = [(GridShape(), 2, 5), (GridShape(y=2), 3, 16), (GridShape(data=2), 2, 16), (GridShape(y=2, x=2), 1, 3)]
ROUNDING = 5e-6
"""Of log-probabilities, by the order of sums."""


def scored(made, text):
    values = forward(made)(np.array([text]))[0, :-1]
    return np.asarray(jax.nn.log_softmax(values))[np.arange(len(text) - 1), text[1:]]


@pytest.fixture(scope="module")
def kind():
    """Of a name: a model, its texts without a cache, and those of one device with one."""

    @functools.cache
    def of(name):
        made = model(**KINDS[name])
        generator = ax.Generator(made, grids.lay(GridShape()), slots=4)
        drawn = [generator.generate(PROMPTS, tokens=12, sampling=way, samples=2) for way in (WARM, CANDIDATES)]
        return made, continued(made, PROMPTS, 24), drawn

    return of


@pytest.mark.parametrize(
    ("name", "axes", "slots", "steps"),
    [
        pytest.param(name, *way, marks=[] if at == number else [pytest.mark.slow], id=f"{name} {grids.name(way[0])}")
        for number, name in enumerate(KINDS)
        for at, way in enumerate(WAYS)
    ],
)
def test_texts_and_scores_are_those_of_the_whole_sequence(name, axes, slots, steps, kind):
    made, greedy, drawn = kind(name)
    generator = ax.Generator(made, grids.lay(axes), slots=slots, steps=steps)
    assert [text for (text,) in generator.generate(PROMPTS, tokens=24, sampling=GREEDY)] == greedy
    for way, texts in zip((WARM, CANDIDATES), drawn, strict=True):
        assert generator.generate(PROMPTS, tokens=12, sampling=way, samples=2) == texts
    whole = [prompt + text for prompt, text in zip(PROMPTS, greedy, strict=True)]
    for text, found in zip(whole, generator.score(whole), strict=True):
        np.testing.assert_allclose(found, scored(made, text), atol=ROUNDING)


def test_two_samples_differ(kind):
    for first, second in kind("llama")[2][0]:
        assert first != second


@pytest.mark.parametrize("window", [0, 600], ids=["all", "ring"])
def test_prompts_of_several_chunks(window):
    made = model(**LLAMA | {"seq_len": 1300, "layers": 1, "window": window})
    text = np.random.default_rng(0).integers(0, 97, 1290).tolist()
    generator = ax.Generator(made, grids.lay(GridShape(data=2)), slots=2)
    texts = [text[:700], text, text[:2]]  # of which two are scored at a time
    for own, found in zip(texts, generator.score(texts), strict=True):
        np.testing.assert_allclose(found, scored(made, own), atol=ROUNDING)
    prompts = [text[:1275], text[:520], text[:3]]
    found = generator.generate(prompts, tokens=8, sampling=GREEDY)
    assert [own for (own,) in found] == continued(made, prompts, 8)


def test_log_probabilities_are_of_the_models_own_scores():
    made = model(**GPT)
    generator = ax.Generator(made, grids.lay(GridShape(y=2)), slots=1)
    text, logs = list(PROMPTS[1]), []
    for piece in generator.stream([Request(tuple(text), 20)], CANDIDATES, logs=True):
        text += piece.ids
        logs += piece.log_probabilities
    np.testing.assert_allclose(logs, scored(made, text)[len(PROMPTS[1]) - 1 :], atol=ROUNDING)


def test_a_stop_ends_a_text_and_its_slot_goes_to_the_next():
    made = model(**GPT)
    texts = continued(made, PROMPTS, 24)
    stop = texts[1][3]
    generator = ax.Generator(made, grids.lay(GridShape()), slots=1, stops=[stop])
    found = [text for (text,) in generator.generate(PROMPTS, tokens=24, sampling=GREEDY)]
    assert found == [text[: text.index(stop) + 1] if stop in text else text for text in texts]


def test_a_cache_grows_and_is_used_again():
    made = model(**LLAMA | {"seq_len": 700})
    generator = ax.Generator(made, grids.lay(GridShape(y=2)), slots=2)
    short = generator.generate(PROMPTS[:2], tokens=10, sampling=GREEDY)
    assert generator._store.capacity == 64
    long = generator.generate([PROMPTS[1]], tokens=600, sampling=GREEDY)[0][0]
    assert generator._store.capacity == 1024
    assert long[:10] == short[1][0]
    np.testing.assert_allclose(generator.score([PROMPTS[1] + long])[0], scored(made, PROMPTS[1] + long), atol=ROUNDING)
    assert generator.generate(PROMPTS[:2], tokens=10, sampling=GREEDY) == short


def test_an_interrupted_text_leaves_an_engine_of_use():
    made = model(**LLAMA)
    generator = ax.Generator(made, grids.lay(GridShape()), slots=2)
    whole = generator.generate(PROMPTS, tokens=20, sampling=GREEDY)
    pieces = generator.stream([Request(tuple(prompt), 20) for prompt in PROMPTS], GREEDY)
    next(pieces)
    pieces.close()
    assert generator.generate(PROMPTS, tokens=20, sampling=GREEDY) == whole


def test_weights_that_are_not_finite_are_named():
    made = model(**LLAMA)
    made.norm.scale.set_value(made.norm.scale.get_value() * np.nan)
    with pytest.raises(UserError, match="finite scores"):
        ax.Generator(made, grids.lay(GridShape(y=2)), slots=1).generate([[1, 2]], tokens=3)


@pytest.mark.parametrize(
    ("axes", "options", "message"),
    [
        (GridShape(z=2), {}, "grid.z = 2: 1 in generation"),
        (GridShape(data=2), {"slots": 3}, "slots = 3: a multiple of data"),
        (GridShape(), {"slots": 0}, "slots = 0: "),
        (GridShape(), {"slots": 10**9}, "slots = 1000000000: at most"),
        (GridShape(), {"length": 161}, "length = 161: at least 2 and at most model.seq_len = 160"),
        (GridShape(y=3), {}, "model.kv_heads = 2: "),
    ],
)
def test_an_engine_that_cannot_be(axes, options, message):
    with pytest.raises(UserError, match=message):
        ax.Generator(model(**LLAMA), grids.lay(axes), **{"slots": 2, **options})


@pytest.mark.parametrize(
    ("prompt", "tokens", "message"),
    [
        ([], 3, "prompt = '': at least one token"),
        ([97], 3, "prompt = 97: token ids below model.vocab = 97"),
        ([1], 0, "tokens = 0: "),
        ([1] * 150, 11, "tokens = 11: with the prompt's 150 together at most length = 160, not 161"),
    ],
)
def test_a_request_that_cannot_be(prompt, tokens, message):
    generator = ax.Generator(model(**LLAMA), grids.lay(GridShape()), slots=1)
    with pytest.raises(UserError, match=message):
        generator.generate([prompt], tokens=tokens)


def test_a_text_too_short_to_score():
    with pytest.raises(UserError, match="text = '1 tokens'"):
        ax.Generator(model(**LLAMA), grids.lay(GridShape()), slots=1).score([[1]])
