"""Exchanges between processes through host memory: what every process has got, whole and by rank."""

import sys
from pathlib import Path

from launched import UNDER_MPIRUN, mpirun, objects, succeeded

pytestmark = UNDER_MPIRUN

WANT = [[0, 2_000_003], "\0é\0", ["", ""], "a", [2**40, 2**40 + 1], ["a.field", "3", 5000]]


def test_texts_numbers_and_errors_have_their_whole_length_over_mpi_and_over_jax():
    done = succeeded(mpirun(2, sys.executable, Path(__file__).with_name("sync_script.py")))
    got = {each["rank"]: each["got"] for each in objects(done.stdout)}
    assert got == {0: WANT * 2, 1: WANT * 2}
