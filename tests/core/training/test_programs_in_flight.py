"""Programs in flight: loops that read nothing keep few of them, and devices that share cores get to the end."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from launched import succeeded

import axonn_jax as ax
from axonn_jax.core.pruned import masks

SLOW = ax.models.ModelShape(layers=2, hidden=64, heads=4, kv_heads=4, ffn=1024, vocab=128, seq_len=64)


def unfinished(results):
    return sum(not all(leaf.is_ready() for leaf in jax.tree.leaves(result)) for result in results)


def test_steps_that_nobody_reads():
    grid = ax.init(data=2, z=2)
    trainer = ax.Trainer(ax.models.Transformer(SLOW, rngs=nnx.Rngs(0)), optax.adamw(1e-3), grid)
    batch = np.random.default_rng(0).integers(0, 128, (16, 65)).astype(np.int32)
    metrics = []
    for _ in range(8):
        metrics.append(trainer.step(batch))
        assert unfinished(metrics) <= 2
    assert float(metrics[-1]["loss"]) < float(metrics[0]["loss"])


def test_a_loop_of_ones_own():
    @jax.jit
    def program(x):
        return jax.lax.fori_loop(0, 400, lambda _, a: jnp.tanh(a @ a), x)

    bounded, results = ax.in_flight(3), []
    for _ in range(10):
        results.append(bounded(program(jnp.ones((128, 128)))))
        assert unfinished(results) <= 3
    with pytest.raises(ax.UserError, match="in_flight"):
        ax.in_flight(0)


@pytest.mark.parametrize("method", [masks.magnitude_masks, lambda *given: masks.random_masks(*given, 0)])
def test_masks_of_many_kernels(monkeypatch, method):
    """A round of masks is there before the next begins, however many kernels there are."""
    kernels = {f"{at:02}": jax.device_put(jnp.ones((64, 48)), jax.devices()[0]) for at in range(6)}
    made, real = [], masks._largest

    def watched(*given):
        assert unfinished(made) == 0
        made.append(real(*given))
        return made[-1]

    monkeypatch.setattr(masks, "_largest", watched)
    assert len(method(kernels, 0.3, "layer")) == len(made) == 6


DEVICES = """
import os
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4 --xla_backend_optimization_level=0"
import jax, jax.numpy as jnp, numpy as np, optax
from axonn_jax.core.grid import GridShape, build_grid
grid = build_grid(GridShape(y=2, x=2), jax.devices())
"""
FINITE = """
from jax.sharding import NamedSharding, PartitionSpec as P
from axonn_jax.core.memory.report import all_finite
kinds = [(P("x", "y"), (256, 256)), (P("y", "x"), (256, 256)), (P("x"), (256,)), (P("y"), (256,))]
arrays = [jax.device_put(jnp.ones(size), NamedSharding(grid.mesh, spec)) for spec, size in kinds for _ in range(75)]
assert all_finite(arrays)
"""
EVALUATE = """
from flax import nnx
import axonn_jax as ax
shape = ax.models.ModelShape(1, 64, 8, 8, 128, 64, 64)
trainer = ax.Trainer(lambda: ax.models.Transformer(shape, rngs=nnx.Rngs(0)), optax.adam(1e-3), grid)
assert np.isfinite(trainer.evaluate([np.ones((4, 65), int)] * 400))
"""


@pytest.mark.parametrize("program", [FINITE, EVALUATE], ids=["finite", "evaluate"])
def test_four_devices_on_few_cores_get_to_the_end(program):
    succeeded([sys.executable, "-c", DEVICES + program], 600)
