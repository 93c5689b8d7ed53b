"""Batches of several sizes in turn, in stages of several processes: each size has programs and channels of its own."""

import sys
from pathlib import Path

import pytest
from launched import MPIRUN, UNDER_MPIRUN, finished

pytestmark = UNDER_MPIRUN
WORKER = [sys.executable, str(Path(__file__).with_name("shapes_worker.py"))]
SIZES = "8,16,8,16,4,12,20,8"  # five, of which four are kept


def losses(words):
    ran = finished(words)
    assert ran.returncode == 0, ran.stderr[-3000:]
    return [[float(number) for number in line.split()[2:]] for line in ran.stdout.splitlines() if "loss" in line]


@pytest.mark.parametrize("channel", ["mpi4py", pytest.param("mpi4jax", marks=pytest.mark.slow)])
def test_many_batch_shapes_train_as_in_one_process(channel):
    got = losses([MPIRUN, "--oversubscribe", "-n", "4", *WORKER, SIZES, "pipe=2,x=2", channel])
    want = losses([*WORKER, SIZES, "pipe=1", "auto"])
    assert len(got) == len(SIZES.split(","))
    for here, there in zip(got, want, strict=True):
        assert here == pytest.approx(there, rel=3e-6)
