"""A Flax module and its loss in a `Trainer` of two processes, which goes on on another grid."""

import sys

import loss_worker
import numpy as np
from launched import UNDER_MPIRUN, mpirun, objects, succeeded

import axonn_jax as ax

pytestmark = UNDER_MPIRUN


def test_two_processes_train_a_module_as_one_does(tmp_path):
    (got,) = objects(succeeded(mpirun(2, sys.executable, loss_worker.__file__, tmp_path / "two")).stdout)
    grid = ax.init()
    want = loss_worker.curve([grid] * 3, tmp_path / "one")
    np.testing.assert_allclose(got, want, rtol=3e-6)
