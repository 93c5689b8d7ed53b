"""Trainers under the mesh of another grid, made before or after theirs, or under one that a script set."""

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import axonn_jax as ax
from axonn_jax.errors import UserError

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
