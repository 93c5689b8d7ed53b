"""Recomputation by `nnx.remat` and `nn.remat` around the blocks of a model, in `Trainer(loss=)`."""

import any_models as models
import grids
import hlo_text
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from hlo.steps import keep_recomputation

import axonn_jax as ax
from axonn_jax.core.grid import GridShape

BLOCKS, WIDTH, ROWS, STEPS = 4, 32, 64, 3
GRID = GridShape(data=2, z=2, y=2)


class Block(nnx.Module):
    def __init__(self, rngs):
        self.up, self.down = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs), nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        return x + self.down(nnx.gelu(self.up(x)))


class Net(nnx.Module):
    def __init__(self, rngs, *, remat):
        self.blocks = nnx.List([Block(rngs) for _ in range(BLOCKS)])
        self.remat = remat

    def __call__(self, x):
        for block in self.blocks:
            x = nnx.remat(Block.__call__)(block, x) if self.remat else block(x)
        return x


class LinenBlock(linen.Module):
    @linen.compact
    def __call__(self, x):
        return x + linen.Dense(WIDTH)(linen.gelu(linen.Dense(4 * WIDTH)(x)))


class LinenNet(linen.Module):
    remat: bool

    @linen.compact
    def __call__(self, x):
        for at in range(BLOCKS):
            x = (linen.remat(LinenBlock) if self.remat else LinenBlock)(name=f"block_{at}")(x)
        return x


def batches():
    return list(np.random.default_rng(0).normal(size=(STEPS, ROWS, 16, WIDTH)).astype(np.float32))


def loss(model, batch):
    return jnp.mean(jnp.square(model(batch) - jnp.roll(batch, 1, -1)))


def of_nnx(grid, *, remat):
    model = ax.parallelize(Net(nnx.Rngs(0), remat=remat), grid, call=lambda model: model(batches()[0]))
    return model, loss


def of_linen(grid, *, remat):
    model = LinenNet(remat)
    params = LinenNet(False).init(jax.random.key(0), batches()[0])
    split, placed = ax.parallelize_linen(lambda p, x: loss(lambda x: model.apply(p, x), x), params, grid, batches()[0])
    return placed, split


def compiled(trainer):
    """The step's program as a GPU's compiler makes it, with what is recomputed apart from what is kept."""
    engine = trainer.engine
    lowered = engine.programs.train_step.jitted().lower(engine.train_state, engine.batches.shard(batches()[0]), None)
    return lowered.compile(keep_recomputation())


@pytest.mark.parametrize("make", [of_nnx, of_linen], ids=["nnx", "linen"])
def test_a_step_keeps_less_and_computes_the_same(make):
    grid, losses, kept = grids.lay(GRID), {}, {}
    for remat in (False, True):
        model, own = make(grid, remat=remat)
        trainer = ax.Trainer(model, optax.sgd(0.1), grid, loss=own, microbatches=2)
        losses[remat] = [float(trainer.step(batch)["loss"]) for batch in batches()]
        program = compiled(trainer)
        kept[remat] = program.memory_analysis().temp_size_in_bytes
        found = hlo_text.collectives(program.as_text())
        assert not [one for one in found if one.in_loop and one.crosses(grid.mesh, "data")]
    np.testing.assert_allclose(losses[True], losses[False], rtol=1e-6)
    assert kept[True] < 0.7 * kept[False], kept


def test_gradients_are_those_of_a_plain_loop():
    plain = Net(nnx.Rngs(0), remat=True)
    want = [value for value, _ in models.plain(plain, loss, optax.sgd(0.1), batches())]
    grid = grids.lay(GRID)
    trainer = ax.Trainer(of_nnx(grid, remat=True)[0], optax.sgd(0.1), grid, loss=loss, microbatches=2)
    np.testing.assert_allclose([float(trainer.step(batch)["loss"]) for batch in batches()], want, rtol=1e-6)
    for name, param in nnx.to_flat_state(nnx.state(plain, nnx.Param)):
        held = dict(nnx.to_flat_state(nnx.state(trainer.model, nnx.Param)))[name]
        np.testing.assert_allclose(held.get_value(), param.get_value(), atol=1e-6)
