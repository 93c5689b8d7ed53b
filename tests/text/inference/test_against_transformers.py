"""Greedy texts of five families, token for token those of transformers' `generate`, on every grid."""

import json
from pathlib import Path

import grids
import pytest
from pretrained import generating, weights, write_model

import axonn_jax as ax
from axonn_jax import GridShape, Sampling

TEXTS = json.loads((Path(__file__).parents[2] / "fixtures" / "generation.json").read_text())
GREEDY = Sampling(temperature=0)
WAYS = [
    (GridShape(), 3, 16), (GridShape(), 1, 5), (GridShape(y=2), 2, 64), (GridShape(x=2), 3, 16),
    (GridShape(data=2), 2, 16), (GridShape(y=2, x=2), 4, 7),
]  # fmt: skip


@pytest.fixture(scope="module", params=TEXTS)
def family(request, tmp_path_factory):
    config = generating(request.param)
    path = write_model(tmp_path_factory.mktemp("models") / request.param.replace(" ", ""), config, weights(config))
    return path, TEXTS[request.param]


@pytest.mark.parametrize(
    ("axes", "slots", "steps"),
    [
        pytest.param(*way, marks=[pytest.mark.slow] if at < 5 else [], id=f"{grids.name(way[0])} {way[1]} {way[2]}")
        for at, way in enumerate(WAYS)
    ],
)
def test_greedy_texts_are_those_of_transformers(family, axes, slots, steps):
    path, texts = family
    generator = ax.Generator(path, grids.lay(axes), slots=slots, steps=steps, stops=())
    found = generator.generate([one["prompt"] for one in texts], tokens=64, sampling=GREEDY)
    assert [text for (text,) in found] == [one["text"] for one in texts]


def test_a_text_ends_at_any_id_that_a_file_names(tmp_path):
    """As chat models need: the end of a turn stands in generation_config.json alone."""
    name = next(iter(TEXTS))
    config = generating(name) | {"eos_token_id": [299, 0]}
    path = write_model(tmp_path / "model", config, weights(config))
    (path / "generation_config.json").write_text('{"eos_token_id": [262, 276, 9999]}')
    prompts, whole = ([one[key] for one in TEXTS[name]] for key in ("prompt", "text"))
    generator = ax.Generator(path, grids.lay(GridShape()), slots=2)
    assert generator.programs.stops == (299, 0, 262, 276)
    found = generator.generate(prompts, tokens=64, sampling=GREEDY)
    for (text,), longer in zip(found, whole, strict=True):
        ends = [at for at, token in enumerate(longer) if token in generator.programs.stops]
        assert text == longer[: ends[0] + 1 if ends else None]
