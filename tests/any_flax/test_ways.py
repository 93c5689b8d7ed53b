"""The way in which a loss runs, behind a checkpoint, in an evaluation and with statistics of a batch."""

import grids
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from row_losses import MASKED, ROWS, WIDTH, Mlp, X, contrastive, masked, square

import axonn_jax as ax
from axonn_jax.core.grid import GridShape

ALL = GridShape(data=2, z=2, y=2)


@pytest.mark.parametrize("axes", [GridShape(data=2), ALL], ids=grids.name)
def test_statistics_of_microbatches_are_told_and_leave_parts(axes, capfd):
    class Normed(nnx.Module):
        def __init__(self):
            self.first, self.norm = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0)), nnx.BatchNorm(WIDTH, rngs=nnx.Rngs(1))

        def __call__(self, x):
            return self.norm(self.first(x))

    trainer = ax.Trainer(Normed(), optax.sgd(0.1), grids.lay(axes), loss=square, microbatches=3)
    trainer.step(X)
    assert trainer.engine.program.strategy == "parts"
    said = "rows: the loss runs in parts of the rows; BatchNorm takes statistics of each microbatch; microbatches = 3"
    assert said in capfd.readouterr().err


def not_understood(model, batch):
    """The largest entry, by a primitive without a rule."""
    return square(model, batch) + jax.nn.relu(jax.lax.approx_max_k(batch.reshape(-1), 1)[0][0] - 10)


def test_the_way_is_kept_by_a_checkpoint_with_its_reason(tmp_path, capfd):
    """Numbers of the steps before it told; behind it they are alike in all parts, on another grid too."""

    def trainer(axes, loss):
        return ax.Trainer(Mlp(), optax.sgd(0.1), grids.lay(axes), loss=loss)

    first = trainer(GridShape(data=2), not_understood)
    first.step(X + 20 * (np.arange(ROWS) == 0)[:, None])
    assert first.engine.program.strategy == "whole"
    first.save(tmp_path, 1)
    told = capfd.readouterr().err.splitlines()[-1]
    other = trainer(GridShape(data=2, x=2), not_understood)
    assert other.resume(tmp_path) == 1
    late = X + 20 * (np.arange(ROWS) == ROWS - 1)[:, None]
    for batch in (X, X, late):
        assert float(other.step(batch)["loss"]) == pytest.approx(float(first.step(batch)["loss"]), rel=1e-6)
    assert other.engine.program.strategy == "whole"
    assert f"{told}, as before the checkpoint" in capfd.readouterr().err
    proven = trainer(GridShape(data=2), square)  # the verdict of its own trace holds
    proven.load(tmp_path)
    proven.step(X)
    assert proven.engine.program.strategy == "parts"
    assert "in parts of the rows, as its program shows; before the checkpoint it did not: " in capfd.readouterr().err


@pytest.mark.parametrize("loss", [contrastive, masked, not_understood], ids=lambda loss: loss.__name__)
def test_a_loss_that_is_told_resumes_on_another_grid(loss, tmp_path):
    def batch(step):
        if loss is masked:
            return MASKED | {"mask": np.random.default_rng(step).integers(0, 2, ROWS).astype(np.float32)}
        return X + (10 * (1 + step) * (np.arange(ROWS) == step))[:, None].astype(np.float32)

    def trainer(axes):
        return ax.Trainer(Mlp(), optax.adam(1e-2), grids.lay(axes), loss=loss)

    first = trainer(GridShape(data=2, y=2))
    for step in range(2):
        first.step(batch(step))
    first.save(tmp_path, 2)
    other = trainer(GridShape(data=4, x=2))
    other.resume(tmp_path)
    for step in range(2, 5):
        want = float(first.step(batch(step))["loss"])
        assert float(other.step(batch(step))["loss"]) == pytest.approx(want, rel=1e-5)
    assert first.engine.program.strategy == other.engine.program.strategy == "whole"


def test_an_evaluation_whose_loss_sees_all_rows_has_them_at_once(capfd):
    def loss(model, batch):
        return jnp.sqrt(square(model, batch)) if model.inside.deterministic else square(model, batch)

    class Net(Mlp):
        def __init__(self):
            super().__init__()
            self.inside = nnx.Dropout(0.0, rngs=nnx.Rngs(0))

    for microbatches in (1, 3):
        trainer = ax.Trainer(Net(), optax.sgd(0.1), grids.lay(ALL), loss=loss, microbatches=microbatches)
        want = float(jnp.sqrt(square(Net(), X)))
        assert trainer.evaluate([X]) == pytest.approx(want, rel=1e-6)
        assert "evaluate: the loss runs on all rows of a batch at once; a result that is" in capfd.readouterr().err
        trainer.step(X)
        assert trainer.engine.program.strategy == "parts"


def test_half_precision_that_several_devices_compare_is_no_difference(monkeypatch, capfd):
    """As in a run of several processes, where one device does not see all rows."""
    monkeypatch.setattr("axonn_jax.any_flax.modules.comparison._SMALL", -1)

    class Half(nnx.Module):
        def __init__(self):
            rngs = nnx.Rngs(0)
            self.first = nnx.Linear(WIDTH, 256, rngs=rngs, dtype=jnp.bfloat16)
            self.last = nnx.Linear(256, WIDTH, rngs=rngs, dtype=jnp.bfloat16)

        def __call__(self, x):
            return self.last(nnx.gelu(self.first(x)))

    def loss(model, batch):
        return jnp.mean(jnp.square(model(batch).astype(jnp.float32)))

    trainer = ax.Trainer(Half(), optax.sgd(0.1), grids.lay(GridShape(y=2)), loss=loss, microbatches=2)
    trainer.step(X)
    assert trainer.engine.program.strategy == "parts"
    assert "rows: " not in capfd.readouterr().err
