"""A pruned run under `mpirun`, over processes of one mesh and of a pipe, gives the one-process loss curve."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from launched import MPIRUN, UNDER_MPIRUN, environment

pytestmark = UNDER_MPIRUN
EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "pruned-tiny.toml"
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
    return [[r["loss"], r["grad_norm"]] for r in records if "loss" in r], done.stderr


@pytest.fixture(scope="module")
def one(prepared, tmp_path_factory):
    folder = tmp_path_factory.mktemp("one")
    found, _ = curve(folder / "run", prepared, "--prune.method=magnitude", "--train.microbatches=2")
    assert found[-1][0] < found[0][0]
    return found


@pytest.mark.parametrize("words", [["--grid.data=2", "--memory.zero=1"], ["--grid.pipe=2"]], ids=["data", "pipe"])
def test_two_processes(words, one, prepared, tmp_path):
    given = ["--prune.method=magnitude", "--train.microbatches=2", *words]
    got, _ = curve(tmp_path / "two", prepared, *given, ranks=2)
    np.testing.assert_allclose(got, one, rtol=TOLERANCE)


def test_an_early_bird_over_processes_goes_on(prepared, tmp_path):
    words = ["--prune.every=1", "--prune.threshold=0.5", "--grid.data=2"]
    _, said = curve(tmp_path / "two", prepared, *words, ranks=2)
    assert "step 5: pruned 8 kernels to 0.1" in said
    losses, said = curve(tmp_path / "two", prepared, *words, "--train.steps=8", ranks=2)
    assert "resumed at step 6" in said
    assert "entries of 8 kernels are trained" in said
    assert len(losses) == 8
