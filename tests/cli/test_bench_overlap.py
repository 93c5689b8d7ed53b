"""`axonn-jax bench overlap` where a GPU's compiler is installed (extra `aot`): no GPU is needed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from axonn_jax.compat import cuda_plugin_installed
from axonn_jax.planner.hlo.overlap import MAIN

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.skipif(not cuda_plugin_installed(), reason="needs the CUDA plugin: pip install 'axonn_jax[aot]'")
def test_collectives_of_a_step_run_beside_matmuls():
    """Embedding and head have fewer matmuls beside them, and count more in 16 layers than in a whole model."""
    command = [sys.executable, "-m", "axonn_jax.cli.main", "bench", "overlap", "--layers", "16", "--json"]
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-2000:]
    figures = json.loads(done.stdout)
    assert figures["grid"] == {"pipe": 1, "data": 2, "z": 4, "y": 2, "x": 2}
    on, off, automatic = (figures["ratios"][name] for name in ("on", "off", "automatic"))
    assert set(on) == set(off) == set(MAIN)
    for kind in MAIN:
        assert on[kind]["bytes"] >= 0.9, (kind, on)
    assert off["forward all-reduces"]["bytes"] < 0.5
    assert automatic["forward all-reduces"]["bytes"] < 0.5
    steps = {name: program["step_s"] for name, program in figures["programs"].items()}
    assert steps["on"] < min(steps["off"], steps["automatic"])
