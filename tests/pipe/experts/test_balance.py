"""Balance by routers' biases: they move as the counts of tokens say, in every engine, and loads become even."""

import grids
import numpy as np
import optax
import pytest
from trainers import ids, make_trainer, transformer

import axonn_jax as ax
from axonn_jax import GridShape, UserError
from axonn_jax.core.experts.load import Loads

RATE, STEPS = 0.001, 5
BIASES = [f"blocks.{layer}.mlp.router.bias" for layer in range(grids.MIXTRAL.layers)]


def made(axes, *, rate=RATE, optimizer=None, **options):
    model = transformer(grids.MIXTRAL, moe=ax.MoeConfig(balance_weight=0.0, balance_rate=rate))
    optimizer = optimizer or optax.adamw(3e-3, weight_decay=0.1)
    return make_trainer(model, optimizer, axes, microbatches=4, **options)


def batches(steps):
    return ids(grids.MIXTRAL.vocab, steps, 16, grids.MIXTRAL.seq_len + 1)


def trained(axes, **options):
    trainer = made(axes, **options)
    loads = [float(trainer.step(batch)["largest_load"]) for batch in batches(STEPS)]
    biases = np.stack([np.asarray(trainer.engine.params[name]) for name in BIASES])
    trainer.close()
    return loads, biases


@pytest.fixture(scope="module")
def serial():
    return trained(GridShape())


def test_biases_move_against_the_counts(serial):
    trainer, want = made(GridShape()), np.zeros((len(BIASES), grids.MIXTRAL.experts))
    for load, batch in zip(serial[0], batches(STEPS), strict=True):
        program = trainer.engine.program
        tokens = trainer.engine.batches.shard(batch)
        grads, _, norm = program.gradients(trainer.engine.train_state.model.weights, tokens, None)
        counts = np.stack([np.asarray(grads[name]) for name in BIASES])
        want += RATE * np.sign(counts.mean(-1, keepdims=True) - counts)
        assert load == pytest.approx((counts.max(-1) / counts.mean(-1)).max())
        assert float(trainer.step(batch)["grad_norm"]) == pytest.approx(float(norm), rel=1e-6)
    np.testing.assert_allclose(serial[1], want, atol=1e-6)
    assert np.abs(want).max() > 0.9 * RATE


@pytest.mark.parametrize(
    ("axes", "options"),
    [
        (GridShape(1, 1, 2, 2, expert=2), {"clip": 1e9}),
        pytest.param(GridShape(1, 2, 1, 2, expert=2), {"zero": 1, "offload": "optimizer"}, marks=pytest.mark.slow),
        pytest.param(GridShape(1, 2), {"offload": "optimizer"}, marks=pytest.mark.slow),
        pytest.param(GridShape(2, 1, expert=2), {}, marks=pytest.mark.slow),
        (GridShape(2, 2, 1, 2), {"zero": 1, "offload": "optimizer"}),
    ],
)
def test_loads_and_biases_are_those_of_one_device(axes, options, serial):
    loads, biases = trained(axes, **options)
    np.testing.assert_allclose(loads, serial[0], rtol=1e-6)
    np.testing.assert_allclose(biases, serial[1], atol=1e-6)


def test_without_a_rate_biases_stay_and_weight_decay_is_not_theirs():
    loads, biases = trained(GridShape(), rate=0.0)
    assert not biases.any()
    assert max(loads) > 1.0


def test_excesses_of_a_sum_are_the_sum_of_excesses():
    first, second = np.random.default_rng(1).integers(0, 99, (2, 3, 8)).astype(np.float32)
    loads = Loads(frozenset("b"), 0.0)
    parts = [loads.centred({"b": counts})["b"] for counts in (first, second)]
    np.testing.assert_allclose(parts[0] + parts[1], loads.centred({"b": first + second})["b"], 1e-5)


def test_what_looks_at_all_parameters_is_named_behind_the_balance():
    chain = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1))
    with pytest.raises(UserError, match="clip_by_global_norm"):
        made(GridShape(), optimizer=chain, offload="optimizer")
