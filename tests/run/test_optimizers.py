"""Optimizers that ask for the loss get it in every engine, and those that ask for more are refused by name."""

import functools
from dataclasses import replace

import grids
import jax
import numpy as np
import optax
import pytest
from trainers import make_trainer, params

from axonn_jax import GridShape, UserError
from axonn_jax.core.engines.optimizer import make_optimizer
from axonn_jax.core.settings import TrainConfig
from axonn_jax.files.huggingface.entries import to_huggingface

PLATEAU = {"factor": 0.5, "patience": 1, "rtol": 0.5}
RATE, STEPS = 0.1, 5
BATCH = np.random.default_rng(0).integers(0, 64, (8, 9))


@pytest.mark.parametrize(
    ("model", "axes", "options"),
    [
        ("gpt", GridShape(1, 2), {"scan_layers": "yes"}),
        pytest.param("gpt", GridShape(1, 2), {"offload": "optimizer"}, marks=pytest.mark.slow),
        ("experts", GridShape(1, 2), {"offload": "optimizer"}),
        ("gpt", GridShape(2, 2), {}),
    ],
)
def test_an_optimizer_gets_the_loss(model, axes, options):
    """Weights move by the rate that optax says of the losses in the metrics, though those hardly fall."""
    shape = {"gpt": replace(grids.GPT, seq_len=8), "experts": replace(grids.MIXTRAL, layers=1, seq_len=8)}[model]
    plateau = optax.contrib.reduce_on_plateau(**PLATEAU)
    model_of = grids.model_on(shape, grids.lay(GridShape()))
    trainer = make_trainer(model_of, optax.chain(optax.sgd(RATE), plateau), grids.lay(axes), microbatches=2, **options)
    state, scales, moves = plateau.init({}), [], []
    for _ in range(STEPS):
        before, metrics, after = params(trainer), trainer.step(BATCH), params(trainer)
        moved = sum(float(((after[name].astype(float) - before[name]) ** 2).sum()) for name in before) ** 0.5
        moves.append(moved / float(metrics["grad_norm"]) / RATE)
        with jax.numpy_dtype_promotion("standard"):
            _, state = plateau.update({}, state, value=np.float32(metrics["loss"]))
        scales.append(float(state.scale))
    trainer.close()
    np.testing.assert_allclose(moves, scales, rtol=1e-4)
    assert scales[-1] < 0.3


REFUSED = {
    "scale_by_zoom_linesearch": optax.lbfgs(0.1),
    "lookahead": optax.lookahead(optax.sgd(0.1), 2, 0.5),
    "scale_by_backtracking_linesearch": optax.chain(optax.sgd(0.1), optax.scale_by_backtracking_linesearch(4)),
    "str": "adamw",
}


@pytest.mark.parametrize(
    ("model", "pipe", "ema"), [("gpt", 1, 0.0), ("gpt", 1, 0.5), ("gpt", 2, 0.0), ("experts", 2, 0.0)]
)
def test_what_asks_for_more_is_one_line(model, pipe, ema):
    shape = {"gpt": grids.GPT, "experts": grids.MIXTRAL}[model]
    says = dict.fromkeys(REFUSED, "an optax transformation of gradients") | {"MultiSteps": "the transformation inside"}
    for name, accepted in says.items():
        optimizer = REFUSED.get(name, optax.MultiSteps(optax.sgd(0.1), 2))
        with pytest.raises(UserError, match=rf"^optimizer = '{name}': {accepted}[^\n]*$"):
            make_trainer(grids.model_on(shape, grids.lay(GridShape())), optimizer, GridShape(pipe), ema=ema)


NAMED = {
    "zero": (GridShape(data=2, z=2, y=2), {"zero": 1}),
    "scanned": (GridShape(x=2), {"scan_layers": "yes"}),
    "offload": (GridShape(data=2), {"offload": "optimizer", "bucket": 2000}),
    "pipe": (GridShape(pipe=2, y=2), {}),
}


@functools.cache
def weights_after(name, where=None):
    """Parameters after three steps with an optimizer of `train.optimizer`."""
    axes, options = NAMED.get(where, (GridShape(), {}))
    model_of = grids.model_on(replace(grids.GPT, seq_len=8), grids.lay(GridShape()))
    made = make_optimizer(TrainConfig(optimizer=name, lr=1e-2, steps=10))
    trainer = make_trainer(model_of, made, grids.lay(axes), microbatches=2, **options)
    for _ in range(3):
        trainer.step(BATCH)
    trainer.close()
    return params(trainer)


@pytest.mark.parametrize("where", NAMED)
@pytest.mark.parametrize("name", ["muon", "adamw_bf16"])
def test_a_named_optimizer_is_the_same_everywhere(name, where):
    plain, got = weights_after(name), weights_after(name, where)
    scale = max(np.abs(value).max() for value in plain.values())
    for key, value in plain.items():
        # Steps are of 1e-2; a rounding to bfloat16 that falls the other way is 1/256 of a moment.
        apart = 4e-4 if name == "adamw_bf16" else 2e-5
        np.testing.assert_allclose(got[key], value, rtol=0, atol=apart * scale, err_msg=key)


@pytest.mark.parametrize("name", ["adafactor", "muon"])
def test_padding_of_the_vocabulary_is_no_part_of_a_named_optimizers_means(name, tmp_path):
    """Of 131 tokens on y 4 with an average, and without one gone on with on y 2 pipe 2: the losses of one device.

    Four trainers are compiled.
    """
    shape = replace(grids.LLAMA, layers=1, hidden=128, heads=4, kv_heads=4, vocab=131, seq_len=8)

    def made(ema=0.0, **axes):
        optimizer = make_optimizer(TrainConfig(optimizer=name, lr=2e-2, steps=10))
        return make_trainer(shape, optimizer, GridShape(**axes), ema=ema)

    def losses(trainer, steps):
        return [float(trainer.step(BATCH)["loss"]) for _ in range(steps)]

    plain, wide = made(0.5), made(0.5, y=4)
    want = losses(plain, 4)
    assert losses(wide, 4) == pytest.approx(want, rel=1e-5)
    assert wide.evaluate([BATCH]) == pytest.approx(plain.evaluate([BATCH]), rel=1e-5)
    wide, piped = made(y=4), made(pipe=2, y=2)
    losses(wide, 2)
    assert piped.load(wide.save(tmp_path, 2)) == 2
    assert losses(piped, 2) == pytest.approx(want[2:], rel=1e-5)
    piped.close()


GROUPED = replace(grids.LLAMA, layers=1, hidden=32, heads=4, kv_heads=2, ffn=48, seq_len=8)
NAMED_MUON = make_optimizer(TrainConfig(optimizer="muon", lr=1e-2, weight_decay=0.0, schedule="constant", steps=10))


def published_step(grad):
    """Return the first step of the published Muon (arXiv 2502.16982, algorithm 1 and equation 4), of rate 1e-2."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = grad.astype(np.float64) / np.linalg.norm(grad)
    for _ in range(5):
        square = x @ x.T
        x = a * x + (b * square + c * square @ square) @ x
    return -1e-2 * 0.2 * max(grad.shape) ** 0.5 * x


def first_step(optimizer, axes):
    """Return what a step adds to the weights, by Hugging Face's names."""
    trainer = make_trainer(grids.model_on(GROUPED, grids.lay(GridShape())), optimizer, grids.lay(axes), clip=0.0)
    before = params(trainer)
    trainer.step(BATCH)
    after = params(trainer)
    trainer.close()
    return to_huggingface({name: after[name] - before[name] for name in before}, GROUPED)


@pytest.mark.parametrize("axes", [GridShape(), GridShape(z=2, y=2)], ids=str)
@pytest.mark.parametrize("optimizer", [NAMED_MUON, optax.contrib.muon(1e-2, consistent_rms=0.2)], ids=["ours", "optax"])
def test_muon_takes_queries_keys_and_values_as_matrices_of_their_own(optimizer, axes):
    grads, steps = first_step(optax.sgd(-1.0), GridShape()), first_step(optimizer, axes)
    kernels = [name for name in grads if "_proj" in name]
    assert len(kernels) == 7
    for name in kernels:
        want = published_step(grads[name])
        # Gradients are differences of weights a hundred times as large, which the iteration makes larger.
        assert np.linalg.norm(steps[name] - want) < 5e-4 * np.linalg.norm(want), name


def test_muons_adamw_leaves_norms_alone():
    """Without decay of norms they are as if nothing decayed; AdamW's first step is the rate, without Nesterov's."""
    decayed = make_optimizer(TrainConfig(optimizer="muon", lr=1e-2, weight_decay=0.5, schedule="constant", steps=10))
    plain, steps = first_step(NAMED_MUON, GridShape()), first_step(decayed, GridShape())
    for name, step in steps.items():
        if "norm" in name:
            np.testing.assert_array_equal(step, plain[name], err_msg=name)
            np.testing.assert_allclose(np.abs(step), 1e-2, rtol=1e-2, err_msg=name)
        else:
            assert np.abs(step - plain[name]).max() > 1e-5, name


def test_labels_that_know_one_kernel_alone_are_refused_with_muon():
    names = {"blocks.0.attention.qkv.kernel": optax.contrib.MuonDimensionNumbers()}
    trained = params(make_trainer(GROUPED, optax.sgd(0.1), GridShape()))
    numbers = {name: names.get(name) for name in trained}
    says = "^optimizer = .*blocks.0.attention.qkv.query.kernel.*: one whose masks and labels are functions"
    with pytest.raises(UserError, match=says):
        make_trainer(GROUPED, optax.contrib.muon(0.1, muon_weight_dimension_numbers=numbers), GridShape())


def test_an_optimizer_that_draws_noise_is_the_same_on_every_grid():
    noisy = optax.noisy_sgd(1e-2, key=jax.random.key(0))
    plain = first_step(noisy, GridShape())
    for axes in GridShape(data=2), GridShape(z=2, y=2):
        for name, step in first_step(noisy, axes).items():
            np.testing.assert_allclose(step, plain[name], rtol=0, atol=1e-7, err_msg=name)
