"""Mistakes with `Trainer(loss=)`: one line each, that names the field, the value and what is accepted."""

import linecache
import re

import any_models as models
import grids
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

import axonn_jax as ax
from axonn_jax.core.grid import GridShape

ROWS = np.ones((8, 6), np.float32)


def net():
    return nnx.Linear(6, 4, rngs=nnx.Rngs(0))


def mean_loss(model, batch):
    return jnp.mean(jnp.square(model(batch)))


def made(axes=GridShape(data=2), model=net, optimizer=optax.sgd(0.1), loss=mean_loss, **options):  # noqa: B008
    return ax.Trainer(model, optimizer, grids.lay(axes), loss=loss, **options)


class Module(linen.Module):
    @linen.compact
    def __call__(self, x):
        return linen.Dense(2)(x)


MADE = {
    "loss of one argument": (lambda: made(loss=lambda model: 0.0), r"^loss = a function of \(model\): "),
    "loss of four": (lambda: made(loss=lambda model, batch, key, step: 0.0), r"^loss = a function of "),
    "loss a string": (lambda: made(loss="mse"), "^loss = str: a function of"),
    "loss the module": (lambda: made(loss=net()), "^loss = Linear: .*the module as model"),
    "weight a number": (lambda: made(weight=1.0), "^weight = float: a function of a batch"),
    "model a class": (lambda: made(model=nnx.Linear), "^model = Linear: a flax.nnx.Module, a function"),
    "model of Linen": (lambda: made(model=Module()), "^model = Module: a flax.nnx.Module, a function"),
    "model of strings": (lambda: made(model={"a": "b"}), "^model = dict: a flax.nnx.Module"),
    "model without parameters": (lambda: made(model=nnx.Dropout(0.5)), "^model = Dropout: one with parameters"),
    "model of another mesh": (
        lambda: made(model=ax.parallelize(net(), grids.lay(GridShape(x=2)))),
        "^model = parallelized on a mesh of .*: the grids",
    ),
    "optimizer of nnx": (lambda: made(optimizer=nnx.Optimizer(net(), optax.sgd(0.1), wrt=nnx.Param)), "^optimizer = "),
    "optimizer that searches": (lambda: made(optimizer=optax.lbfgs()), "^optimizer = .*lbfgs|^optimizer = "),
    "no loss": (lambda: made(model=net(), loss=None), "^model = Linear: a Transformer or .* trains with loss="),
    "no model": (lambda: made(model=None, loss=None), "^model = NoneType: a models.Transformer, "),
    "rows a word": (lambda: made(rows="part"), "^rows = part: one of .*; did you mean parts"),
    "no grid": (lambda: ax.Trainer(net(), optax.sgd(0.1), None, loss=mean_loss), "^grid = NoneType: a grid"),
    "ema a word": (lambda: made(ema="x"), "^train.ema = x: a number of at least 0 and below 1"),
    "ema 1": (lambda: made(ema=1), "^train.ema = 1: a number of at least 0 and below 1"),
    "a seed below 0": (lambda: made(seed=-1), "^train.seed = -1: an integer from 0"),
    "a table as in TOML": (lambda: made(memory={"zero": 1}), "^memory = .*: an ax.MemoryConfig"),
    "no table": (lambda: made(prune=None), "^prune = None: an ax.PruneConfig"),
    "wrt a number": (lambda: made(wrt=5), "^wrt = 5: a filter of Flax"),
    "microbatches 0": (lambda: made(microbatches=0), "^microbatches = 0: "),
    "microbatches 2.0": (lambda: made(microbatches=2.0), "^microbatches = 2.0: "),
    "pruning without kernels": (
        lambda: made(model=lambda: nnx.LayerNorm(6, rngs=nnx.Rngs(0)), prune=ax.PruneConfig(density=0.5)),
        "^prune.density = 0.5: 1 where no layer with a kernel is known",
    ),
    "pruning with a norm of whole parameters": (
        lambda: made(optimizer=optax.lamb(0.1), prune=ax.PruneConfig(density=0.5)),
        "^optimizer = .*whole parameters: one that treats every element by itself",
    ),
}

STEPS = {
    "a loss a row": ({"loss": lambda m, x: jnp.square(m(x)).mean(-1)}, ROWS, r"^loss = float32 of shape \(8,\): "),
    "no loss": ({"loss": lambda m, x: None}, ROWS, "^loss = a function that returns NoneType: "),
    "a whole number": ({"loss": lambda m, x: jnp.int32(1)}, ROWS, r"^loss = int32 of shape \(\): "),
    "logits beside it": (
        {"loss": lambda m, x: (m(x).mean(), m(x))},
        ROWS,
        r"^loss = an array of shape \(8, 4\)",
    ),
    "a weight a row": ({"weight": lambda x: x[:, 0]}, ROWS, r"^weight = an array of shape \(4,\): "),
    "rows that do not divide": ({"microbatches": 3}, ROWS, "^batch = 8 rows: a multiple of 6 rows"),
    "a number": ({}, {"x": ROWS, "step": 1}, r"^batch\[step\] = int64 of shape \(\): .*ax.replicated"),
    "other rows": ({}, [ROWS, ROWS[:4]], r"^batch = \[0\]: 8, \[1\]: 4: a tree of arrays with the same rows"),
    "nothing": ({}, {}, "^batch = no array: "),
    "no rows": ({}, ROWS[:0], "^batch = .*: 0: "),
    "strings": ({}, np.array(["a", "b"]), "^batch = <U1 of shape"),
    "a number of 64 bits": ({}, np.full((8, 1), 2**40), "^batch = 1099511627776: numbers that int32 holds"),
}


LABELLED = {"x": ROWS, "label": np.arange(8) % 4}
UNFIT = {
    "another width": (LABELLED | {"x": ROWS[:, :5]}, r"x\] float32\[8, 5\].* raises TypeError: .*\(5,\) and \(6,\)"),
    "no labels": ({"x": ROWS}, r"^batch = \[x\] float32\[8, 6\]: .* raises KeyError: label$"),
    "labels of floats": (LABELLED | {"label": ROWS[:, 0]}, r"\[label\] float32\[8\], .* raises TypeError: .*integer"),
    "labels of words": (LABELLED | {"label": np.ones((8, 3), int)}, r"\[label\] int32\[8, 3\], .* raises ValueError: "),
    "a list": ([ROWS, LABELLED["label"]], r"^batch = \[0\] float32\[8, 6\], \[1\] int32\[8\]: .* raises TypeError: "),
}


def labelled_loss(model, batch):
    return optax.softmax_cross_entropy_with_integer_labels(model(batch["x"]), batch["label"]).mean()


def refused(call, pattern):
    """Assert that a call is refused in one line, which the pattern describes without its quotes."""
    with pytest.raises(ax.UserError) as error:
        call()
    line = str(error.value)
    assert "\n" not in line
    assert re.search(pattern, re.sub("""['"]""", "", line)), line
    return error.value


@pytest.mark.parametrize("name", MADE)
def test_a_trainer_that_cannot_be(name):
    refused(*MADE[name])


@pytest.mark.parametrize("name", STEPS)
def test_a_step_that_cannot_be(name):
    options, batch, pattern = STEPS[name]
    trainer = made(**options)
    refused(lambda: trainer.step(batch), pattern)
    assert trainer.engine.steps_done == 0


@pytest.mark.parametrize("name", UNFIT)
@pytest.mark.parametrize("axes", [GridShape(), GridShape(data=2, x=2)], ids=str)
def test_a_batch_that_the_loss_does_not_take_is_named_with_the_line(name, axes):
    batch, pattern = UNFIT[name]
    trainer = made(axes, loss=labelled_loss)
    at = f"test_loss_mistakes.py, line {labelled_loss.__code__.co_firstlineno + 1}, raises"
    for call in (lambda: trainer.step(batch), lambda: trainer.evaluate([batch])):
        error = refused(call, pattern)
        assert at in str(error)
        assert isinstance(error.__cause__, (TypeError, ValueError, KeyError))
    assert np.isfinite(float(trainer.step(LABELLED)["loss"]))


def test_a_batch_that_a_linen_loss_does_not_take_is_named_with_the_line():
    grid, module = grids.lay(GridShape(data=2, x=2)), Module()

    def loss(params, batch):
        return jnp.mean(module.apply(params, batch))

    loss, params = ax.parallelize_linen(loss, module.init(jax.random.key(0), ROWS), grid, ROWS)
    trainer = ax.Trainer(params, optax.sgd(0.1), grid, loss=loss)
    error = refused(lambda: trainer.step(ROWS[:, :5]), r"^batch = float32\[8, 5\]: ")
    line = re.search(r"test_loss_mistakes\.py, line (\d+), raises", str(error))[1]
    assert linecache.getline(__file__, int(line)).strip() == "return linen.Dense(2)(x)"


def test_other_calls_of_a_trainer_that_cannot_be():
    trainer = made()
    refused(lambda: trainer.save("nowhere", "1"), "^step = 1: an integer of at least 0")
    refused(lambda: trainer.save(None, 1), "^directory = None: the path of")
    refused(lambda: trainer.load(3), "^path = 3: the path of")
    refused(lambda: trainer.rows("x"), "^sequences = x: an integer")
    refused(lambda: trainer.evaluate(None), "^batches = None: a list or an iterator")
    refused(lambda: trainer.evaluate([ROWS], loss="mse"), "^loss = str: a function of")
    refused(lambda: trainer.evaluate([ROWS], loss=lambda model: 0.0), r"^loss = a function of \(model\): ")


def test_other_faults_of_a_loss_stay_its_own():
    with pytest.raises(ZeroDivisionError):
        made(loss=lambda model, batch: mean_loss(model, batch) + 1 / 0).step(ROWS)
    with pytest.raises(AttributeError, match="nothing"):
        made(loss=lambda model, batch: batch.nothing).step(ROWS)


class Convolved(nnx.Module):
    """A split layer behind a convolution of its own."""

    def __init__(self, rngs):
        self.first, self.kernel = nnx.Linear(4, 8, rngs=rngs), nnx.Param(jnp.ones((3, 8, 4)))

    def __call__(self, x):
        return jax.lax.conv_general_dilated(
            self.first(x), self.kernel.get_value(), (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")
        )


def test_convolutions_that_xla_would_split_wrong_are_refused():
    """Mapped over replicas they are grouped ones."""
    rows = np.ones((8, 6, 4), np.float32)
    trainer = made(GridShape(data=2, z=2, x=2), lambda: Convolved(nnx.Rngs(0)))
    refused(lambda: trainer.step(rows), "^model = a jax.lax convolution of 2 groups: an nnx.Conv in its place")
    made(GridShape(data=2), lambda: Convolved(nnx.Rngs(0))).step(rows)


def test_the_users_arrays_stay_and_so_does_the_trainer_after_a_mistake():
    model = net()
    trainer = made(GridShape(), model=model)
    before = float(trainer.step(ROWS)["loss"])
    refused(lambda: trainer.step({"x": 1}), r"^batch\[x\] = ")
    assert float(trainer.step(ROWS)["loss"]) < before
    np.testing.assert_array_equal(model.kernel.get_value(), net().kernel.get_value())
    assert jax.tree.structure(nnx.state(trainer.model)) == jax.tree.structure(nnx.state(model))


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    made().save(tmp_path, 1)
    other = made(model=lambda: models.Language(nnx.Rngs(0)), loss=models.language_loss)
    with pytest.raises(ax.UserError, match="params"):
        other.load(tmp_path)
