"""Sums between CPU processes: by an all-to-all, since gloo's reduce-scatter is wrong (jax issue 40830)."""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from launched import objects, together

from axonn_jax.distributed.network import free_port
from axonn_jax.grid import GridShape, build_grid
from axonn_jax.tensor.collectives import reduce_scatter

SCRIPT = str(Path(__file__).with_name("sums_script.py"))


def test_large_sums_between_processes_are_right_every_time():
    address = f"127.0.0.1:{free_port('127.0.0.1')}"
    for done in together(lambda rank: [sys.executable, SCRIPT, address, str(rank)], [{}, {}]):
        assert done.returncode == 0, done.stderr[-3000:]
        assert objects(done.stdout) == [{"wrong": 0, "reduce-scatters": 0}]


def test_devices_of_one_process_reduce_and_scatter_at_once():
    mesh = build_grid(GridShape(z=2), jax.devices()[:2]).mesh
    mapped = jax.shard_map(lambda x: reduce_scatter(x[0], "z", 0), mesh=mesh, in_specs=P("z"), out_specs=P("z"))
    text = jax.jit(mapped).lower(jnp.ones((2, 8))).compile().as_text()
    assert "reduce-scatter" in text
    assert "all-to-all" not in text
