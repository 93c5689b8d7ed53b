"""A vocabulary that divides over no grid: padded in table and head, and nobody can tell."""

from dataclasses import replace
from functools import partial

import grids
import jax
import jax.numpy as jnp
import numpy as np
import optax
import plain
import pytest
from jax.sharding import NamedSharding
from trainers import make_trainer

from axonn_jax.core.checkpoint.manifest import read
from axonn_jax.core.engines.program import StageProgram
from axonn_jax.core.grid import GridShape
from axonn_jax.core.models.presets import preset
from axonn_jax.core.models.vocabulary import fit_vocabulary
from axonn_jax.core.tensor import kernel_choice
from axonn_jax.core.tensor.params import split_module
from axonn_jax.files.huggingface.entries import from_huggingface, to_huggingface
from axonn_jax.planning.communication import StepSpec, predict
from axonn_jax.text.inference.programs import logits

PRIME = 61
SHAPES = {name: replace(shape, vocab=PRIME) for name, shape in grids.MODELS.items()}  # a tied table, a head of its own


def whole_model(shape):
    """On one device, as a caller has it."""
    parts = split_module(grids.make_model(shape, grids.lay(GridShape())))
    return parts.merge({name: jnp.asarray(p, jnp.float32) for name, p in grids.host_params(shape).items()})


@pytest.mark.parametrize(
    ("model", "axes", "bytes_of_a_part"),
    [
        ("gpt", GridShape(1, 1, 2, 2, 2), 3000),  # 64 tokens of 32 logits: in three parts
        ("llama", GridShape(1, 1, 2, 4, 1), 2**30),  # the last device along y has 3 of 16 columns too many
        pytest.param("gpt", GridShape(1, 1, 8, 1, 1), 2**30, marks=pytest.mark.slow),
        pytest.param("llama", GridShape(1, 2, 1, 2, 2), 3000, marks=pytest.mark.slow),
    ],
)
def test_loss_and_gradients_are_the_plain_models(monkeypatch, model, axes, bytes_of_a_part):
    monkeypatch.setattr(kernel_choice, "LOGITS_BYTES", bytes_of_a_part)
    shape, grid = SHAPES[model], grids.lay(axes)
    parts = split_module(fit_vocabulary(whole_model(shape), axes))
    params = {name: jax.device_put(p, NamedSharding(grid.mesh, parts.specs[name])) for name, p in parts.params.items()}
    program = StageProgram(parts, grid)
    tokens = grids.tokens(PRIME, 2, 8, shape.seq_len)
    grads, loss, norm = jax.jit(program.gradients)(params, jax.device_put(tokens, program.batch_sharding()), None)
    found = {name: np.asarray(grad, np.float64) for name, grad in grads.items()}
    for name, dim in (("embedding.table", 0), ("head.kernel", 1)):
        if name in found:
            found[name], beyond = np.split(found[name], [PRIME], dim)
            assert beyond.size
            assert not beyond.any()
    want_loss, want_grads, want_norm = plain.reference(
        grids.host_params(shape), shape, tokens.reshape(-1, shape.seq_len + 1)
    )
    grids.check_gradients((found, float(loss), float(norm)), (want_grads, want_loss, want_norm))


def test_scores_beyond_the_vocabulary_are_never_drawn():
    shape, axes = SHAPES["gpt"], GridShape(1, 1, 1, 4, 1)
    parts = split_module(fit_vocabulary(whole_model(shape), axes))
    forward = jax.jit(partial(logits, parts, grids.lay(axes).mesh))
    found = np.asarray(forward(parts.params, jnp.zeros((1, 4), jnp.int32)))
    assert found.shape[-1] == 64
    assert np.isneginf(found[..., PRIME:]).all()
    assert np.isfinite(found[..., :PRIME]).all()


def test_any_grid_goes_on_from_what_any_grid_saved_a_pipeline_included(monkeypatch, tmp_path):
    """Losses of a step with 64 rows at either end of a pipe, of one with 62, and of one with the 61 that there are."""
    monkeypatch.setattr(kernel_choice, "LOGITS_BYTES", 3000)  # the loss in parts, in the last stage's programs too
    shape = SHAPES["gpt"]
    batch = grids.tokens(PRIME, 1, 8, shape.seq_len)[0]

    def trainer(axes):
        return make_trainer(whole_model(shape), optax.adamw(1e-2), grids.lay(axes), microbatches=1)

    alone = trainer(GridShape())
    want = [float(alone.step(batch)["loss"]) for _ in range(3)]
    first = trainer(GridShape(2, 1, 2, 2, 1))
    losses = [float(first.step(batch)["loss"])]
    saved = first.save(tmp_path / "pipe", 1)
    first.close()
    assert read(saved).arrays["params.embedding.table"].shape == (PRIME, shape.hidden)
    second = trainer(GridShape(1, 2, 1, 2, 1))
    assert second.load(saved) == 1
    losses.append(float(second.step(batch)["loss"]))
    alone.load(second.save(tmp_path / "y", 2))
    losses.append(float(alone.step(batch)["loss"]))
    # The first loss is of the same weights. Adam's first steps are of size lr whatever the gradient, so where one is
    # nearly zero the rounding of another order of summation decides: differences of some eps grow a little each step.
    np.testing.assert_allclose(losses, want, rtol=64 * grids.EPS)
    np.testing.assert_array_equal(np.asarray(second.engine.params["embedding.table"])[PRIME:], 0)


@pytest.mark.bits
def test_parameters_born_on_a_grid_are_those_of_one_device():
    shape, axes = SHAPES["llama"], GridShape(1, 1, 2, 2, 2)
    whole = split_module(grids.make_model(shape, grids.lay(GridShape()))).params
    born = split_module(grids.make_model(shape, grids.lay(axes))).params
    np.testing.assert_array_equal(np.asarray(born["embedding.table"])[:PRIME], whole["embedding.table"])
    np.testing.assert_array_equal(np.asarray(born["head.kernel"])[:, :PRIME], whole["head.kernel"])
    assert born["head.kernel"].shape[1] == 64


def test_gpt2s_vocabulary_fits_every_grid_and_the_plan_counts_its_padding():
    shape = preset("gpt2")
    for parts in range(2, 29):
        shape.check_grid(GridShape(1, 1, 1, 1, 1))
        assert shape.padded_vocab(parts) % parts == 0
        assert 0 < shape.padded_vocab(parts) - 50_257 < parts
    work = StepSpec(shape, GridShape(1, 1, 4, 1, 1), sequences=4)
    (gathered,) = [one for one in predict(work) if one.name == "embedding" and one.kind == "all-gather"]
    assert gathered.buffer_bytes == 50_260 * 768 * 4


def test_hugging_face_tensors_come_and_go_without_the_padding():
    shape = SHAPES["gpt"]
    theirs = to_huggingface(grids.host_params(shape), shape)
    parts = split_module(fit_vocabulary(whole_model(shape), GridShape(1, 1, 2, 2, 1)))
    assert parts.params["embedding.table"].shape[0] == 64
    back = to_huggingface({name: np.asarray(p) for name, p in parts.params.items()}, shape)
    assert back["transformer.wte.weight"].shape == (PRIME, shape.hidden)
    np.testing.assert_array_equal(back["transformer.wte.weight"], theirs["transformer.wte.weight"].astype(np.float32))
    assert from_huggingface(back, shape)["embedding.table"].shape == (PRIME, shape.hidden)
