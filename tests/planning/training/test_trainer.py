"""The trainer: loss curves on every grid, one reduction over `data` a step, any optax transformation."""

import functools
from dataclasses import replace

import grids
import hlo_text
import jax
import numpy as np
import optax
import pytest
from hlo.collectives import collectives
from trainers import again, ids, losses, make_trainer

from axonn_jax.core.errors import UserError
from axonn_jax.core.grid import MESH_AXES

STEPS = 20
SMALL = {name: replace(shape, layers=1, seq_len=8) for name, shape in grids.MODELS.items()}


def train(model, axes, *, optimizer=None, steps=STEPS, **options):
    grid, shape = grids.lay(axes), SMALL[model]
    options = {"clip": 0.5, **options}
    trainer = make_trainer(grids.model_on(shape, grid), optimizer or optax.adamw(3e-3), grid, **options)
    return trainer, losses(trainer, again(ids(shape.vocab, 4, 8, shape.seq_len + 1), steps))


@functools.cache
def one_device_curve(model):
    return train(model, grids.GridShape())[1]


# One step's gradients agree to a few eps (test_parity), and 20 steps carry those differences on: sums of another
# order, 16 eps = 2e-6 as there. Measured over all grids: at most 2.7e-7 relative.
CURVE_TOLERANCE = 2e-6


def test_microbatches_do_not_change_the_curve():
    _, curve = train("gpt", grids.GridShape(1, 2, 1, 1, 2), microbatches=4)
    np.testing.assert_allclose(curve, one_device_curve("gpt"), rtol=CURVE_TOLERANCE)
    assert curve[-1] < curve[0] - 0.2  # it does learn: the curves are not equal for want of change


def compiled_collectives(microbatches, bucket):
    axes = grids.GridShape(1, 2, 2, 1, 2)
    grid = grids.lay(axes)
    trainer = make_trainer(
        grids.model_on(SMALL["gpt"], grid), optax.adamw(1e-3), grid, microbatches=microbatches, clip=1.0, bucket=bucket
    )
    batch = np.zeros((4 * microbatches, SMALL["gpt"].seq_len + 1), np.int32)
    return grid.mesh, trainer.engine.compiled_step(batch).as_text()


@pytest.mark.parametrize("bucket", [16_000_000, 500])
def test_one_set_of_reductions_over_data_whatever_the_microbatches(bucket):
    seen = []
    for microbatches in (1, 4):
        mesh, text = compiled_collectives(microbatches, bucket)
        found = collectives(text, {axis: mesh.shape[axis] for axis in MESH_AXES})
        over_data = [c for c in found if "data" in c.axes]
        assert {c.kind for c in over_data} == {"all-reduce"}
        assert all(c.whole <= 4 * bucket for c in over_data)
        seen.append(sorted((c.whole, c.times) for c in over_data))
    assert seen[0] == seen[1]
    # Every gradient element travels once (its local shard), in a loop of parts or not, and two numbers: the loss, and
    # how many targets count. Nothing else does.
    grid = grids.lay(grids.GridShape(1, 2, 2, 1, 2))
    params = grids.model_on(SMALL["gpt"], grid)
    local = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(params))
    assert sum(size * times for size, times in seen[0]) == local + 2 * 4
    assert any(times > 1 for _, times in seen[0]) == (bucket == 500)  # some gradients are larger


def test_the_optimizer_communicates_nothing():
    """Outside the manual region only elementwise work is left: no collective beyond the algorithm's own."""
    mesh, text = compiled_collectives(1, 16_000_000)
    found = hlo_text.collectives(text)
    assert {c.kind for c in found} == {"all-reduce", "all-gather", "reduce-scatter"}
    gathered = [c for c in found if c.kind == "all-gather"]
    assert all(c.crosses(mesh, "z") and not c.crosses(mesh, "x") for c in gathered)


def test_an_optax_transformation_that_is_not_elementwise():
    """test_memory has others, with ZeRO."""
    optimizer = optax.adafactor(1e-2)
    _, sharded = train("gpt", grids.GridShape(1, 1, 2, 2, 2), optimizer=optimizer, steps=6)
    _, whole = train("gpt", grids.GridShape(), optimizer=optimizer, steps=6)
    np.testing.assert_allclose(sharded, whole, rtol=CURVE_TOLERANCE)
    assert whole[-1] < whole[0]


def test_clipping_equals_optax():
    _, ours = train("gpt", grids.GridShape(1, 2, 2, 2, 1), optimizer=optax.sgd(0.1), clip=0.05)
    chain = optax.chain(optax.clip_by_global_norm(0.05), optax.sgd(0.1))
    _, theirs = train("gpt", grids.GridShape(), optimizer=chain, clip=0.0)
    # optax divides by the norm, the published coefficient by the norm + 1e-6: 20 steps of 2e-5 of 0.005 each.
    np.testing.assert_allclose(ours, theirs, rtol=CURVE_TOLERANCE)


def test_state_is_sharded_like_its_parameter_and_buffers_are_donated():
    trainer, _ = train("gpt", grids.GridShape(1, 1, 2, 2, 2), steps=1)
    before = dict(trainer.engine.params)
    mu = trainer.engine.opt_state[0].mu
    for name, param in trainer.engine.params.items():
        assert mu[name].sharding.is_equivalent_to(param.sharding, param.ndim), name
    trainer.step(np.zeros((8, 9), np.int32))
    assert all(value.is_deleted() for value in before.values())


def test_dropout_drops_the_same_entries_on_every_grid_and_in_any_microbatches():
    SMALL["dropout"] = replace(SMALL["gpt"], dropout=0.3)
    try:
        _, whole = train("dropout", grids.GridShape(), steps=5)
        _, sharded = train("dropout", grids.GridShape(1, 2, 1, 2, 2), microbatches=2, steps=5)
    finally:
        del SMALL["dropout"]
    np.testing.assert_allclose(sharded, whole, rtol=CURVE_TOLERANCE)
    assert abs(whole[0] - one_device_curve("gpt")[0]) > 1e-3


@functools.cache
def loss_of_50_samples():
    """The loss of a training step on all of them, which is their mean."""
    grid = grids.lay(grids.GridShape())
    trainer = make_trainer(grids.model_on(SMALL["gpt"], grid), optax.sgd(1e-30), grid)
    return float(trainer.step(samples(50))["loss"])


def samples(count):
    return np.random.default_rng(0).integers(0, 64, (count, 9))


ONE, FOUR, PIPE = grids.GridShape(), grids.GridShape(1, 2, 2, 1, 2), grids.GridShape(2, 1, 1, 2)


@pytest.mark.parametrize(
    ("axes", "size"),
    [
        (ONE, 7),
        pytest.param(ONE, 50, marks=pytest.mark.slow),
        pytest.param(FOUR, 7, marks=pytest.mark.slow),
        (FOUR, 32),
        (PIPE, 7),
        pytest.param(PIPE, 32, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_an_evaluation_counts_every_sample_once_and_knows_the_vocabulary(axes, size):
    """An id beyond the vocabulary that is read only, in the first column, spoils the loss as a target does."""
    grid = grids.lay(axes)
    trainer = make_trainer(grids.model_on(SMALL["gpt"], grid), optax.sgd(0.1), grid, microbatches=2)
    batches = [samples(50)[at : at + size] for at in range(0, 50, size)]
    assert trainer.evaluate(batches) == pytest.approx(loss_of_50_samples(), rel=grids.SCALAR_TOLERANCE)
    for row, column, token in ((0, 0, 64), (3, 8, 64)):
        bad = batches[0].copy()
        bad[row, column] = token
        assert np.isnan(trainer.evaluate([bad])), (row, column, token)
    trainer.close()


def test_a_step_on_a_token_beyond_the_vocabulary_is_skipped():
    trainer, _ = train("gpt", grids.GridShape(1, 1, 2, 2, 2), steps=1)
    bad = np.zeros((8, 9), np.int32)
    bad[5, 0] = 64
    metrics = trainer.step(bad)
    assert np.isnan(float(metrics["loss"]))
    assert int(metrics["skipped"]) == 1


@pytest.mark.parametrize(("rows", "width"), [(6, 9), (0, 9)])
def test_a_batch_that_does_not_divide_is_refused(rows, width):
    grid = grids.lay(grids.GridShape(1, 2, 2, 1, 1))
    trainer = make_trainer(grids.model_on(SMALL["gpt"], grid), optax.sgd(1e-30), grid)
    with pytest.raises(UserError, match="multiple of"):
        trainer.step(np.zeros((rows, width), np.int32))


class Tensor:
    """What torch's do: they make an array of themselves, or raise an error of their own."""

    def __init__(self, values):
        self.values = values

    def __array__(self, dtype=None, copy=None):
        if self.values is None:
            raise TypeError("can't convert cuda:0 device type tensor to numpy")
        return self.values


IDS = np.random.default_rng(0).integers(0, 64, (4, 9))
NO_IDS = {
    "far above": (IDS + 2**32, r"ndarray with 42949\d+"),
    "beyond a sign": (IDS.astype(np.uint32) + np.uint32(2**31), r"ndarray with 21474\d+"),
    "far below": (IDS - 2**40, r"ndarray with -\d+"),
    "halves": (IDS + 0.5, "ndarray of float64"),
    "booleans": ((IDS > 3).tolist(), "list of bool"),
    "texts": ([["a", "b"]], "list of <U1"),
    "uneven": ([[1, 2], [3]], "list"),
    "one wide": (IDS[:, :1], r"\(4, 1\)"),
    "a row": (IDS[0].tolist(), r"\(9,\)"),
    "nothing": (None, "NoneType of object"),
    "on a GPU": (Tensor(None), "Tensor"),
}


def test_a_batch_is_whatever_is_an_array_of_ids_and_nothing_else():
    trainer = make_trainer(grids.model_on(SMALL["gpt"], grid := grids.lay(grids.GridShape())), optax.sgd(1e-30), grid)
    want = float(trainer.step(IDS)["loss"])
    for batch in (
        IDS.tolist(),
        tuple(map(tuple, IDS.tolist())),
        IDS.astype(np.uint8),
        Tensor(IDS),
        jax.numpy.array(IDS),
    ):
        assert float(trainer.step(batch)["loss"]) == want
    assert trainer.evaluate([IDS.tolist()]) == pytest.approx(want, rel=grids.SCALAR_TOLERANCE)
    for batch, shown in NO_IDS.values():
        line = rf"^batch = '?{shown}'?: \[sequences, seq_len \+ 1\] token ids: whole [^\n]*$"
        with pytest.raises(UserError, match=line):
            trainer.step(batch)
        with pytest.raises(UserError, match=line):
            trainer.evaluate([batch])
