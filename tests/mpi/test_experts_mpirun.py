"""A mixture of experts under `mpirun -n 4` gives the one-process loss curve."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
from launched import MPIRUN, UNDER_MPIRUN, environment

pytestmark = UNDER_MPIRUN
EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "experts-tiny.toml"
SIZES = ["--train.steps=6", "--train.warmup=1", "--model.layers=2", "--model.seq_len=64", "--train.global_batch=8"]
TOLERANCE = 2e-6  # sums in another order, as across virtual devices


def curve(folder, prepared, *words, ranks=1):
    command = [sys.executable, "-m", "axonn_jax.cli.main", "train", str(EXAMPLE), "--data.path", str(prepared)]
    command += ["--log.dir", str(folder), *SIZES, *words]
    if ranks > 1:
        command = [MPIRUN, "--oversubscribe", "-n", str(ranks), *command]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [[r["loss"], r["grad_norm"], r["largest_load"]] for r in records if "loss" in r]


def test_experts_over_processes(prepared, tmp_path):
    want = curve(tmp_path / "one", prepared)
    got = curve(tmp_path / "four", prepared, "--grid.data", "2", "--grid.expert", "2", ranks=4)
    np.testing.assert_allclose(got, want, rtol=TOLERANCE)
    assert want[-1][0] < want[0][0]
