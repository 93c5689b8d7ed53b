"""Programs of collectives under way at a time: on CPU devices that share cores, many of them stand still for ever."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DEVICES = """
import os
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4 --xla_backend_optimization_level=0"
import jax, jax.numpy as jnp, numpy as np, optax
from axonn_jax.grid import GridShape, build_grid
grid = build_grid(GridShape(y=2, x=2), jax.devices())
"""
FINITE = """
from jax.sharding import NamedSharding, PartitionSpec as P
from axonn_jax.memory.report import all_finite
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
    done = subprocess.run([sys.executable, "-c", DEVICES + program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-1000:]
