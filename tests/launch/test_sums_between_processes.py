"""Sums between CPU processes: by an all-to-all, since gloo's reduce-scatter is wrong (jax issue 40830)."""

import json
import socket
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from launched import environment

from axonn_jax.grid import GridShape, build_grid
from axonn_jax.tensor.collectives import reduce_scatter

SCRIPT = str(Path(__file__).with_name("sums_script.py"))


def test_large_sums_between_processes_are_right_every_time():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    started = [
        subprocess.Popen(
            [sys.executable, SCRIPT, address, rank], env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True,
        )
        for rank in "01"
    ]  # fmt: skip
    for process in started:
        out, err = process.communicate(timeout=200)
        assert process.returncode == 0, err[-3000:]
        (line,) = (line for line in out.splitlines() if line.startswith("{"))
        assert json.loads(line) == {"wrong": 0, "reduce-scatters": 0}


def test_devices_of_one_process_reduce_and_scatter_at_once():
    mesh = build_grid(GridShape(z=2), jax.devices()[:2]).mesh
    mapped = jax.shard_map(lambda x: reduce_scatter(x[0], "z", 0), mesh=mesh, in_specs=P("z"), out_specs=P("z"))
    text = jax.jit(mapped).lower(jnp.ones((2, 8))).compile().as_text()
    assert "reduce-scatter" in text
    assert "all-to-all" not in text
