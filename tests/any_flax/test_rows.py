"""Losses of strangers beside a loop with optax on one device: exact on every grid, or a line that says what differs."""

import json
import os
import sys
from pathlib import Path

import any_models as models
import grids
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from launched import ROOT, finished
from row_losses import CASES, MASKED, ROWS, WIDTH, Mlp, X, contrastive, each_row, masked, square, written_for_pmap

import axonn_jax as ax
from axonn_jax.core.errors import UserError
from axonn_jax.core.grid import GridShape

STEPS = 3
ALL = GridShape(data=2, z=2, y=2)


def values(model):
    state = nnx.state(model, nnx.Not(nnx.RngState))
    keys = jax.dtypes.prng_key
    return [np.asarray(v) for v in jax.tree.leaves(state) if not jnp.issubdtype(v.dtype, keys)]


@pytest.mark.parametrize("name", CASES)
def test_a_loss_is_that_of_one_device(name, capfd):
    make, loss, batch, strategy = CASES[name]
    plain, optimizer = make(), optax.adam(1e-2, eps=1e-3)
    alone = {written_for_pmap: square, masked: lambda model, batch: masked(model, batch)[0]}.get(loss, loss)
    if name == "statistics of the batch":
        plain.inside.axis_name = None
    want = models.plain(plain, alone, optimizer, [batch] * STEPS)
    capfd.readouterr()
    trainer = ax.Trainer(make(), optimizer, grids.lay(ALL), loss=loss)
    steps = [trainer.step(batch) for _ in range(STEPS)]
    np.testing.assert_allclose([float(each["loss"]) for each in steps], [value for value, _ in want], rtol=2e-6)
    for got, value in zip(values(trainer.model), values(plain), strict=True):
        np.testing.assert_allclose(got, value, rtol=1e-4, atol=2e-5)
    assert trainer.engine.program.strategy == strategy
    assert ("rows: " in capfd.readouterr().err) == (strategy != "parts")
    if loss is masked:
        assert float(steps[0]["aux"]["rows"]) == batch["mask"].sum()


def test_parts_that_are_asked_for_and_fail_are_one_line():
    """A layer in `jax.vmap` fails there, by jax; what is the loss's own fault is told as that."""

    def step(loss):
        return ax.Trainer(Mlp(), optax.sgd(0.1), grids.lay(ALL), loss=loss, rows="parts").step(X)

    with pytest.raises(UserError, match=r"^rows = 'parts': auto or whole: in parts of the rows the loss fails: Val"):
        step(each_row)
    with pytest.raises(UserError, match=r"^batch = .* in test_rows.py, line \d+, raises KeyError: 'mask'"):
        step(lambda model, batch: square(model, batch) * {}["mask"])


@pytest.mark.parametrize("axes", [GridShape(), GridShape(data=2)], ids=grids.name)
def test_microbatches_that_change_what_is_learned_are_told(axes, capfd):
    ax.Trainer(Mlp(), optax.sgd(0.1), grids.lay(axes), loss=contrastive, microbatches=3).step(X)
    assert "microbatches = 3 change what is learned" in capfd.readouterr().err
    weight = lambda batch: batch["mask"].sum()  # noqa: E731
    trainer = ax.Trainer(Mlp(), optax.sgd(0.1), grids.lay(axes), loss=masked, weight=weight, microbatches=3)
    want = models.plain(Mlp(), lambda m, b: masked(m, b)[0], optax.sgd(0.1), [MASKED])
    assert float(trainer.step(MASKED)["loss"]) == pytest.approx(want[0][0], rel=1e-6)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("kept", [{}, {"zero": 1}, {"offload": "optimizer"}], ids=str)
def test_half_precision_weights_beside_masters_are_compared(kept, capfd):
    memory = ax.MemoryConfig(precision="bf16", **kept)
    with jax.numpy_dtype_promotion("standard"):  # which Flax's norms count on
        for loss, strategy in ((contrastive, "whole"), (square, "parts")):
            trainer = ax.Trainer(Mlp(), optax.sgd(0.1), grids.lay(GridShape(data=2)), loss=loss, memory=memory)
            trainer.step(X)
            assert trainer.engine.program.strategy == strategy
            assert "not compared" not in capfd.readouterr().err


def test_a_mask_that_is_alike_in_the_first_batch_is_told(capfd):
    trainer = ax.Trainer(Mlp(), optax.sgd(0.1), grids.lay(GridShape(data=2)), loss=masked)
    trainer.step(MASKED | {"mask": np.ones(ROWS, np.float32)})
    assert trainer.engine.program.strategy == "whole"
    assert "a mean over what a mask counts (div, row_losses.py:76): weight= keeps it in parts" in capfd.readouterr().err


@pytest.mark.parametrize("largest", ["understood", "not understood"])
def test_a_difference_that_comes_later_is_seen(largest, capfd):
    """Before the first step where the program shows it; else before steps 1, 2, 4, 8, by the numbers of that batch."""

    def loss(model, batch):
        top = batch.max() if largest == "understood" else jax.lax.approx_max_k(batch.reshape(-1), 1)[0][0]
        return square(model, batch) + jax.nn.relu(top - 10)

    trainer = ax.Trainer(Mlp(), optax.sgd(0.1), grids.lay(GridShape(data=2)), loss=loss)
    for step in range(5):
        trainer.step(X + (step == 4) * 20 * (np.arange(ROWS) == 0)[:, None])
        seen = largest == "understood" or step == 4
        assert trainer.engine.program.strategy == ("whole" if seen else "parts")
    said = capfd.readouterr().err
    if largest == "understood":
        assert "rows do not go by themselves: the largest over rows (reduce_max, test_rows.py:" in said
    else:
        assert "compared with all rows at once before steps 0, 1, 2, 4, ...; " in said
        assert "no rule for it on rows (approx_top_k, test_rows.py:" in said
        assert "in parts of the rows the loss is" in said


@jax.custom_vjp
def spread_out(z):
    return z


spread_out.defvjp(lambda z: (z, z), lambda z, g: (g / (1e-3 + jnp.abs(g).mean()) + z.mean(0),))


@pytest.mark.parametrize("mode", ["gate", "policy", "backward pass", "loss of zero", "small term"])
def test_a_difference_that_only_gradients_have_at_first_is_seen(mode):
    """Of a gate that is zero, a ratio of policies that are the same, a backward pass and a head of their own."""

    class Gated(Mlp):
        def __init__(self):
            super().__init__()
            self.gate, self.head = nnx.Param(jnp.zeros(())), nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(1))

    def loss(model, batch):
        z = model(batch)
        if mode == "gate":
            return jnp.mean(jnp.square(z + model.gate * z.mean(0)))
        if mode == "policy":
            ratio = jnp.exp(z.mean(-1) - jax.lax.stop_gradient(z.mean(-1)))
            return jnp.mean(jnp.square(z)) - (ratio * (batch[:, 0] - batch[:, 0].mean())).mean()
        if mode == "backward pass":
            return jnp.mean(jnp.square(spread_out(z)))
        if mode == "loss of zero":
            value = jnp.mean(z * jax.nn.softmax(batch, 0))
            return value - jax.lax.stop_gradient(value)
        return jnp.mean(jnp.square(z)) + 1e-7 * jnp.mean(jnp.square(model.head(batch) @ model.head(batch).T))

    want = models.plain(plain := Gated(), loss, optax.adam(1e-2, eps=1e-12), [X] * STEPS)
    trainer = ax.Trainer(Gated(), optax.adam(1e-2, eps=1e-12), grids.lay(GridShape(data=2)), loss=loss)
    got = [float(trainer.step(X)["loss"]) for _ in range(STEPS)]
    np.testing.assert_allclose(got, [value for value, _ in want], rtol=1e-5, atol=1e-7)
    assert trainer.engine.program.strategy == "whole"
    if mode != "loss of zero":  # whose gradients of biases are rounding, of any size behind Adam
        for value, other in zip(values(trainer.model), values(plain), strict=True):
            np.testing.assert_allclose(value, other, rtol=1e-3, atol=1e-4)


def test_a_loop_whose_rounds_rows_decide_is_told(capfd):
    def loss(model, batch):
        z, _ = jax.lax.while_loop(
            lambda c: jnp.abs(c[0]).max() > 1e-3, lambda c: (c[0] / 2, c[1] + 1), (jax.lax.stop_gradient(batch), 0)
        )
        return square(model, batch + z)

    trainer = ax.Trainer(Mlp(), optax.sgd(0.1), grids.lay(GridShape(data=2)), loss=loss)
    trainer.step(np.ones_like(X))
    assert trainer.engine.program.strategy == "whole"
    assert "the largest over rows, which decides how often a loop runs (reduce_max, " in capfd.readouterr().err


def test_a_loss_that_counts_on_the_rows_of_a_whole_batch_has_no_microbatches():
    def loss(model, batch):
        return square(model, batch.reshape(2, ROWS // 2, WIDTH).reshape(ROWS, WIDTH))

    ax.Trainer(Mlp(), optax.sgd(0.1), grids.lay(GridShape(data=2)), loss=loss).step(X)
    trainer = ax.Trainer(Mlp(), optax.sgd(0.1), grids.lay(GridShape(data=2)), loss=loss, microbatches=3)
    with pytest.raises(ax.UserError, match="microbatches = 3: 1 with a loss that runs on all rows"):
        trainer.step(X)


def test_rows_as_asked(capfd):
    grid = grids.lay(GridShape(data=2))
    parts = ax.Trainer(Mlp(), optax.sgd(0.1), grid, loss=contrastive, rows="parts")
    assert "is not compared" in capfd.readouterr().err
    whole = ax.Trainer(Mlp(), optax.sgd(0.1), grid, loss=contrastive, rows="whole")
    first, second = (float(trainer.step(X)["loss"]) for trainer in (parts, whole))
    assert abs(first - second) > 0.1
    assert second == pytest.approx(float(contrastive(Mlp(), X)), rel=1e-6)
    with pytest.raises(ax.UserError, match="rows = 'all': one of auto, parts, whole"):
        ax.Trainer(Mlp(), optax.sgd(0.1), grid, loss=contrastive, rows="all")


def test_whole_rows_with_zero_offload_and_a_checkpoint(tmp_path):
    def trainer(axes, **memory):
        return ax.Trainer(Mlp(), optax.adam(1e-2), grids.lay(axes), loss=contrastive, memory=ax.MemoryConfig(**memory))

    want = [loss for loss, _ in models.plain(Mlp(), contrastive, optax.adam(1e-2), [X] * 4)]
    first = trainer(ALL, zero=1, offload="optimizer")
    got = [float(first.step(X)["loss"]) for _ in range(2)]
    first.save(tmp_path, 2)
    other = trainer(GridShape(data=2, x=2))
    other.load(tmp_path)
    np.testing.assert_allclose(got + [float(other.step(X)["loss"]) for _ in range(2)], want, rtol=1e-5)


class LinenNet(linen.Module):
    @linen.compact
    def __call__(self, x, train=True):
        x = linen.Dense(2 * WIDTH)(x)
        x = linen.Dropout(0.5, deterministic=not train)(linen.relu(x))
        return linen.Dense(WIDTH)(linen.LayerNorm()(x))


def test_an_evaluation_by_another_loss_of_any_number_of_rows():
    net = LinenNet()
    params = net.init(jax.random.key(0), X, False)

    def loss(params, batch, key):
        return jnp.mean(jnp.square(net.apply(params, batch, rngs={"dropout": key}) - batch))

    def evaluation(params, batch):
        out = net.apply(params, batch, False)
        return jnp.mean(jnp.square(out - batch)), {"rows": ax.total(len(batch)), "size": jnp.abs(out).mean()}

    want, numbers = evaluation(params, X)
    for axes in (GridShape(), ALL):
        grid = grids.lay(axes)
        split, placed = ax.parallelize_linen(loss, params, grid, X)
        trainer = ax.Trainer(placed, optax.sgd(0.1), grid, loss=split, microbatches=3 if axes.devices == 1 else 1)
        for batches in ([X], [X[:16], X[16:21], X[21:]]):
            value, found = trainer.evaluate(batches, loss=evaluation, aux=True)
            assert value == pytest.approx(float(want), rel=1e-6)
            assert found["rows"] == ROWS
            assert found["size"] == pytest.approx(float(numbers["size"]), rel=1e-6)


def test_a_loss_that_reads_the_data_of_its_key_is_compared(capfd):
    def loss(model, batch, key):
        again = jax.random.wrap_key_data(jax.random.key_data(key), impl="threefry2x32")
        return square(model, batch) + 0 * jax.random.uniform(again)

    trainer = ax.Trainer(Mlp(), optax.sgd(0.1), grids.lay(GridShape(data=2)), loss=loss)
    trainer.step(X)
    assert capfd.readouterr().err == ""
    assert trainer.engine.program.strategy == "parts"


def test_an_evaluation_before_the_first_step_does_not_stand_for_it():
    def loss(model, batch):
        return square(model, batch) if len(batch) < ROWS // 2 else contrastive(model, batch)

    trainer = ax.Trainer(Mlp(), optax.sgd(0.1), grids.lay(GridShape(data=2)), loss=loss)
    trainer.evaluate([X[:8]])
    assert trainer.engine.program.strategy == "parts"
    trainer.step(X)
    assert trainer.engine.program.strategy == "whole"


def test_a_proof_that_cannot_be_made_leaves_no_parts(capfd):
    """The loss of one device fails, as it counts on a mesh: the rows of all replicas, or a refusal of microbatches."""

    def loss(model, batch):
        if jax.sharding.get_abstract_mesh().empty:
            raise RuntimeError("no mesh")
        return contrastive(model, batch)

    def trainer(**options):
        return ax.Trainer(Mlp(), optax.sgd(0.1), grids.lay(GridShape(data=2)), loss=loss, **options)

    first = trainer()
    assert float(first.step(X)["loss"]) == pytest.approx(float(contrastive(Mlp(), X)), rel=1e-6)
    assert first.engine.program.strategy != "parts"
    assert "not compared, as the loss of all rows at once fails: RuntimeError: no mesh" in capfd.readouterr().err
    with pytest.raises(UserError, match='microbatches = 3: rows="parts" where no row sees another, which cannot be'):
        trainer(microbatches=3).step(X)


X64 = """
import jax, numpy as np, optax
jax.config.update("jax_enable_x64", True)
jax.config.update("jax_num_cpu_devices", 2)
import axonn_jax as ax
from row_losses import Mlp, X, contrastive

trainer = ax.Trainer(Mlp(), optax.sgd(0.1), ax.init(data=2), loss=contrastive)
print([float(trainer.step(X)["loss"]), float(contrastive(Mlp(), X))], trainer.engine.program.strategy)
"""


def test_a_loss_that_sees_other_rows_is_known_with_numbers_of_eight_bytes():
    done = finished([sys.executable, "-c", X64], PYTHONPATH=f"{ROOT}{os.pathsep}{Path(__file__).parent}")
    assert "not compared" not in done.stderr
    values, strategy = done.stdout.rsplit(" ", 1)
    got, want = json.loads(values)
    assert got == pytest.approx(want, rel=1e-6)
    assert strategy == "whole\n"
