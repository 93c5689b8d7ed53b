"""Launchers' variables with anything in them: a run, or one line that names the variable and its value."""

import os
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from axonn_jax.cli.doctor.checks import pinned, slurm
from axonn_jax.cli.main import rank_of
from axonn_jax.core.distributed.gpu_limits import LIMIT, VARIABLES, fraction, pinned_limit
from axonn_jax.core.distributed.gpus import Gpu, visible
from axonn_jax.core.distributed.processes import World, detect
from axonn_jax.core.errors import UserError

LAUNCHERS = (
    "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "PMI_SIZE", "PMI_RANK",
    "PMI_LOCAL_RANK", "PMIX_SIZE", "PMIX_RANK", "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS",
    "SLURM_STEP_NODELIST", "SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS",
)  # fmt: skip
MEMORY = (LIMIT, *VARIABLES)
HUGE = "9" * 5000
BAD = ["abc", "-1", "2.0", "1e3", " ", "²", "٣", "0x2", "99999999999", HUGE, "\udcff", "\x1b[31m"]
VALUES = st.sampled_from(["", "0", "1", "2", "4", "gpu[7-8]", "[", *BAD]) | st.text(
    st.characters(exclude_characters="\0"), max_size=8
)


def mpi():
    return World(0, 2, 1, "127.0.0.1:5000", "MPI", "Open MPI")


def outcome(call, *arguments):
    """What a call returns, or the UserError that it raises."""
    try:
        return call(*arguments)
    except UserError as error:
        return error


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(st.sampled_from(LAUNCHERS), VALUES, max_size=len(LAUNCHERS)))
def test_any_variables_make_a_world_or_one_line(environ):
    rank, *_ = rank_of(environ)
    assert rank >= 0
    assert slurm(environ).check == "slurm"
    found = outcome(detect, environ, mpi)
    if isinstance(found, UserError):
        assert found.field in LAUNCHERS
        assert len(str(found).splitlines()) == 1
        assert len(str(found)) < 400
    else:
        assert isinstance(found, World)
        assert 0 <= found.rank < found.size


@pytest.mark.parametrize("name", ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE"])
@pytest.mark.parametrize("value", BAD, ids=lambda value: ascii(value[:12]))
def test_a_size_that_is_no_number_is_named(name, value):
    with pytest.raises(UserError, match=rf"{name} = .*: a whole number from 1 to 2147483647") as raised:
        detect({name: value}, mpi)
    assert raised.value.value in (value, f"{value[:40]}...")


@pytest.mark.parametrize("value", [*BAD, "2"], ids=lambda value: ascii(value[:12]))
def test_a_rank_that_cannot_be_is_named_before_mpi_starts(value):
    with pytest.raises(UserError, match="OMPI_COMM_WORLD_RANK = "):
        detect({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": value}, lambda: pytest.fail("MPI was started"))


@given(st.dictionaries(st.sampled_from(MEMORY), VALUES | st.sampled_from(["0.5", "platform"])))
def test_any_memory_variables_are_numbers_or_one_line(environ):
    for read in (pinned_limit, fraction):
        found = outcome(read, environ)
        assert not isinstance(found, UserError) or found.field in MEMORY
    assert pinned(environ).found


@given(VALUES)
def test_any_list_of_gpus_is_read(value):
    present = [Gpu("GPU-a"), Gpu("GPU-b")]
    assert set(visible({"CUDA_VISIBLE_DEVICES": value}, present)) <= {"GPU-a", "GPU-b"}


STARTED = """
import sys
from axonn_jax.cli.main import report
from axonn_jax.core.distributed.initialize import init
try:
    init()
except Exception as error:
    sys.exit(report(error))
"""


@pytest.mark.parametrize(("name", "value"), [("OMPI_COMM_WORLD_SIZE", "abc"), ("OMPI_COMM_WORLD_RANK", HUGE)])
def test_a_start_says_it_in_one_line(name, value):
    env = {**os.environ, "OMPI_COMM_WORLD_SIZE": "2", name: value, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", STARTED], capture_output=True, text=True, env=env, timeout=60)
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith(f"error: {name} = '{value[:40]}")
    assert done.stderr.count("\n") == 1
