"""Saved on one grid, loaded on others: parameters to the bit, and the next losses of the uninterrupted run."""

import dataclasses
import functools
import itertools

import grids
import jax
import numpy as np
import optax
import pytest
from flax import nnx
from jax import NamedSharding, P
from trainers import again, ids, losses, make_trainer, params, same

import axonn_jax as ax
from axonn_jax import GridShape, PipelineConfig, UserError
from axonn_jax.core.checkpoint.manifest import read
from axonn_jax.core.checkpoint.restore import Checkpoint, load, load_weights, resolve_checkpoint
from axonn_jax.core.distributed.host_sync import LocalSync
from axonn_jax.core.memory.host_arrays import materialize

BEFORE, AFTER, MICROBATCHES, ROWS = 3, 10, 4, 16
GPT = dataclasses.replace(grids.GPT, layers=2, seq_len=8, dropout=0.1)  # tied embeddings: both ends hold the table
RATE = optax.linear_schedule(3e-3, 1e-3, BEFORE + AFTER)  # with a count of its own in the optimizer's state
FIXED = PipelineConfig(policy="1f1b")

GRIDS = {
    "one device": {},
    "data 2": {"data": 2},
    "z 2": {"z": 2},
    "y 2": {"y": 2},
    "x 2": {"x": 2},
    "data 4": {"data": 4},
    "z 2 x 2": {"z": 2, "x": 2},
    "y 2 x 2": {"y": 2, "x": 2},
    "all four": {"data": 2, "z": 1, "y": 2, "x": 2},
    "eight": {"z": 2, "y": 2, "x": 2},
    "pipe 2": {"pipe": 2},
    "pipe 2 x 2": {"pipe": 2, "x": 2},
    "pipe 2 z 2 y 2": {"pipe": 2, "z": 2, "y": 2},
    "pipe 4": {"pipe": 4},
    "pipe 4 data 2": {"pipe": 4, "data": 2},
    "scanned": {"x": 2, "scan_layers": "yes"},
    "zero": {"data": 2, "x": 2, "zero": 1},
    "offload": {"y": 2, "offload": "optimizer", "bucket": 1000},
    "zero offload": {"data": 2, "z": 2, "zero": 1, "offload": "optimizer", "bucket": 1000},
    "pipe 2 zero offload": {"pipe": 2, "data": 2, "zero": 1, "offload": "optimizer", "bucket": 1000},
}
SAVED_ON = ("z 2 x 2", "pipe 2", "pipe 2 zero offload")
FAST = ("z 2 x 2", "zero offload")
AXES = [field.name for field in dataclasses.fields(GridShape)]


def trainer(axes, *, shape=GPT, seed=0, optimizer=None):
    options = {key: value for key, value in axes.items() if key not in AXES}
    axes = {key: value for key, value in axes.items() if key in AXES}
    options = {"microbatches": MICROBATCHES, "clip": 0.5, "seed": 5, "pipeline": FIXED, **options}
    model = lambda: ax.models.Transformer(shape, rngs=nnx.Rngs(seed))  # noqa: E731
    return make_trainer(model, optimizer or optax.adamw(RATE), GridShape(**axes), **options)


def steps(trained, first, count):
    return losses(trained, again(ids(GPT.vocab, 4, ROWS, GPT.seq_len + 1), first + count)[first:])


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Trains a while on a grid, saves, and goes on: the checkpoint, and the losses after it."""

    @functools.cache
    def of(name):
        path = tmp_path_factory.mktemp("saved")
        trained = trainer(GRIDS[name])
        steps(trained, 0, BEFORE)
        trained.save(path, BEFORE)
        before = params(trained)
        after = steps(trained, BEFORE, AFTER)
        trained.close()
        return path / f"step_{BEFORE:08d}", before, after

    return of


@pytest.mark.parametrize(
    ("source", "target"),
    [
        pytest.param(*way, marks=[pytest.mark.slow] * (way != FAST), id=" to ".join(way))
        for way in itertools.product(SAVED_ON, GRIDS)
    ],
)
def test_any_grid_goes_on_from_any_other(source, target, saved):
    path, before, want = saved(source)
    resumed = trainer(GRIDS[target])
    assert resumed.load(path) == BEFORE == resumed.engine.steps_done
    same(resumed.engine.params, before)
    state = materialize(resumed.engine.state())
    (count,) = {int(value) for name, value in state.items() if name.endswith("count")}
    assert count == BEFORE
    found = Checkpoint(path, read(path))
    one = NamedSharding(grids.lay(GridShape()).mesh, P())
    stored = load(found, {n: jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=one) for n, v in state.items()})
    same(stored, state)
    after = steps(resumed, BEFORE, AFTER)
    resumed.close()
    if source == target:
        assert after == want
    else:
        np.testing.assert_allclose(after, want, rtol=grids.CURVE_TOLERANCE)


def test_the_weights_alone_start_another_run(saved):
    path, before, _ = saved("z 2 x 2")
    other = trainer({"y": 2}, optimizer=optax.sgd(1e-2, momentum=0.9), seed=1)
    other.load(path, weights_only=True)
    assert other.engine.steps_done == 0
    same(other.engine.params, before)
    assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves(other.engine.opt_state))
    abstract = {n: jax.ShapeDtypeStruct(p.shape, p.dtype, sharding=p.sharding) for n, p in other.engine.params.items()}
    read_alone = load_weights(resolve_checkpoint(path.parent, LocalSync(), pytest.fail, "checkpoint"), abstract)
    assert set(read_alone) == set(before)


@pytest.mark.parametrize("axes", [{"x": 2}, {"pipe": 2}], ids=["x 2", "pipe 2"])
def test_another_model_or_optimizer_is_told_name_by_name(axes, saved):
    path, _, _ = saved("z 2 x 2")
    with pytest.raises(UserError) as caught:
        trainer(axes, shape=dataclasses.replace(GPT, layers=3, seq_len=16)).load(path)
    assert "a checkpoint of this model; model.layers = 3 (2 there), model.seq_len = 16 (8 there)" in str(caught.value)
    with pytest.raises(UserError, match=r"missing: optimizer\.0\.trace\.blocks\.0"):
        trainer(axes, optimizer=optax.sgd(RATE, momentum=0.9)).load(path)


@pytest.mark.parametrize("name", ["z 2 x 2", *(pytest.param(n, marks=pytest.mark.slow) for n in SAVED_ON[1:])])
def test_every_array_is_stored_once(name, saved):
    path, before, _ = saved(name)
    manifest = read(path)
    values = sum(np.prod(stored.shape, dtype=int) for stored in manifest.arrays.values())
    counts = 3  # two of steps, one of those that were skipped
    assert values == 3 * sum(value.size for value in before.values()) + counts
