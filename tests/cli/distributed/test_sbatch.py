"""The batch file of `axonn-jax launch --sbatch`: its text, command, refusals. test_slurm.py submits one."""

import os
import shlex
import subprocess
import sys

import pytest
from commands import refusal, said
from launched import finished

CONFIG = '[model]\nlayers = 1\nhidden = 8\nheads = 1\nseq_len = 8\n[data]\npath = "none"\n[grid]\ndata = 4\n'


@pytest.fixture
def config(tmp_path, monkeypatch):
    folder = tmp_path / "it's a folder"
    folder.mkdir()
    monkeypatch.chdir(folder)
    (folder / "c.toml").write_text(CONFIG)
    return folder


def test_the_file_is_what_slurm_and_bash_read(config):
    words = ["-n", "4", "--sbatch", "my job.sh", "--nodes", "2", "--time", "1-00:30:00"]
    assert said("launch", *words, "train", "c.toml", "--log.dir", "a b") == ("sbatch 'my job.sh'\n", "")
    lines = (config / "my job.sh").read_text().splitlines()
    assert [line.partition(" ")[2] for line in lines if line.startswith("#SBATCH")] == [
        *("--nodes=2", "--ntasks=4", "--ntasks-per-node=2", "--time=1-00:30:00"),
        *("--signal=B:USR1@120", "--requeue", "--open-mode=append"),
    ]
    assert shlex.split(lines[-2]) == ["cd", str(config), "||", "exit"]
    own = ["exec", sys.executable, "-m", "axonn_jax.cli.main", "launch", "--requeue", "-n", "$SLURM_NTASKS"]
    assert shlex.split(lines[-1]) == [*own, "--restarts", "3", "train", "c.toml", "--log.dir", "a b"]
    assert subprocess.run(["bash", "-n", "my job.sh"]).returncode == 0


def test_the_file_starts_a_step_and_a_requeued_job_goes_on_from_its_own_checkpoint_whatever_its_words_say(config):
    """By an srun that says what it was asked, and that its tasks saved at Slurm's warning.

    The run directory has a checkpoint of another run. The node fails once before the job's first save, and once behind.
    """
    said("launch", "-n", "2", "--sbatch", "job.sh", "c.toml", "--checkpoint.resume", "never", "--log.dir", "run")
    for name, status in (("srun", 138), ("scontrol", 0)):
        (config / name).write_text(f'#!/bin/sh\necho "{name} $*" >> asked\nexit {status}\n')
        (config / name).chmod(0o755)
    trains = f"srun --mpi=none -n 2 {sys.executable} -m axonn_jax.cli.main train c.toml --checkpoint.resume never"
    for restarts, resumes in ((0, False), (1, False), (2, True)):
        saved = config / f"run/checkpoints/step_0000000{restarts + 1}"
        if restarts != 1:
            saved.mkdir(parents=True)
            (saved / "manifest.json").touch()
        if restarts == 0:
            os.utime(saved / "manifest.json", (1e9, 1e9))
        (config / "asked").unlink(missing_ok=True)
        slurm = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "2", "SLURM_RESTART_COUNT": str(restarts)}
        done = finished(["bash", "job.sh"], 60, "/", PATH=f"{config}{os.pathsep}{os.environ['PATH']}", **slurm)
        assert done.returncode == 138, done.stderr
        begin, requeue = (config / "asked").read_text().splitlines()
        assert begin == f"{trains} --log.dir run" + resumes * " --checkpoint.resume auto"
        assert requeue == "scontrol requeue 7"


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("-n 4 --sbatch job.sh --nodes 3 c.toml", "--nodes = 3: a divisor of the 4 processes of -n"),
        ("-n 3 --sbatch job.sh c.toml", "-n = 3: a divisor of the grid's 4 devices"),
        ("-n 3 c.toml", "-n = 3: a divisor of the grid's 4 devices"),
        ("--sbatch job.sh --time 4h c.toml", "--time = '4h': [DAYS-]HOURS:MINUTES:SECONDS, five minutes at least"),
        ("--sbatch job.sh --time 0:04:59 c.toml", "--time = '0:04:59': "),
        ("--sbatch c.toml c.toml", "--sbatch = 'c.toml': a file that can be made; File exists"),
        ("--sbatch none/job.sh c.toml", "--sbatch = 'none/job.sh': a file that can be made; No such file"),
        ("--nodes 2 c.toml", "--nodes = 2: given with --sbatch"),
        ("--time 1:00:00 c.toml", "--time = '1:00:00': given with --sbatch"),
    ],
)
def test_what_makes_no_job_is_one_line(words, line, config, capsys):
    said_so = refusal(capsys, "launch", *words.split())
    field, _, accepted = line.partition(": ")
    assert said_so.startswith(f"error: {field}")
    assert accepted in said_so
    assert not (config / "job.sh").exists()
    assert (config / "c.toml").read_text() == CONFIG
