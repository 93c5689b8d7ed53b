"""A mixture of experts under `mpirun -n 4` gives the one-process loss curve."""

from pathlib import Path

import numpy as np
from launched import UNDER_MPIRUN, metrics_of

pytestmark = UNDER_MPIRUN
EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "experts-tiny.toml"
TOLERANCE = 2e-6  # sums in another order, as across virtual devices


def curve(folder, prepared, *words, ranks=1):
    records, _ = metrics_of(EXAMPLE, folder, prepared, *words, ranks=ranks)
    return [[r["loss"], r["grad_norm"], r["largest_load"]] for r in records]


def test_experts_over_processes(prepared, tmp_path):
    want = curve(tmp_path / "one", prepared)
    got = curve(tmp_path / "four", prepared, "--grid.data", "2", "--grid.expert", "2", ranks=4)
    np.testing.assert_allclose(got, want, rtol=TOLERANCE)
    assert want[-1][0] < want[0][0]
