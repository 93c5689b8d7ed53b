"""Precision, offload and ZeRO-1 in whole training steps: the same losses and weights."""

import functools

import hlo_text
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import trainers
from memory_runs import ADAMW, BUCKET, SHAPE, WAYS, batches, made, slow
from trainers import params, same

from axonn_jax import GridShape, UserError
from axonn_jax.core.engines.optimizer import decayed
from axonn_jax.core.pruned.config import PruneConfig

GRIDS = [GridShape(data=2, z=2, x=2), GridShape(pipe=2, data=2, x=2)]


def train(grid, optimizer=ADAMW, **options):
    """Losses of the first steps and the weights after them."""
    trainer = made(grid, optimizer, **options)
    losses = trainers.losses(trainer, batches())
    trainer.close()
    return losses, params(trainer)


@functools.cache
def plain(grid, precision):
    return train(grid, precision=precision)


@pytest.mark.bits
@pytest.mark.parametrize(
    ("grid", "options"),
    [
        (GridShape(data=2, z=2, x=2), {}),
        pytest.param(GridShape(data=4), {"precision": "bf16", "accumulate": "compute"}, marks=slow),
        pytest.param(GridShape(data=2), {"bucket": 16_000_000}, marks=slow),
    ],
    ids=str,
)
def test_reduction_beside_the_update_changes_no_bit(grid, options):
    """A bucket's, where nothing is clipped, against a limit that no norm reaches, for which all are reduced first."""

    def run(clip):
        trainer = made(grid, **{"precision": "fp32", "offload": "optimizer", "bucket": BUCKET, "clip": clip} | options)
        metrics = [trainer.step(batch) for batch in batches()]
        over_data = [
            c for c in hlo_text.collectives(trainer.engine.compiled_step(batches(1)[0]).as_text())
            if c.crosses(trainer.engine.grid.mesh, "data")
        ]  # fmt: skip
        losses, norms = ([float(m[name]) for m in metrics] for name in ("loss", "grad_norm"))
        return losses, norms, params(trainer), sum(c.bytes for c in over_data)

    losses, norms, weights, reduced = run(0.0)
    want_losses, want_norms, want_weights, want_reduced = run(1e9)
    assert losses == want_losses
    np.testing.assert_allclose(norms, want_norms, rtol=1e-6)  # squares add up in another order
    same(weights, want_weights)
    assert reduced == 12  # the loss, how many targets count, and whether all that adds up is finite
    assert want_reduced > 1000


@slow
@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("way", ["both", "both in the compute precision"])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_is_the_same_to_its_rounding(grid, way, precision):
    losses, _ = train(grid, precision=precision, **WAYS[way])
    # A rounding of bf16 is 4e-3 and of fp16 5e-4, in gradients whose sign Adam makes steps of; losses move less.
    np.testing.assert_allclose(losses, plain(grid, precision)[0], rtol={"bf16": 1e-3, "fp16": 1e-4}[precision])
    np.testing.assert_allclose(losses, plain(grid, "fp32")[0], rtol={"bf16": 2e-3, "fp16": 2e-4}[precision])


@pytest.mark.parametrize(
    "optimizer",
    [
        pytest.param(optax.adam(1e-2), marks=slow),
        pytest.param(optax.lion(1e-3, weight_decay=0.1, mask=decayed), marks=slow),
        pytest.param(optax.sgd(0.1, momentum=0.9), marks=slow),
        pytest.param(optax.sgd(0.1), marks=slow),
        optax.lamb(1e-2),
        pytest.param(optax.adafactor(1e-2, min_dim_size_to_factor=16), marks=slow),
        pytest.param(
            optax.chain(optax.clip(0.1), optax.scale_by_adam(), optax.scale_by_schedule(lambda n: -0.01 / (1.0 + n))),
            marks=slow,
        ),
    ],
    ids=["adam", "lion", "momentum", "sgd", "lamb", "adafactor", "chain"],
)
def test_zero_and_offload_of_any_optimizer_that_treats_parameters_one_by_one_are_optax(optimizer):
    grid = GridShape(data=2, x=2)
    expected, there = train(grid, optimizer, precision="fp32")
    for options in (WAYS["zero"], WAYS["both"] | {"bucket": 300}):  # smaller than a matrix on a device
        losses, weights = train(grid, optimizer, precision="fp32", **options)
        np.testing.assert_allclose(losses, expected, rtol=3e-7)
        same(weights, there, atol=5e-6)


@pytest.mark.parametrize("grid", [GridShape(), pytest.param(GridShape(pipe=2), marks=slow)], ids=str)
def test_what_looks_at_all_parameters_is_refused_by_name(grid):
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))
    with pytest.raises(UserError, match=r"optimizer = '[^']*clip_by_global_norm[^']*'.*every parameter by itself"):
        made(grid, optimizer, offload="optimizer")


@pytest.mark.parametrize(
    ("grid", "options"),
    [
        (GridShape(data=2), {"zero": 1, "offload": "optimizer"}),
        pytest.param(GridShape(pipe=2), {"offload": "optimizer"}, marks=slow),
        pytest.param(GridShape(), {"prune": PruneConfig(density=0.5)}, marks=slow),
        pytest.param(GridShape(data=2), {"zero": 1, "accumulate": "compute"}, marks=slow),
    ],
    ids=str,
)
def test_norms_are_float32_beside_kernels_in_half_precision(grid, options):
    """A bfloat16 next to 1 is 1/256 away, several steps of Adam."""
    trainer = made(grid, precision="bf16", **options)
    trainer.step(batches(1)[0])
    stored = {name: w for store in trainer.engine.stores.values() for name, w in store.weights.items()}
    norms = {name: w.dtype for name, w in stored.items() if "norm" in name}
    masters = {name: w for name, w in trainer.engine.params.items() if "norm" in name}
    trainer.close()
    assert len(norms) == 2 * SHAPE.layers + 1
    assert set(norms.values()) == {jnp.dtype("float32")}
    for name, master in masters.items():
        np.testing.assert_array_equal(stored[name], master, err_msg=name)
    assert stored["embedding.table"].dtype == jnp.bfloat16
