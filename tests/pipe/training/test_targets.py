"""Which targets count: negative ids are none, rows may have none at all, and the loss is the mean over all others."""

import functools
from dataclasses import replace

import grids
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from trainers import make_trainer, params, same, transformer

import axonn_jax as ax
from axonn_jax import GridShape, UserError
from axonn_jax.core.memory.host_arrays import materialize
from axonn_jax.core.models.packed import pack
from axonn_jax.core.tensor.params import split_module

SHAPE = replace(grids.GPT, layers=1)
EXPERTS = replace(grids.MIXTRAL, layers=1)
LENGTHS = (17, 9, 1, 17, 2, 1, 6, 17)  # of one id there is no target: such a row fills the batch up


def batch(vocab, behind=(-1, -100)):
    """Rows of so many ids, negative ones behind them."""
    rows = np.random.default_rng(3).integers(0, vocab, (len(LENGTHS), 17))
    for number, (row, length) in enumerate(zip(rows, LENGTHS, strict=True)):
        row[length:] = behind[number % len(behind)]
    return rows


@functools.cache
def plain():
    """Loss, gradients and their norm of the layers on one device, every row's losses cut off behind its ids."""
    parts = split_module(ax.models.Transformer(SHAPE, rngs=nnx.Rngs(0)))
    rows = batch(SHAPE.vocab, behind=(5,))
    mask = np.arange(1, 17) < np.asarray(LENGTHS)[:, None]

    def mean(params):
        logits = parts.merge(params)(jnp.asarray(rows[:, :-1]))
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.asarray(rows[:, 1:]))
        return jnp.sum(losses, where=jnp.asarray(mask)) / float(mask.sum())

    with jax.default_device(jax.devices()[0]):
        loss, grads = jax.jit(jax.value_and_grad(mean))(parts.params)
    grads = {name: np.asarray(grad, np.float64) for name, grad in grads.items()}
    return float(loss), grads, sum(float((grad**2).sum()) for grad in grads.values()) ** 0.5


@pytest.mark.parametrize("axes", [GridShape(1, 2, 1, 2), GridShape(2, 2)], ids=str)
def test_ids_below_zero_are_no_targets(axes):
    want, grads, norm = plain()
    trainer = make_trainer(SHAPE, optax.trace(0.0), axes, microbatches=4, precision="fp32")
    rows = batch(SHAPE.vocab)
    assert trainer.evaluate([rows] * 2) == pytest.approx(want, rel=grids.SCALAR_TOLERANCE)
    beyond = rows.copy()
    beyond[6, 2] = SHAPE.vocab
    assert np.isnan(trainer.evaluate([beyond]))
    before = params(trainer)
    skipped = trainer.engine.step(np.where(np.arange(17) > 0, -1, rows))  # as where other processes have targets
    assert int(skipped["skipped"]) == 1
    same(trainer.engine.params, before)
    metrics = trainer.step(rows)
    assert float(metrics["loss"]) == pytest.approx(want, rel=grids.SCALAR_TOLERANCE)
    assert float(metrics["grad_norm"]) == pytest.approx(norm, rel=grids.SCALAR_TOLERANCE)
    state = {name.partition(".trace.")[2]: value for name, value in materialize(trainer.engine.state()).items()}
    for name, grad in grads.items():
        np.testing.assert_allclose(state[name], grad, atol=grids.GRADIENT_TOLERANCE * np.abs(grad).max(), err_msg=name)
    with pytest.raises(
        UserError, match=r"^batch = \(8, 17\): rows of ids from 0 with at least one target that counts$"
    ):
        trainer.step(np.full((8, 17), -100))
    trainer.close()


def test_experts_see_what_they_see_of_the_same_documents_in_packed_rows():
    """Filler rows and what is behind a row's ids choose no expert, and weigh nothing in the balance loss."""
    rows, moe = batch(EXPERTS.vocab), ax.MoeConfig(balance_weight=0.1)
    packed = np.stack([pack([row[:length]], 17) for row, length in zip(rows, LENGTHS, strict=True)])
    results = []
    for grid, words, options in (
        (GridShape(), packed, {"packed": True}),
        (GridShape(expert=2, y=2), rows, {}),
        (GridShape(2, 2), rows, {}),
    ):
        model = transformer(EXPERTS, moe=moe, **options)
        trainer = make_trainer(model, optax.sgd(0.1), grid, microbatches=4, precision="fp32")
        results.append({name: float(value) for name, value in trainer.step(words).items()})
        trainer.close()
    assert results[1] == pytest.approx(results[0], rel=2e-6)
    assert results[2] == pytest.approx(results[0], rel=2e-6)


def test_a_model_of_flax_layers_never_meets_an_id_that_is_none():
    """`nnx.Embed` gives NaN for ids beyond it, here in a row without targets, and the last class's row for -1."""
    rows = batch(20)
    rows[2, 0] = 99
    rngs = nnx.Rngs(0)
    layers = [nnx.Embed(20, 16, rngs=rngs), nnx.Linear(16, 20, rngs=rngs)]
    real = rows[:, 1:] >= 0
    logits = layers[1](
        layers[0](jnp.asarray(np.where(real.any(axis=1, keepdims=True), np.maximum(rows, 0), 0)[:, :-1]))
    )
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.asarray(np.maximum(rows[:, 1:], 0)))
    want = float(losses[real].mean())
    model = ax.models.SequenceModel(layers, optax.softmax_cross_entropy_with_integer_labels)
    trainer = ax.Trainer(model, optax.sgd(0.1), grids.lay(GridShape(1, 2)), microbatches=2)
    assert trainer.evaluate([rows]) == pytest.approx(want, rel=grids.SCALAR_TOLERANCE)
    assert float(trainer.step(rows)["loss"]) == pytest.approx(want, rel=grids.SCALAR_TOLERANCE)
