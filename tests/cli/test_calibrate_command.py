"""`axonn-jax calibrate`: the file it writes is one that `plan` reads."""

import json
import os
import subprocess
import sys
from typing import get_args

import pytest
from commands import answer, refusal
from launched import AXONN, UNDER_MPIRUN, mpirun, succeeded

from axonn_jax.core.terminal import libraries_on_stderr
from axonn_jax.planning.machines.machine import Measured
from axonn_jax.planning.machines.machine_file import load_machine

KINDS = get_args(Measured)


def test_it_measures_and_plan_reads_the_file(tmp_path, capsys):
    out = tmp_path / "here.toml"
    argv = ["calibrate", "--devices", "2", "--rounds", "1", "--seq-len", "128", "--out", str(out), "--json"]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    done = subprocess.run(
        [sys.executable, "-m", "axonn_jax.cli.main", *argv],
        capture_output=True, text=True, timeout=300, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    figures, machine = json.loads(done.stdout), load_machine(str(out))
    assert figures["devices"] == machine.node.devices == 2
    assert {(one.kind, one.inner, one.size) for one in machine.collectives} == {(kind, 1, 2) for kind in KINDS}
    assert [one.channel for one in machine.messages] == ["local"]
    assert "measuring matmuls" in done.stderr
    assert 1e8 < machine.device.peak_fp32 < 1e14
    assert 0 < machine.node.at_once <= 2
    assert (machine.device.platform, machine.device.capability) == ("cpu", 0.0)
    assert machine.device.attention > 0
    memory = f"memory_bytes = {machine.device.memory_bytes}"  # whatever this machine has
    out.write_text(out.read_text().replace(memory, "memory_bytes = 64e9", 1))
    plan = ["plan", "--model", "gpt-1.3b", "--machine", str(out), "--devices", "2", "--batch-tokens", "8192"]
    assert answer(capsys, *plan)["configs"][0]["step_s"] > 0


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--devices", "0"], "--devices"),
        (["--rounds", "0"], "--rounds"),
        (["--seq-len", "0"], "--seq-len = 0"),
        (["--seq", "64"], "did you mean '--seq-len'?"),
        (["--head-dim", "-1"], "--head-dim"),
        (["--out", "x.txt"], "--out"),
        (["--out", "nowhere/x.toml"], "--out"),
    ],
)
def test_one_line_for_nonsense(capsys, flags, named):
    assert named in refusal(capsys, "calibrate", *flags)


def test_a_file_that_cannot_be_written_is_told_before_anything_is_measured(capsys, tmp_path):
    (tmp_path / "x.toml").mkdir()
    assert "--out" in refusal(capsys, "calibrate", "--out", tmp_path / "x.toml")


def test_what_libraries_print_is_not_in_the_figures(capfd):
    with libraries_on_stderr():
        os.write(1, b"connected to 1 peer\n")
    print("{}")
    assert capfd.readouterr() == ("{}\n", "connected to 1 peer\n")


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [pytest.param(2, marks=UNDER_MPIRUN)])
def test_processes_measure_together(tmp_path, ranks):
    out = tmp_path / "both.toml"
    words = ["--devices", str(ranks), "--rounds", "1", "--seq-len", "64", "--out", str(out), "--json"]
    done = succeeded(mpirun(ranks, *AXONN, "calibrate", *words), timeout=300)
    figures, machine = json.loads(done.stdout), load_machine(str(out))
    assert figures["processes"] == machine.node.devices == ranks
    assert [one.channel for one in machine.messages] == ["mpi4py"]
    for kind in KINDS:
        curve = machine.curve(kind, 1, ranks)
        assert len(curve) == 5
        assert all(seconds > 0 for _, seconds in curve)
