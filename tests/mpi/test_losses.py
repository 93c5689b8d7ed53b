"""A Flax module and its loss in a `Trainer` of two processes, which goes on on another grid."""

import json
import sys

import loss_worker
import numpy as np
from launched import MPIRUN, UNDER_MPIRUN, finished

import axonn_jax as ax

pytestmark = UNDER_MPIRUN


def test_two_processes_train_a_module_as_one_does(tmp_path):
    ran = finished([MPIRUN, "--oversubscribe", "-n", "2", sys.executable, loss_worker.__file__, str(tmp_path / "two")])
    assert ran.returncode == 0, ran.stderr[-3000:]
    (line,) = [line for line in ran.stdout.splitlines() if line.startswith("[[")]
    grid = ax.init()
    want = loss_worker.curve([grid] * 3, tmp_path / "one")
    np.testing.assert_allclose(json.loads(line), want, rtol=3e-6)
