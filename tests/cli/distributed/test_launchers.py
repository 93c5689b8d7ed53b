"""Launchers of other MPIs, and those that refuse to start anything: told apart, and asked once."""

import os
import sys

import pytest
from launched import AXONN, finished

CONFIG = '[model]\nlayers = 1\nhidden = 8\nheads = 1\nseq_len = 8\n[data]\npath = "none"\n[log]\ndir = "run"\n'
CONFIG += "[grid]\ndata = 2\n"
VERSIONS = {"Open MPI": "mpirun (Open MPI) 5.0.11", "Hydra": "HYDRA build details:\\n    Version: 5.0.0"}
MEET = "2 processes on 1 host, by MPI: x; 2 x cpu (cpu); grid pipe 1 x data 2"


@pytest.fixture
def launch(tmp_path):
    """Runs `axonn-jax launch` under a launcher that a test writes; returns the process and what was asked of it."""

    def run(kind, then, *flags):
        (tmp_path / "bin").mkdir()
        (tmp_path / "asked").touch()
        fake = tmp_path / "bin" / "mpirun"
        version = f'[ "$1" = --version ] && {{ printf "{VERSIONS[kind]}\\n"; exit; }}'
        fake.write_text(f"#!/bin/sh\n{version}\nprintf '%s\\n' \"$*\" >> asked\n{then}\n")
        fake.chmod(0o755)
        (tmp_path / "c.toml").write_text(CONFIG)
        path = f"{fake.parent}{os.pathsep}{os.environ['PATH']}"
        done = finished([*AXONN, "launch", "-n", "2", *flags, "train", "c.toml"], 60, tmp_path, PATH=path)
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
    done, asked = launch("Hydra", f"printf '{MEET[:60]}'; printf '{MEET[60:]}\\n'; exit 9", "--restarts", "1")
    assert done.returncode == 9
    assert len(asked) == 2
    assert MEET in done.stdout
    assert "not started again, --restarts 1 used up" in done.stderr


@pytest.mark.parametrize(("end", "status"), [("exit 130", 130), ("exit 129", 129), ("kill -INT $$", 130)])
def test_a_job_that_a_person_ended_is_not_started_again(launch, end, status):
    done, asked = launch("Hydra", f"echo '{MEET}'; {end}", "--restarts", "1")
    assert (done.returncode, len(asked)) == (status, 1)
    assert "again" not in done.stderr


@pytest.mark.parametrize("make", [lambda log: log.symlink_to("c.toml"), os.mkfifo], ids=["link", "pipe"])
def test_a_log_that_is_no_file_is_neither_written_nor_waited_for(launch, make, tmp_path):
    (tmp_path / "run").mkdir()
    make(tmp_path / "run" / "restarts.log")
    done, _ = launch("Hydra", "exit 9")
    assert done.returncode == 9
    assert "axonn-jax: restarts.log in run was not written: " in done.stderr
    assert (tmp_path / "c.toml").read_text() == CONFIG


def test_a_launcher_of_the_users_own_is_given_as_it_is(launch):
    _, asked = launch("Open MPI", "exit 3", "--mpirun", "mpirun --bind-to core")
    assert asked[0].startswith("--bind-to core -n 2 ")


@pytest.fixture
def in_slurm(tmp_path):
    """Runs `axonn-jax launch` where an srun of the test's own lists these plugins; returns what srun was asked."""

    def run(then, *flags, pmix="echo $5", **variables):
        srun = f'[ "$4" = echo ] && {{ {pmix}; exit; }}'
        for name, first in (("srun", srun), ("mpirun", ""), ("scontrol", 'echo "scontrol $*" >> asked; exit')):
            fake = tmp_path / name
            fake.write_text(f'#!/bin/sh\n{first}\necho "{name} $*" >> asked\n{then}\n')
            fake.chmod(0o755)
        (tmp_path / "c.toml").write_text(CONFIG)
        path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
        slurm = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", **variables}
        done = finished([*AXONN, "launch", *flags], 60, tmp_path, PATH=path, **slurm)
        return done, [line.split(" -m ")[0] for line in (tmp_path / "asked").read_text().splitlines()]

    return run


@pytest.mark.parametrize(
    ("flags", "variables", "asked"),
    [
        ("-n 2 c.toml", {"SLURM_CPUS_PER_TASK": "3"}, f"srun --mpi=none --cpus-per-task=3 -n 2 {sys.executable}"),
        ("c.toml", {}, f"srun --mpi=none -n 1 {sys.executable}"),
        ("-n 2 c.toml --grid.pipe 2", {"SLURM_STEP_ID": "4294967290"}, f"srun --mpi=pmix -n 2 {sys.executable}"),
        ("-n 2 --mpirun mpirun c.toml", {}, f"mpirun -n 2 {sys.executable}"),
    ],
)
def test_in_a_slurm_allocation_the_processes_are_a_step_of_it(in_slurm, flags, variables, asked):
    assert in_slurm("exit 2", *flags.split(), **variables)[1] == [asked]


def test_a_pipeline_where_slurm_has_no_pmix_begins_under_mpirun_with_a_line(in_slurm):
    done, asked = in_slurm("exit 2", "-n", "2", "c.toml", "--grid.pipe", "2", pmix="echo Invalid MPI type 'pmix' >&2")
    assert asked[-1].endswith(f"-n 2 {sys.executable}")
    assert asked[-1].startswith("mpirun ")
    assert "no pmix of this Slurm works, which a pipeline needs; under mpirun, scancel saves nothing" in done.stderr


@pytest.mark.parametrize("status", [138, 143])
def test_a_job_that_a_signal_made_save_is_not_started_again(in_slurm, status):
    line = "2 processes on 1 host, by Slurm: x; 2 x cpu (cpu); grid pipe 1 x data 2"
    done, asked = in_slurm(f"echo '{line}'; exit {status}", "-n", "2", "c.toml")
    assert (done.returncode, len(asked)) == (status, 1)


@pytest.mark.parametrize(("status", "requeued"), [(138, True), (143, False), (0, False)])
def test_requeue_asks_slurm_where_the_job_was_warned_and_saved(in_slurm, status, requeued):
    done, asked = in_slurm(f"exit {status}", "-n", "2", "--requeue", "c.toml")
    assert (done.returncode, "scontrol requeue 7" in asked) == (status, requeued)


def test_requeue_outside_slurm_is_one_line(launch):
    done, asked = launch("Hydra", "exit 0", "--requeue")
    assert (done.returncode, asked) == (2, [])
    assert "error: --requeue = True: not given outside a Slurm job" in done.stderr


def test_the_number_behind_the_configuration_is_one_line(tmp_path):
    done = finished([*AXONN, "launch", "c.toml", "-n", "2"], 60, tmp_path)
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "error: -n = 'behind the configuration': before it, as in axonn-jax launch -n 4 train CONFIG.toml"
    ]
