"""Cases of a step's collectives, predicted beside compiled, in a process of its own."""

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

from axonn_jax.core.models.config import ModelShape

ROOT = Path(__file__).resolve().parents[1]


def case(
    model, axes, activations="none", microbatches=1, scanned=False, reshard_after="forward", comm=(0, 0, 0), **more
):
    model = asdict(model) if isinstance(model, ModelShape) else model
    sequences = axes[0] * axes[1] * microbatches
    settings = {"microbatches": microbatches, "sequences": sequences, "activations": activations, "scanned": scanned}
    return {"model": model, "axes": axes, "reshard_after": reshard_after, "comm": comm, **settings, **more}


def check(devices, cases):
    """Accounts for the cases in a process with that many virtual devices; both sides must agree to the byte."""
    command = [sys.executable, str(ROOT / "tests" / "account_worker.py"), str(devices)]
    environ = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}
    done = subprocess.run(command, input=json.dumps(cases), env=environ, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stderr[-3000:]
    results = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(results) == len(cases)
    for one, result in zip(cases, results, strict=True):
        unequal = [row for row in result["rows"] if row[2] != row[3]]
        assert not unequal, (one, unequal)
        assert result["exact"]
        assert result["ratio"] == 1.0
        sizes = dict(zip(("data", "z", "y", "x"), one["axes"], strict=True)) | {"expert": one.get("expert", 1)}
        live = [name for name, size in sizes.items() if size > 1]
        assert {axis for row in result["rows"] for axis in row[1].split("*")} == set(live)
