"""Dropout of adapters: masks of PEFT's kind, the same on every grid, in training alone."""

import adapted
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from adapted import grids
from flax import nnx

import axonn_jax as ax
from axonn_jax.core.adapters.layers import merged
from axonn_jax.core.grid import GridShape
from axonn_jax.core.models.block_comm import BlockComm
from axonn_jax.core.tensor.elementwise import DropoutKey
from axonn_jax.core.tensor.params import split_module

EPS = float(np.finfo(np.float32).eps)
RATE, STEPS = 0.3, 4
SETTINGS = {
    "z, scanned": (
        GridShape(z=2),
        {
            "microbatches": 2,
            "memory": ax.MemoryConfig(activations="full"),
            "tensor": ax.TensorConfig(scan_layers="yes"),
        },
        BlockComm(),
    ),
    "y x, halves": (GridShape(y=2, x=2), {"tensor": ax.TensorConfig(sub_batches=2, order="package")}, BlockComm()),
    "pipe x, gather": (GridShape(pipe=2, x=2), {"microbatches": 2}, BlockComm(attention=True, mlp=True)),
    "sequence": (
        GridShape(y=2, x=2),
        {"memory": ax.MemoryConfig(sequence_parallel=True)},
        BlockComm(sequence_split=True),
    ),
}


def steps(grid=GridShape(), rate=RATE, comm=BlockComm(), **options):  # noqa: B008
    model = ax.lora(adapted.base(comm=comm), rank=4, dropout=rate)
    got, trainer = adapted.run(model, grid, STEPS, **options)
    arrays = adapted.arrays(trainer)
    trainer.close()
    return got, arrays


@pytest.fixture(scope="module")
def alone():
    return steps()


@pytest.mark.parametrize("name", SETTINGS)
def test_steps_on_a_grid_are_those_of_one_device(alone, name):
    grid, options, comm = SETTINGS[name]
    got, arrays = steps(grid, comm=comm, **options)
    assert np.abs(got / alone[0] - 1).max() < 64 * EPS
    # Adam divides small gradients by their own size; a mask that differs anywhere is 1e-2.
    assert adapted.far(arrays, alone[1]) < (512 if jax.__version_info__ < (0, 12) else 1024) * EPS


def test_training_alone_drops(alone):
    plain, arrays = steps(rate=0.0)
    assert plain[0, 0] == alone[0][0, 0]  # adapters add nothing yet
    assert abs(plain[1, 0] - alone[0][1, 0]) > 1e-4
    assert adapted.far(alone[1], arrays) > 0.01
    model = ax.lora(adapted.base(), rank=4, dropout=RATE)
    _, trainer = adapted.run(model, steps=STEPS)
    plain_model = merged(trainer.model)
    batches = adapted.batches(2)
    want = ax.Trainer(plain_model, adapted.OPTIMIZER, grids.lay(GridShape())).evaluate(batches)
    assert abs(trainer.evaluate(batches) / want - 1) < 16 * EPS


def test_each_target_drops_features_by_a_mask_of_its_own():
    """Masks are read off the result of an A that is the identity for each target, and a B of ones."""
    hidden = adapted.SHAPE.hidden
    layer = ax.lora(adapted.base(), rank=hidden, alpha=hidden, dropout=RATE).blocks[0].attention.qkv
    adapter, size = layer.adapter, adapted.SHAPE.head_dim
    adapter.a.set_value(jnp.tile(jnp.eye(hidden), 3))
    adapter.b.set_value(jnp.ones_like(adapter.b.get_value()))
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 3, hidden)), jnp.float32)
    grid = grids.lay(GridShape())
    with jax.set_mesh(grid.mesh):
        run = jax.jit(
            jax.shard_map(lambda x, key: adapter(x, key=DropoutKey(key)), in_specs=jax.P(), out_specs=jax.P())
        )
        kept = [np.asarray(run(jnp.eye(hidden)[None] * jnp.ones((2, 1, 1)), jax.random.key(seed))) for seed in (0, 1)]
        rows = np.asarray(run(x, jax.random.key(0)))
    group = adapted.SHAPE.heads // adapted.SHAPE.kv_heads
    by_target = [part[..., at] for part in kept for at in (0, group * size, (group + 1) * size)]
    share = np.mean([(part > 0).mean() for part in by_target])
    assert set(np.unique(np.round(kept[0], 5))) == {0, np.float32(round(1 / (1 - RATE), 5))}
    assert abs(share - (1 - RATE)) < 0.05
    assert all(not np.array_equal(a, b) for at, a in enumerate(by_target) for b in by_target[:at])
    assert rows.shape == (2, 3, split_module(nnx.List([layer])).params["0.kernel"].shape[1])
