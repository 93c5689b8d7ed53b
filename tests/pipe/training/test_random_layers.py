"""Flax layers that draw random numbers, in a list: masks by row, off in an evaluation; and state that is refused."""

import functools

import grids
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from trainers import losses, make_trainer

import axonn_jax as ax
from axonn_jax import GridShape, UserError
from axonn_jax.core.pruned.masks import random_masks
from axonn_jax.core.tensor.elementwise import DropoutKey

VOCAB, WIDTH, STEPS = 24, 8, 4
BATCHES = np.random.default_rng(0).integers(0, VOCAB, (STEPS, 8, 7))
# Sums of another order, and weights of 8 bits; another seed's masks change these losses by 4e-3 to 3e-2.
TOLERANCE = {"fp32": 2e-6, "bf16": 1e-3}


class Noisy(nnx.Module):
    """A user's layer: attention that drops, and noise of its own in training."""

    def __init__(self, rngs):
        self.attention = nnx.MultiHeadAttention(2, WIDTH, dropout_rate=0.3, decode=False, rngs=rngs)
        self.rngs, self.deterministic = rngs, False

    def __call__(self, x):
        x = x + self.attention(x)
        return x if self.deterministic else x * (1 + 0.1 * jax.random.normal(self.rngs.noise(), x.shape, x.dtype))


class Deep(nnx.Module):
    """Layers that drop, stacked, with streams stacked as well."""

    def __init__(self, rngs):
        self.stack = nnx.split_rngs(splits=2)(nnx.vmap(mlp))(rngs)

    def __call__(self, x):
        return nnx.scan(lambda layer, x: layer(x), in_axes=(0, nnx.Carry), out_axes=nnx.Carry)(self.stack, x)


def mlp(rngs):
    return nnx.Sequential(nnx.Linear(WIDTH, WIDTH, rngs=rngs), nnx.Dropout(0.2, rngs=rngs))


def model(*middle, **streams):
    def make():
        rngs = nnx.Rngs(0, **{"dropout": 1, **streams})
        between = [kind(rngs) for kind in middle]
        layers = [nnx.Embed(VOCAB, WIDTH, rngs=rngs), *between, nnx.Linear(WIDTH, VOCAB, rngs=rngs)]
        return ax.models.SequenceModel(layers, optax.softmax_cross_entropy_with_integer_labels)

    return make


def dropping(rngs, **options):
    return nnx.Dropout(0.5, rngs=rngs, **options)


NOISY = model(Noisy, *[mlp] * 2)  # in a pipeline layers that are alike share programs


def curve(make, axes=None, steps=STEPS, load=None, save=None, **options):
    """Losses of steps, and that of an evaluation."""
    options = {"precision": "fp32", "microbatches": 1, **options}
    trainer = make_trainer(make, optax.adam(3e-2), GridShape(**(axes or {})), **options)
    first = trainer.load(load) if load else 0
    found = losses(trainer, BATCHES[first:steps])
    if save:
        trainer.save(save, steps)
    found.append(trainer.evaluate([BATCHES[0]]))
    trainer.close()
    return found


@functools.cache
def serial(make=NOISY):
    return curve(make)


@pytest.mark.parametrize(
    ("axes", "options"),
    [
        ({}, {"microbatches": 2, "activations": "full"}),
        ({"data": 2, "z": 2}, {"sub_batches": 2, "zero": 1, "offload": "optimizer"}),
        pytest.param({"pipe": 2}, {"microbatches": 4}, marks=pytest.mark.slow),
        pytest.param({"pipe": 2, "data": 2}, {"microbatches": 2, "activations": "offload"}, marks=pytest.mark.slow),
        pytest.param({"data": 2}, {"microbatches": 2, "precision": "bf16", "zero": 1}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_masks_do_not_depend_on_the_grid(axes, options):
    tolerance = TOLERANCE[options.get("precision", "fp32")]
    with jax.numpy_dtype_promotion("standard"):  # as for users, whose layers mix dtypes
        found = curve(NOISY, axes, **options)
    np.testing.assert_allclose(found, serial(), rtol=tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("axes", [{"data": 2}, {"pipe": 2}], ids=str)
def test_stacked_streams_begin_from_the_step_too(axes):
    stacked = model(Deep, Deep)
    curves = curve(stacked, axes, microbatches=2), serial(stacked)
    np.testing.assert_allclose(*curves, rtol=TOLERANCE["fp32"])


def test_a_run_goes_on_with_the_masks_it_would_have_had(tmp_path):
    curve(NOISY, steps=2, save=tmp_path)
    rest = curve(NOISY, {"pipe": 2}, microbatches=4, load=tmp_path)
    np.testing.assert_allclose(rest, serial()[2:], rtol=TOLERANCE["fp32"])


def test_an_evaluation_drops_nothing():
    plain, dropped = curve(model(), steps=0), curve(model(dropping), steps=0)
    assert dropped == plain
    options = {"steps": 0, "microbatches": 2}
    assert curve(model(dropping), {"pipe": 2}, **options) == pytest.approx(plain, rel=TOLERANCE["fp32"])
    kept = curve(model(functools.partial(dropping, deterministic=True)))  # as its owner wants it
    np.testing.assert_allclose(kept, curve(model()), rtol=TOLERANCE["fp32"])


def test_masks_come_from_the_seed_and_the_step():
    def drawn(seed, **streams):
        trainer = make_trainer(model(dropping, **streams), optax.sgd(0.0), GridShape(), seed=seed)
        return losses(trainer, [BATCHES[0]] * 3)

    first = drawn(0)
    assert len(set(first)) == 3
    assert drawn(0, dropout=5) == first  # the layer's own streams begin anew from the step's key
    assert not set(drawn(1)) & set(first)


def test_every_row_and_layer_has_its_own_mask():
    two = model(lambda rngs: nnx.Sequential(dropping(rngs), dropping(rngs)), dropping)()
    x, key = jnp.ones((64, 6, 40)), DropoutKey(jax.random.key(0))
    twice, once = (two.run_segment(number, x, key) for number in (1, 2))
    for dropped, share in ((once, 0.5), (twice, 0.25)):
        assert float(jnp.mean(dropped > 0)) == pytest.approx(share, abs=0.02)  # five standard deviations
        assert float(jnp.mean(dropped)) == pytest.approx(1.0, abs=0.08)
        assert len({row.tobytes() for row in np.asarray(dropped)}) == 64
    shared = two.run_layer(two.layers[2], x, key.of_layer(5))
    assert float(jnp.mean((shared > 0) == (once > 0))) == pytest.approx(0.5, abs=0.02)


class Shifted(nnx.Module):
    def __init__(self, rngs):
        self.shift = nnx.Variable(jnp.arange(WIDTH) / WIDTH)
        self.norm = nnx.BatchNorm(WIDTH, use_running_average=True, rngs=rngs)

    def __call__(self, x):
        return self.norm(x + self.shift)


def test_state_that_nothing_changes_is_a_constant():
    np.testing.assert_allclose(curve(model(Shifted), {"pipe": 2}), curve(model(Shifted)), rtol=TOLERANCE["fp32"])


class Counting(nnx.Module):
    def __init__(self, rngs):
        self.calls = nnx.Variable(jnp.zeros(()))

    def __call__(self, x):
        self.calls[...] += 1
        return x


class Flat(nnx.Module):
    def __init__(self, rngs):
        self.drop = dropping(rngs)

    def __call__(self, x):
        return self.drop(x.reshape(-1, WIDTH))


@pytest.mark.parametrize(
    ("layer", "said"),
    [
        (lambda rngs: nnx.BatchNorm(WIDTH, rngs=rngs), r"BatchNorm, of which a call changes mean \(BatchStat\)"),
        (Counting, r"Counting, of which a call changes calls \(Variable\)"),
        (lambda rngs: nnx.Dropout(0.5), r"nnx\.Dropout\(0\.5\) without rngs"),
        (lambda rngs: nnx.relu, r"layers\[1\] = 'relu'"),
        (Flat, r"Flat, which draws and makes \(\d, 8\) of \(1, \d, 8\)"),
    ],
)
@pytest.mark.parametrize("pipe", [1, 2])
def test_what_cannot_be_trained_is_refused_in_one_line(layer, said, pipe):
    with pytest.raises(UserError, match=said) as raised:
        curve(model(layer), {"pipe": pipe})
    assert "\n" not in str(raised.value)


KEY = "threefry2x32"
DROPS = ax.models.ModelShape(layers=2, hidden=16, heads=4, kv_heads=4, ffn=32, vocab=VOCAB, seq_len=6, dropout=0.3)
GRIDS = [{}, {"x": 2}, {"y": 2, "z": 2}, {"data": 2}, {"data": 2, "z": 2, "x": 2}, {"pipe": 2, "data": 2}]


@functools.cache
def under(generator, axes, microbatches, make):
    """Losses of two steps under a default generator of jax."""
    with jax.default_prng_impl(generator):
        trainer = make_trainer(make, optax.adam(3e-2), GridShape(**dict(axes)), microbatches=microbatches)
        found = losses(trainer, [np.concatenate(BATCHES[at : at + 2]) for at in (0, 1)])  # rows for each part of all
        trainer.close()
    return found


def dropping_transformer():
    return ax.models.Transformer(DROPS, rngs=nnx.Rngs(jax.random.key(0, impl=KEY)))


def seeded_transformer():
    return ax.models.Transformer(DROPS, rngs=nnx.Rngs(0))


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("generator", "axes", "microbatches"),
    [
        ("rbg", {"y": 2, "z": 2}, 2),
        *(slow(each, axes, count) for each in (KEY, "rbg", "unsafe_rbg") for axes in GRIDS for count in (1, 2, 4)),
    ],
    ids=str,
)
def test_masks_are_those_of_one_generator_whatever_jax_has_as_default(generator, axes, microbatches):
    found = under(generator, tuple(axes.items()), microbatches, dropping_transformer)
    np.testing.assert_allclose(found, under(KEY, (), 1, dropping_transformer), rtol=TOLERANCE["fp32"])


def test_weights_of_a_seed_are_the_same_on_every_grid_under_every_generator():
    kernels = {}
    for generator in (KEY, "rbg", "unsafe_rbg"):
        for axes in ({}, {"y": 2, "z": 2}):
            grid = grids.lay(GridShape(**axes))
            with jax.default_prng_impl(generator), grid.entered():
                kernels[generator, *axes] = np.asarray(seeded_transformer().blocks[1].mlp.up.kernel[...])
        np.testing.assert_array_equal(kernels[generator,], kernels[generator, "y", "z"])
    np.testing.assert_array_equal(kernels["rbg",], kernels[KEY,])


def test_masks_of_random_pruning_are_those_of_one_generator():
    laid = jax.device_put(jnp.ones((16, 16)), jax.devices()[0])
    found = []
    for generator in (KEY, "rbg", "unsafe_rbg"):
        with jax.default_prng_impl(generator):
            found.append(np.asarray(random_masks({"kernel": laid}, 0.5, "layer", 0)["kernel"]))
    assert all(np.array_equal(each, found[0]) for each in found)
