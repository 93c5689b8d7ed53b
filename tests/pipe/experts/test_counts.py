"""Counts of experts: float32 in every precision, of text alone, and of the package's own routers alone."""

from dataclasses import replace

import grids
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from trainers import ids, make_trainer, transformer

import axonn_jax as ax
from axonn_jax.core.experts.router import route
from axonn_jax.core.experts.shape import ExpertShape
from axonn_jax.core.grid import GridShape
from axonn_jax.core.models.packed import pack

TINY = ax.models.ModelShape(
    layers=1, hidden=8, heads=2, kv_heads=1, ffn=8, vocab=16, seq_len=64, experts=2, experts_per_token=2,
    positions="rope", norm="rmsnorm", mlp="swiglu", bias=False,
)  # fmt: skip
UNBALANCED = ax.MoeConfig(balance_weight=0.0)
BIAS = "blocks.0.mlp.router.bias"


@pytest.mark.parametrize("options", [{"accumulate": "compute"}, {"offload": "optimizer"}])
def test_more_choices_than_float16_holds(options):
    """70,000 tokens choose each of two experts; nothing moves the biases."""
    given = transformer(TINY, moe=UNBALANCED)
    trainer = make_trainer(given, optax.sgd(1e-3), GridShape(), precision="fp16", **options)
    tokens = ids(16, 1100, 65)
    for _ in range(2):
        metrics = trainer.step(tokens)
    assert float(metrics["largest_load"]) == 1.0
    assert trainer.engine.finite()
    assert not np.asarray(trainer.engine.params[BIAS]).any()


@pytest.mark.parametrize(
    ("axes", "options"), [(GridShape(), {"accumulate": "compute"}), (GridShape(data=2), {"zero": 1})]
)
def test_counts_in_bfloat16_are_exact(axes, options):
    """Weights or sums in bfloat16, of many microbatches: a load is a number of tokens over their mean."""
    shape = replace(TINY, experts=4, experts_per_token=1, init_std=0.3)
    tokens = ids(16, 512, 65)
    largest = []
    for microbatches in (1, 16):
        given, options = transformer(shape, moe=UNBALANCED), {**options, "microbatches": microbatches}
        trainer = make_trainer(given, optax.sgd(1e-30), axes, precision="bf16", **options)
        largest.append(float(trainer.step(tokens)["largest_load"]) * tokens[:, :-1].size / 4)
        weights = trainer.engine.train_state.model.weights
        assert weights[BIAS].dtype == weights["blocks.0.mlp.router.kernel"].dtype == jnp.float32
    assert largest[0] == largest[1] == round(largest[0])


class Gated(nnx.Module):
    """A user's layer, of which an attribute is called as ours are."""

    def __init__(self, name, rngs):
        setattr(self, name, nnx.Linear(8, 4, rngs=rngs))
        self.up, self.down = nnx.Linear(8, 4, rngs=rngs), nnx.Linear(4, 8, rngs=rngs)
        self.chosen = name

    def __call__(self, x):
        return x + self.down(nnx.sigmoid(getattr(self, self.chosen)(x)) * jnp.tanh(self.up(x)))


@pytest.mark.parametrize("pipe", [1, 2])
def test_a_users_router_is_an_ordinary_layer(pipe):
    results = []
    for name in ("router", "switch"):
        layers = [nnx.Embed(16, 8, rngs=nnx.Rngs(0)), Gated(name, nnx.Rngs(1)), nnx.Linear(8, 16, rngs=nnx.Rngs(2))]
        given = ax.models.SequenceModel(layers, optax.softmax_cross_entropy_with_integer_labels)
        trainer = ax.Trainer(given, optax.sgd(1.0), grids.lay(GridShape(pipe)), microbatches=2)
        metrics = trainer.step(ids(16, 4, 9))
        assert "largest_load" not in metrics
        bias = next(value for key, value in trainer.engine.params.items() if key.endswith(f"{name}.bias"))
        results.append((float(metrics["grad_norm"]), np.asarray(bias)))
        trainer.close()
    assert results[0][0] == results[1][0]
    np.testing.assert_array_equal(results[0][1], results[1][1])


def test_scores_that_underflow_leave_gradients_finite():
    moe = ExpertShape(4, 2, 8, router="sigmoid")

    def weight(scores):
        routing = route(scores, jnp.zeros(4), moe)
        return jnp.sum(routing.weights[:, 0]) + jnp.sum(routing.shares[:, 0])

    scores = jnp.full((3, 4), -200.0) - jnp.arange(4.0)
    assert np.isfinite(np.asarray(jax.grad(weight)(scores))).all()
    np.testing.assert_allclose(route(scores, jnp.zeros(4), moe).weights.sum(-1), 1.0, rtol=1e-6)


def packed_rows(fill, share, rows=8, width=33):
    """Rows of two documents and padding; `share` of the tokens count as targets."""
    rng = np.random.default_rng(3)
    packed = []
    for _ in range(rows):
        ids = rng.integers(1, 64, fill)
        counts = rng.random(fill) < share
        counts[[fill // 2 - 1, -1]] = True
        half = fill // 2
        packed.append(pack([ids[:half], ids[half:]], width, [counts[:half], counts[half:]]))
    return np.stack(packed)


def measured(batches, axes, weight):
    """For each batch the gradients of routers and what they count, of a model whose balance has this weight."""
    shape, moe = replace(grids.MIXTRAL, seq_len=32), ax.MoeConfig(balance_weight=weight)
    kept = optax.chain(optax.trace(0.0), optax.scale(1e-30))
    trainer = make_trainer(transformer(shape, moe=moe, packed=True), kept, axes, microbatches=2)
    results = []
    for words in batches:
        load = float(trainer.step(words)["largest_load"])
        states = trainer.engine.opt_state
        traces = [s[0].trace for s in states.values()] if isinstance(states, dict) else [states[0].trace]
        grads = {name: np.asarray(v) for trace in traces for name, v in trace.items() if "router.kernel" in name}
        results.append((grads, load))
    trainer.close()
    return results


@pytest.mark.parametrize(
    "axes", [GridShape(y=2, expert=2), pytest.param(GridShape(pipe=2, expert=2), marks=pytest.mark.slow)]
)
def test_padding_is_not_counted_and_not_balanced(axes):
    """Whatever the padding of rows is that are a third text: loads and gradients are the same."""
    words = packed_rows(12, 1.0)
    others = words.copy()
    others[:, 13:] = np.random.default_rng(5).integers(1, 64, others[:, 13:].shape)
    (grads, load), (same, same_load) = measured([words, others], axes, 1.0)
    assert load == same_load
    for name, grad in grads.items():
        np.testing.assert_allclose(same[name], grad, rtol=1e-4, atol=1e-7)


def test_the_balance_of_few_targets_is_no_louder():
    """Of the mean loss the balance is as large a part with a tenth of the targets as with all; of none it is zero."""
    batches = [packed_rows(33, 1.0), packed_rows(33, 0.1)]
    empty = np.stack([pack([], 33)] * 4)
    batches.append(np.concatenate([batches[0][:4], empty]))
    without, with_balance = (measured(batches, GridShape(), weight) for weight in (0.0, 1.0))
    sizes = [
        np.sqrt(sum(((balanced[name] - grad) ** 2).sum() for name, grad in plain.items()))
        for (plain, _), (balanced, _) in zip(without, with_balance, strict=True)
    ]
    assert sizes[1] == pytest.approx(sizes[0], rel=0.25)
    assert np.isfinite(sizes[2])
