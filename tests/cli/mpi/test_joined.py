"""Scripts that have their own `jax.distributed`, or jax's variables for it: `init` takes the processes as they are."""

import os
import sys
from pathlib import Path

import pytest
from launched import UNDER_MPIRUN, mpirun, objects, succeeded, together

from axonn_jax.core.distributed.network import free_port

SCRIPT = str(Path(__file__).with_name("joined_script.py"))
REFUSED = "axonn_jax.core.errors.UserError: "


def address():
    return f"127.0.0.1:{free_port('127.0.0.1')}"


def by_hand(how, folder, *axes, **variables):
    """Starts two processes and returns the lines of both, of JSON, and their errors."""
    at = address()
    own = {name: value.replace("ADDRESS", at) for name, value in variables.items()}
    each = [{**own, "RANK": rank, **({"JAX_PROCESS_ID": rank} if own else {})} for rank in "01"]
    both = together(lambda rank: [sys.executable, SCRIPT, how, at, folder, *axes], each)
    return objects("".join(done.stdout for done in both)), [done.stderr for done in both]


def check(lines, axes):
    for axis in axes:
        first, second = (line for line in lines if line["axis"] == axis)
        assert {first["rank"], second["rank"]} == {0, 1}
        assert first["size"] == second["size"] == 2
        assert first["losses"] == second["losses"]
        assert first["losses"][2] < first["losses"][0]
    curves = [line["losses"] for line in lines]
    assert all(curve == pytest.approx(curves[0], rel=2e-6) for curve in curves)


def test_what_the_script_has_joined_is_taken_and_a_second_grid_too(tmp_path):
    lines, errors = by_hand("script", str(tmp_path), "data", "z")
    check(lines, ("data", "z"))
    assert "by jax.distributed: initialised before, as process 0 of 2" in errors[0]
    assert (tmp_path / "z" / "step_00000002" / "manifest.json").exists()


def test_variables_of_jax_are_taken(tmp_path):
    variables = {"JAX_COORDINATOR_ADDRESS": "ADDRESS", "JAX_NUM_PROCESSES": "2"}
    lines, errors = by_hand("variables", str(tmp_path), "z", **variables)
    check(lines, ("z",))
    assert "by JAX variables" in errors[0]


def test_a_pipeline_needs_mpi_and_says_so(tmp_path):
    lines, errors = by_hand("script", str(tmp_path), "pipe")
    assert not lines
    for error in errors:
        assert f"{REFUSED}grid.pipe = 2: a launch that MPI takes part in; jax.distributed has 2" in error


class TestUnderMpirun:
    pytestmark = UNDER_MPIRUN

    @pytest.mark.parametrize("axes", [("pipe",), pytest.param(("data", "z"), marks=pytest.mark.slow)])
    def test_what_the_script_has_joined_trains(self, tmp_path, axes):
        done = succeeded(mpirun(2, sys.executable, SCRIPT, "script", address(), tmp_path, *axes))
        check(objects(done.stdout), axes)
        assert ("jax.distributed is shut down: each stage of a pipeline has its own" in done.stderr) == ("pipe" in axes)
        assert os.path.exists(tmp_path / axes[0] / "step_00000002" / "manifest.json")
