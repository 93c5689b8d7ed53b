"""A pruned run under `mpirun`, over processes of one mesh and of a pipe, gives the one-process loss curve."""

from pathlib import Path

import numpy as np
import pytest
from launched import UNDER_MPIRUN, metrics_of

pytestmark = UNDER_MPIRUN
EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "pruned-tiny.toml"
TOLERANCE = 2e-6  # sums in another order, as across virtual devices


def curve(folder, prepared, *words, ranks=1):
    records, said = metrics_of(EXAMPLE, folder, prepared, *words, ranks=ranks)
    return [[r["loss"], r["grad_norm"]] for r in records], said


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
