"""Trainers under the mesh of another grid or of a script; the module they are given, and the one they give back."""

from dataclasses import replace

import grids
import jax
import numpy as np
import optax
import pytest
from flax import nnx
from trainers import make_trainer

import axonn_jax as ax
from axonn_jax import GridShape, UserError
from axonn_jax.core.engines.spmd import SpmdEngine
from axonn_jax.core.tensor.params import split_module

SHAPE = ax.models.ModelShape(layers=2, hidden=32, heads=4, kv_heads=4, ffn=64, vocab=64, seq_len=16)
TOKENS = np.random.default_rng(0).integers(0, 64, (8, 17))
SCRIPTS_OWN = {
    "other axes": lambda: jax.make_mesh((4,), ("batch",)),
    "one device": lambda: jax.sharding.Mesh(np.array(jax.devices()[3:4]), ("x",)),
    "none": lambda: jax.sharding.Mesh(np.empty((), object), ()),
}


@pytest.fixture(autouse=True)
def mesh_of_before():
    before = jax.sharding.get_mesh()
    yield
    jax.set_mesh(before)


def trainer(grid, **options):
    model = ax.models.Transformer(SHAPE, rngs=nnx.Rngs(0))
    return ax.Trainer(model, optax.adam(1e-2), grid, microbatches=2, **options)


def use(made, folder):
    losses = [float(made.step(TOKENS)["loss"]), float(made.evaluate([TOKENS]))]
    made.load(made.save(folder, 1))
    nnx.state(made.model)
    return [*losses, float(made.step(TOKENS)["loss"])]


@pytest.fixture(scope="module")
def wanted(tmp_path_factory):
    return use(trainer(ax.init()), tmp_path_factory.mktemp("wanted"))


@pytest.mark.parametrize(
    ("kind", "axes"),
    [("other axes", {"data": 2, "x": 2}), ("one device", {"pipe": 2}), ("none", {"pipe": 2})],
)
def test_a_mesh_of_the_script_is_left_alone(axes, kind, wanted, tmp_path):
    grid = ax.init(**axes)
    jax.set_mesh(SCRIPTS_OWN[kind]())
    set_mesh = jax.sharding.get_mesh()
    assert use(trainer(grid), tmp_path) == pytest.approx(wanted, rel=2e-5)
    assert jax.sharding.get_mesh() == set_mesh


def test_trainers_of_two_grids_in_turns(wanted, tmp_path):
    grids = [ax.init(data=2), ax.init(pipe=2), ax.init(y=2, z=2)]
    trainers = [trainer(grid) for grid in grids]  # each under the mesh of the newest grid
    for _ in range(2):
        losses = [float(made.step(TOKENS)["loss"]) for made in trainers]
        assert losses == pytest.approx([losses[0]] * 3, rel=2e-5)
    assert losses[0] < wanted[0]


def test_a_trainer_without_a_grid_is_refused():
    for grid in (None, jax.make_mesh((1,), ("x",))):
        with pytest.raises(UserError, match=r"^grid = '\w+': a grid, as ax\.init returns one"):
            trainer(grid)


SMALL = replace(grids.GPT, layers=1, seq_len=8)
BATCH = np.random.default_rng(0).integers(0, SMALL.vocab, (8, SMALL.seq_len + 1))

CASES = {
    "one device": (GridShape(), {}),
    "offloaded": (GridShape(data=2, x=2), {"offload": "optimizer", "zero": 1, "precision": "bf16"}),
    "scanned": (GridShape(z=2, y=2), {"scan_layers": "yes"}),
    "pipelined": (GridShape(pipe=2, x=2), {"microbatches": 2}),
}


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[pytest.mark.slow] if case in ("one device", "scanned") else []) for case in CASES],
)
def test_the_trained_module_comes_back(case):
    axes, options = CASES[case]
    given = grids.model_on(replace(SMALL, layers=2) if case == "scanned" else SMALL, grids.lay(GridShape()))
    initial = jax.tree.map(np.asarray, split_module(given).params)
    trainer = make_trainer(given, optax.adam(1e-2), grids.lay(axes), **{"precision": "fp32", **options})
    trainer.step(BATCH)
    model, wanted = trainer.model, jax.tree.map(np.asarray, trainer.engine.params)
    held_out = trainer.evaluate([BATCH]) if case == "offloaded" else 0.0
    trainer.step(BATCH)  # uses its own arrays up, not the module's
    trainer.close()
    assert type(model) is type(given)
    parts = split_module(model)
    assert list(parts.params) == list(initial)  # in the module's own order, layers that were stacked by themselves
    for name, value in parts.params.items():
        assert value.sharding.memory_kind == jax.devices()[0].default_memory().kind
        np.testing.assert_array_equal(value, wanted[name])
        assert not np.array_equal(value, initial[name]), name
    if held_out:  # the masters were in host memory, split over data: the module can be called all the same
        total = jax.jit(lambda model, batch: model.loss(batch[:, :-1], batch[:, 1:]))(model, BATCH)
        np.testing.assert_allclose(float(total) / BATCH[:, 1:].size, held_out, rtol=1e-2)  # that of bfloat16 weights


def test_without_the_weights_of_other_processes_there_is_no_module(monkeypatch):
    trainer = make_trainer(grids.model_on(SMALL, grids.lay(GridShape())), optax.sgd(0.1), grids.lay(GridShape()))
    here = dict(list(trainer.engine.params.items())[1:])
    monkeypatch.setattr(SpmdEngine, "params", here)
    count = len(here)
    with pytest.raises(UserError, match=f"'{count} of {count + 1} parameters here': a pipeline of one"):
        _ = trainer.model
