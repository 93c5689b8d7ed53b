"""Models with fewer KV heads than `y`, each of which lies on several devices: the texts and scores of one device."""

import json
from dataclasses import asdict
from pathlib import Path

import grids
import numpy as np
import optax
import pytest
from pretrained import generating, weights, write_model
from tiny import LLAMA, PROMPTS, continued, model
from trainers import make_trainer

import axonn_jax as ax
from axonn_jax import GridShape, Sampling, UserError
from axonn_jax.text.inference.weights import load_model, of_model
from axonn_jax.text.loki.attention import LokiAttention
from axonn_jax.text.loki.components import Components, calibrate, check_weights, fingerprint, laid_out, moments

GREEDY = Sampling(temperature=0)
Y4 = GridShape(y=4)
KINDS = {
    "llama": LLAMA,
    "one head, norms, all biases": LLAMA | {"kv_heads": 1, "qk_norm": True, "bias": "all"},
    "window, biases of queries": LLAMA | {"window": 20, "bias": "qkv"},
    "experts": LLAMA | {"experts": 4, "expert_ffn": 16},
    "columns that do not divide": LLAMA | {"hidden": 24, "heads": 8, "head_dim": 3, "positions": "learned"},
}


def texts_and_scores(made, axes, **options):
    generator = ax.Generator(made, grids.lay(axes), slots=2, **options)
    found = generator.generate(PROMPTS, tokens=16, sampling=GREEDY)
    return [text for (text,) in found], generator.score(PROMPTS[1:3])


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_texts_and_scores_are_those_of_one_device(kind):
    made = model(**KINDS[kind])
    axes = GridShape(y=8) if kind == "columns that do not divide" else Y4
    texts, scores = texts_and_scores(made, axes)
    assert texts == continued(made, PROMPTS, 16)
    for found, wanted in zip(scores, texts_and_scores(made, GridShape())[1], strict=True):
        np.testing.assert_allclose(found, wanted, atol=2e-5)


def test_each_device_has_one_head_of_the_cache():
    generator = ax.Generator(model(**LLAMA), grids.lay(GridShape(y=4, x=2)), slots=2)
    generator.generate(PROMPTS[:1], tokens=2)
    (array, _), *_ = generator._store._caches
    assert (generator.shape.kv_heads, array.shape[1]) == (4, 4)
    assert {shard.data.shape[1] for shard in array.addressable_shards} == {1}


@pytest.mark.parametrize(
    "name", ["qwen3", *(pytest.param(name, marks=pytest.mark.slow) for name in ("llama", "mistral"))]
)
def test_texts_of_a_pretrained_directory_are_those_of_transformers(name, tmp_path):
    """Two KV heads on six devices; features of zeros, so that the MLP divides too, change no text."""
    stored = json.loads((Path(__file__).parents[2] / "fixtures" / "generation.json").read_text())[name]
    config = generating(name)
    wider = {key: array if "mlp" not in key else widened(array, config) for key, array in weights(config).items()}
    path = write_model(tmp_path / name, config | {"intermediate_size": 48}, wider)
    generator = ax.Generator(path, grids.lay(GridShape(y=6)), slots=3, stops=())
    assert generator.shape.kv_heads == 6
    found = generator.generate([one["prompt"] for one in stored], tokens=64, sampling=GREEDY)
    assert [text for (text,) in found] == [one["text"] for one in stored]


def widened(array, config):
    """An MLP's weight with 48 features inside."""
    widths = [(0, 48 - size if size == config["intermediate_size"] else 0) for size in array.shape]
    return np.pad(array, widths)


def test_a_run_that_goes_on_gives_its_weights(tmp_path):
    """A generator of a saved checkpoint takes the trainer's newer weights; a training grid stays refused."""
    grid = grids.lay(GridShape(y=2))
    trainer = make_trainer(grids.make_model(ax.models.ModelShape(**LLAMA), grid), optax.sgd(1.0), grid, microbatches=1)
    generator = ax.Generator(trainer.save(tmp_path, 0), grids.lay(Y4), slots=2)
    old = generator.generate(PROMPTS[:2], tokens=8, sampling=GREEDY)
    assert [text for (text,) in old] == continued(trainer.model, PROMPTS[:2], 8)
    trainer.step(np.random.default_rng(0).integers(0, 97, (4, 33)).astype(np.int32))
    generator.update(trainer.model)
    new = generator.generate(PROMPTS[:2], tokens=8, sampling=GREEDY)
    assert old != new
    assert [text for (text,) in new] == continued(trainer.model, PROMPTS[:2], 8)
    with pytest.raises(UserError, match=r"model\.kv_heads = 2: a multiple of y = 4"):
        ax.Trainer(model(**LLAMA), optax.sgd(1.0), grids.lay(Y4))


def test_what_does_not_divide_is_refused():
    with pytest.raises(UserError, match=r"model\.kv_heads = 2"):
        ax.Generator(model(**LLAMA), grids.lay(GridShape(y=8)), slots=2)


def test_loki_chooses_as_on_one_device():
    made = model(**LLAMA)
    shape, alone = made.shape, of_model(made, grids.lay(GridShape()), "float32")
    program = moments(alone.parts, grids.lay(GridShape()).mesh, "float32")
    components: Components = calibrate(program, alone.params, [np.array(PROMPTS[3]).reshape(4, 25)])["post"]
    facts = {"model": json.dumps(asdict(shape))}
    facts["weights"] = json.dumps(fingerprint(alone.parts, alone.params, shape.kv_heads))

    def texts(axes):
        generator = ax.Generator(made, grids.lay(axes), slots=2, attention=LokiAttention(4, 0.5))
        spec, times = generator.programs.extra_spec, generator.shape.kv_heads // shape.kv_heads
        check_weights(facts, generator.programs.parts, generator.params, Path("run"))
        generator.extras = laid_out(components, spec, generator.grid.mesh, times=times)
        return generator.generate(PROMPTS[1:3], tokens=24, sampling=GREEDY)

    assert texts(Y4) == texts(GridShape())
    other = load_model(model(**LLAMA | {"init_std": 0.5}), grids.lay(Y4), "float32")
    with pytest.raises(UserError, match="a calibration of these weights"):
        check_weights(facts, other.parts, other.params, Path("run"))
