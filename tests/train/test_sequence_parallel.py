"""With the stream's sequence split over `y`, every grid still computes the plain model's loss, gradients and norm."""

import functools
from dataclasses import replace
from itertools import product

import grids
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P
from trainers import make_trainer

from axonn_jax.errors import UserError
from axonn_jax.grid import BATCH_AXES, GridShape
from axonn_jax.models.block_comm import BlockComm
from axonn_jax.models.transformer import Transformer
from axonn_jax.train.config import MemoryConfig, TensorConfig
from axonn_jax.train.engines.step import compile_abstract

CURVE_TOLERANCE = 2e-6  # as for the curves of grids (test_trainer)

SPLIT = BlockComm(sequence_split=True)
SMALL = replace(grids.LLAMA, layers=1)


def split_model(shape):
    return Transformer(shape, rngs=nnx.Rngs(0), comm=SPLIT)


def results(shape, axes, **options):
    """Gradients, loss and norm, under the layers' own names."""
    return grids.gradients(shape, axes, layout={"comm": SPLIT}, **options)


def cases():
    """One, of fourfold y; every grid with y of 2, 4 and 8, every policy, sub-batches and orders are slow."""
    few = [
        ("gpt", GridShape(1, 1, 2, 4, 1), {"activations": "full", "scanned": True}),
    ]
    for model, axes, options in few:
        yield pytest.param(model, axes, options, id="-".join([model, grids.name(axes), *map(str, options.values())]))
    policies = ("none", "full", "dots", "save_collectives")
    for model, axes, policy in product(grids.MODELS, grids.all_grids(2, 4, 8), policies):
        if axes.y > 1:
            options = {"activations": policy, "scanned": policy != "none"}
            name = f"{model}-{grids.name(axes)}-{policy}-slow"
            yield pytest.param(model, axes, options, id=name, marks=pytest.mark.slow)
    ordered = (
        {"sub_batches": 2},
        {"ordered": True},
        {"sub_batches": 2, "ordered": True, "activations": "save_collectives"},
    )
    for model, axes, options in product(grids.MODELS, (GridShape(1, 1, 2, 2, 2), GridShape(1, 2, 1, 2, 2)), ordered):
        name = "-".join([model, grids.name(axes), *options, "slow"])
        yield pytest.param(model, axes, options, id=name, marks=pytest.mark.slow)


@pytest.mark.parametrize(("model", "axes", "options"), list(cases()))
def test_loss_gradients_and_norm_equal_the_plain_model(model, axes, options):
    grids.check_gradients(results(grids.MODELS[model], axes, **options), grids.reference(model))


@pytest.mark.parametrize(
    "options",
    [{}, *(pytest.param({"sub_batches": 2, "activations": p}, marks=pytest.mark.slow) for p in ("none", "full"))],
)
def test_dropout_drops_the_same_entries(options):
    shape = replace(grids.GPT, layers=1, dropout=0.25)
    plain_results = grids.gradients(shape, GridShape())
    grids.check_gradients(results(shape, GridShape(1, 1, 2, 2, 2), **options), plain_results)


def curve(model, axes, *, microbatches=2, **options):
    trainer = make_trainer(model, optax.adamw(3e-3), grids.lay(axes), clip=0.5, microbatches=microbatches, **options)
    batches = np.random.default_rng(0).integers(0, SMALL.vocab, (4, 8, SMALL.seq_len + 1))
    losses = [float(trainer.step(batches[step % 4])["loss"]) for step in range(6)]
    held_out = trainer.evaluate([batches[0]])
    trainer.close()
    return [*losses, held_out], trainer


@functools.cache
def one_device():
    return curve(lambda: Transformer(SMALL, rngs=nnx.Rngs(0)), GridShape())[0]


@pytest.mark.parametrize(
    ("axes", "options"),
    [
        (GridShape(2, 1, 1, 2, 2), {}),
        pytest.param(GridShape(1, 2, 1, 4), {"zero": 1}, marks=pytest.mark.slow),
        pytest.param(GridShape(2, 1, 2, 2), {"activations": "full"}, marks=pytest.mark.slow),
        pytest.param(GridShape(2, 1, 1, 4), {"activations": "save_collectives"}, marks=pytest.mark.slow),
        pytest.param(GridShape(2, 2, 1, 2), {"activations": "dots", "zero": 1}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_training_follows_the_curve_of_one_device(axes, options):
    """With a pipeline the stream travels as it lies: split."""
    losses, trainer = curve(lambda: split_model(SMALL), axes, **options)
    np.testing.assert_allclose(losses, one_device(), rtol=CURVE_TOLERANCE)
    if axes.pipe > 1:
        first, *_ = trainer.engine._plan(8, SMALL.seq_len + 1)
        assert first[-1].stretch.y.sharding.spec == P(BATCH_AXES, "y", "x")


@pytest.mark.slow
@pytest.mark.parametrize("activations", ["none", "full"])
def test_a_program_needs_less_memory(activations):
    """Of a model whose activations are most of its temporaries."""
    shape = replace(grids.GPT, layers=4, hidden=64, ffn=128, seq_len=512)

    def temporaries(**options):
        grid = grids.lay(GridShape(y=4))
        return compile_abstract(
            shape, grid, optax.sgd(0.1), sequences=4, memory=MemoryConfig(activations=activations),
            tensor=TensorConfig(scan_layers="yes"), **options,
        ).memory_analysis().temp_size_in_bytes  # fmt: skip

    assert temporaries(comm=SPLIT) < 0.8 * temporaries()


def test_sequences_that_do_not_split_are_refused_before_anything_compiles():
    odd = replace(grids.GPT, seq_len=18)
    with pytest.raises(UserError, match=r"model.seq_len = 18: a multiple of y .* = 4; nearest: 16 or 20; or grid.y"):
        make_trainer(nnx.eval_shape(lambda: split_model(odd)), optax.sgd(0.1), grids.lay(GridShape(y=4)))
    with pytest.raises(UserError, match=r"model.seq_len = 18"):
        make_trainer(
            nnx.eval_shape(lambda: split_model(odd)), optax.sgd(0.1), grids.lay(GridShape(2, y=4)), microbatches=2
        )
    trainer = make_trainer(split_model(grids.GPT), optax.sgd(0.1), grids.lay(GridShape(y=4)))
    with pytest.raises(UserError, match=r"sequence length = 7: with sequence parallelism a multiple of y = 4"):
        trainer.step(np.zeros((2, 8), np.int32))
