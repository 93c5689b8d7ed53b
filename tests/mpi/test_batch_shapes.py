"""Batches of several sizes in turn, in stages of several processes: each size has programs and channels of its own."""

import json
import sys

import pytest
import shapes_worker
from launched import UNDER_MPIRUN, mpirun, objects, succeeded

import axonn_jax as ax

pytestmark = UNDER_MPIRUN
SIZES = [8, 16, 8, 4, 16]  # three, of which the worker keeps two


# Each of four processes compiles the programs of four pipes.
@pytest.mark.parametrize("channel", ["mpi4py", pytest.param("mpi4jax", marks=pytest.mark.slow)])
def test_many_batch_shapes_train_as_in_one_process(channel):
    words = [sys.executable, shapes_worker.__file__, json.dumps(SIZES), "pipe=2,x=2", channel]
    (got,), want = objects(succeeded(mpirun(4, *words)).stdout), shapes_worker.losses(SIZES, ax.init(pipe=1))
    assert len(got) == len(SIZES)
    for here, there in zip(got, want, strict=True):
        assert here == pytest.approx(there, rel=3e-6)
