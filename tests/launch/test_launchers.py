"""Launchers of other MPIs, and those that refuse to start anything: told apart, and asked once."""

import os
import subprocess
import sys

import pytest
from launched import AXONN, environment

CONFIG = '[model]\nlayers = 1\nhidden = 8\nheads = 1\nseq_len = 8\n[data]\npath = "none"\n[log]\ndir = "run"\n'
VERSIONS = {"Open MPI": "mpirun (Open MPI) 5.0.11", "Hydra": "HYDRA build details:\\n    Version: 5.0.0"}


@pytest.fixture
def launch(tmp_path):
    """Runs `axonn-jax launch` under a launcher that a test writes; returns the process and what was asked of it."""

    def run(kind, then, *flags):
        (tmp_path / "bin").mkdir()
        fake = tmp_path / "bin" / "mpirun"
        version = f'[ "$1" = --version ] && {{ printf "{VERSIONS[kind]}\\n"; exit; }}'
        fake.write_text(f"#!/bin/sh\n{version}\nprintf '%s\\n' \"$*\" >> asked\n{then}\n")
        fake.chmod(0o755)
        (tmp_path / "c.toml").write_text(CONFIG)
        done = subprocess.run(
            [*AXONN, "launch", "-n", "2", *flags, "train", "c.toml"],
            env={**environment(), "PATH": f"{fake.parent}{os.pathsep}{os.environ['PATH']}"},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=60,
        )
        return done, (tmp_path / "asked").read_text().splitlines()

    return run


@pytest.mark.parametrize(("kind", "options"), [("Open MPI", "--oversubscribe --bind-to none "), ("Hydra", "")])
def test_each_kind_is_given_options_that_it_knows_and_asked_once_where_nothing_begins(launch, kind, options):
    done, asked = launch(kind, "echo mpirun as root is a mistake >&2; exit 213")
    assert done.returncode == 213
    assert len(asked) == 1
    assert asked[0].startswith(f"{options}-n 2 {sys.executable} -m axonn_jax.cli.main train c.toml")
    assert "no process of the job began (failed with status 213); not started again" in done.stderr
    assert "mpirun as root is a mistake" in done.stderr


def test_a_job_whose_processes_have_met_is_started_again(launch):
    line = "2 processes on 1 host(s), by MPI: x; 2 x cpu (cpu); grid pipe 1 x data 2"
    done, asked = launch("Hydra", f"printf '{line[:60]}'; printf '{line[60:]}\\n'; exit 9", "--restarts", "1")
    assert done.returncode == 9
    assert len(asked) == 2
    assert line in done.stdout
    assert "not started again, --restarts 1 used up" in done.stderr


def test_a_launcher_of_the_users_own_is_given_as_it_is(launch):
    _, asked = launch("Open MPI", "exit 3", "--mpirun", "mpirun --bind-to core")
    assert asked[0].startswith("--bind-to core -n 2 ")
