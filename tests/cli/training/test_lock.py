"""Two runs in one `log.dir`: one trains, the other says who does and has touched nothing."""

import errno
import fcntl
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest
from launched import (
    AXONN,
    UNDER_MPIRUN,
    alive,
    command,
    complete,
    environment,
    errors,
    finished,
    flags,
    succeeded,
    until,
    write_config,
)  # fmt: skip

from axonn_jax.core.distributed.host_sync import LOCK, LocalSync, only_run_in
from axonn_jax.core.documents import file_lock
from axonn_jax.core.errors import UserError
from axonn_jax.run.tracking.records import read_metrics

REFUSED = r"error: log\.dir = '.*': a directory without another run; (process (\d+) on \S+ since .*) trains in"
# A run that starts a program which outlives it, and which has all its open files but those closed on exec.
WITH_A_CHILD = """
import pathlib, subprocess, sys, threading, time
from axonn_jax.cli.main import main

def spawn():
    while not pathlib.Path(sys.argv[1]).exists():
        time.sleep(0.01)
    print("child", subprocess.Popen(["sleep", "100"], close_fds=False).pid, flush=True)

threading.Thread(target=spawn).start()
main(sys.argv[2:])
"""


@pytest.fixture
def config(prepared, tmp_path):
    return write_config(tmp_path / "c.toml", prepared, more="[checkpoint]\nevery = 2\nkeep = 2")


class Contestant:
    """A run in the background, with a learning rate of its own to tell it by."""

    def __init__(self, config, run, rate, errors_to):
        self.rate, self._err = rate, errors_to
        words = command(config, run, train_steps=100_000, train_eval_every=0, train_lr=rate)
        with errors_to.open("w") as err:
            self.process = subprocess.Popen(words, stderr=err, env=environment())

    @property
    def said(self):
        return self._err.read_text()


def restarted(words, restarts):
    return [*AXONN, "launch", "--restarts", str(restarts), *words[len(AXONN) :]]


def contest(config, run, offset, folder):
    """Two runs, the second some seconds later: one is refused, and the other goes on as if it were alone."""
    first = Contestant(config, run, 0.001, folder / "first")
    time.sleep(offset)
    both = [first, Contestant(config, run, 0.002, folder / "second")]
    try:
        until(lambda: any(one.process.poll() is not None for one in both), lambda: first.said)
        loser, winner = sorted(both, key=lambda one: one.process.poll() is None)
        assert loser.process.wait() == 2, loser.said
        (line,) = loser.said.splitlines()
        assert int(re.match(REFUSED, line)[2]) == winner.process.pid
        until(lambda: complete(run) >= 4, lambda: winner.said, process=winner.process)
        winner.process.send_signal(signal.SIGTERM)
        assert winner.process.wait(60) == 128 + signal.SIGTERM, winner.said
    finally:
        for one in both:
            one.process.kill()
            one.process.wait()
    (ended,) = re.findall(r"^ended by SIGTERM after step (\d+); checkpoint", winner.said, re.MULTILINE)
    assert f"lr = {winner.rate}" in (run / "config.toml").read_text()
    assert [record["step"] for record in read_metrics(run)] == list(range(1, int(ended) + 1)), "no line is lost"
    assert not list(run.glob("metrics.*.jsonl"))
    kept = sorted(path.name for path in (run / "checkpoints").iterdir())
    assert len(kept) == 2, kept
    assert kept[-1] == f"step_{int(ended):08d}"
    assert not (run / LOCK).exists()
    assert "warning" not in winner.said
    return loser is first


@pytest.mark.parametrize("offset", [0.0, pytest.param(1.0, marks=pytest.mark.slow)])
def test_one_of_two_runs_trains(offset, config, tmp_path):
    contest(config, tmp_path / "run", offset, tmp_path)


@pytest.mark.slow
def test_twenty_pairs_at_random_offsets(config, tmp_path, capsys):
    chance, seconds = random.Random(), []
    for number in range(20):
        seconds.append(chance.uniform(0, 4))
        late = contest(config, tmp_path / f"run{number}", seconds[-1], tmp_path)
        with capsys.disabled():
            print(f"\npair {number}: {seconds[-1]:.2f} s apart, the {'second' if late else 'first'} trained", end="")
        shutil.rmtree(tmp_path / f"run{number}")


def contents(run):
    return {path: path.is_file() and path.read_bytes() for path in run.rglob("*")}


@pytest.mark.slow
@pytest.mark.parametrize("how", ["alone", "restarts", pytest.param("mpirun", marks=UNDER_MPIRUN),
                                 pytest.param("launch", marks=UNDER_MPIRUN)])  # fmt: skip
def test_a_run_that_is_refused_has_touched_nothing(how, config, tmp_path):
    run = tmp_path / "run"
    succeeded(command(config, run, train_steps=3))
    (run / "checkpoints/unfinished_step_00000009").mkdir()
    options = {"train_steps": 5} | ({"grid_pipe": 2} if how in ("mpirun", "launch") else {})
    words = command(config, run, 2 if how == "mpirun" else 1, **options)
    if how == "launch":
        words = [*AXONN, "launch", "-n", "2", "train", str(config), "--log.dir", str(run), *flags(options)]
    with file_lock(run / LOCK):
        before = contents(run)
        done = finished(restarted(words, 3) if how == "restarts" else words)
        assert contents(run) == before
    assert done.returncode == 2, done.stderr
    (line,) = errors(done.stderr)
    assert int(re.match(REFUSED, line)[2]) == os.getpid()
    assert "starting again" not in done.stderr


@pytest.mark.slow
def test_after_kill_9_the_next_run_gets_the_lock_though_a_child_lives(config, tmp_path):
    run = tmp_path / "run"
    words = [sys.executable, "-c", WITH_A_CHILD, str(run / LOCK), *command(config, run, train_steps=100_000)[3:]]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment()) as killed:
        child = int(killed.stdout.readline().split()[1])
        until(lambda: complete(run), lambda: "no save", process=killed)
        killed.kill()
        killed.wait()
    try:
        assert alive(child)
        assert (run / LOCK).exists()
        succeeded(command(config, run, train_steps=3))
        assert alive(child)
    finally:
        os.kill(child, signal.SIGKILL)


@pytest.mark.slow
def test_a_restart_waits_for_what_is_left_of_the_job_before(config, tmp_path):
    run, err = tmp_path / "run", tmp_path / "stderr"
    words = restarted(command(config, run, train_steps=60, train_eval_every=0), 1)
    with err.open("w") as file, subprocess.Popen(words, stderr=file, env=environment()) as job:
        until(lambda: complete(run), err.read_text, process=job)
        os.kill(int((run / LOCK).read_text().split()[1]), signal.SIGKILL)
        until(lambda: "starting again in 1 s" in err.read_text(), err.read_text, process=job)
        with file_lock(run / LOCK):
            until(lambda: f"waiting for process {os.getpid()} on " in err.read_text(), err.read_text, process=job)
        assert job.wait(120) == 0, err.read_text()
    assert "resumed at step" in err.read_text()


def test_where_a_file_system_has_no_locks_it_is_said_and_the_run_goes_on(tmp_path, monkeypatch):
    def none(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", none)
    told = []
    with only_run_in(str(tmp_path / "run"), LocalSync(), told.append):
        pass
    (line,) = told
    assert "has no locks: nothing keeps a second run out of it" in line


def test_a_directory_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").touch()
    line = r"log.dir = .*file/run': a directory that can be written in: Not a directory"
    with pytest.raises(UserError, match=line), only_run_in(str(tmp_path / "file/run"), LocalSync(), print):
        pass
