"""Signals to scripts that use the package as a library: their own handlers run, to their end."""

import os
import random
import signal
import sys
import time
from pathlib import Path

import pytest
from launched import UNDER_MPIRUN, Launched, errors, mpirun

pytestmark = UNDER_MPIRUN
SCRIPT = Path(__file__).with_name("signals_script.py")
ENDED_S = 60


def start(folder, when, seconds):
    return Launched(mpirun(2, sys.executable, SCRIPT, folder, when, seconds), folder)


def signalled(run, number, wait=0.0):
    """Sends both ranks a signal, as `scancel` does, once they train; returns the seconds until they have gone."""
    for rank in range(2):
        run.wait_for(f"rank {rank} has taken a step")
    time.sleep(wait)
    for pid in run.ranks().values():
        os.kill(pid, number)
    return run.wait_until_gone(ENDED_S)


def saved(folder):
    """The ranks whose handler came to its end."""
    files = [folder / f"saved-{rank}" for rank in range(2)]
    return [rank for rank, file in enumerate(files) if file.exists() and file.read_text().endswith("complete\n")]


@pytest.mark.parametrize("when", ["before", pytest.param("after", marks=pytest.mark.slow)])
def test_a_handler_of_the_script_saves_to_its_end(when, tmp_path):
    with start(tmp_path, when, 2.0) as run:
        signalled(run, signal.SIGTERM)
        assert saved(tmp_path) == [0, 1], run.stderr[-4000:]
        assert run.mpirun.returncode == 0
        assert not errors(run.stderr)


def test_without_a_handler_sigterm_ends_the_run_with_a_line(tmp_path):
    with start(tmp_path, "never", 0.0) as run:
        signalled(run, signal.SIGTERM)
        assert run.mpirun.returncode == 128 + signal.SIGTERM
        (line,) = errors(run.stderr)
        assert "told to end (SIGTERM)" in line


def test_a_handler_does_not_hold_up_the_end_when_a_peer_has_gone(tmp_path):
    with start(tmp_path, "after", 100.0) as run:
        run.wait_for("rank 0 has taken a step")
        run.wait_for("rank 1 has taken a step")
        os.kill(run.ranks()[0], signal.SIGTERM)
        run.wait_for("handler of rank 0 begins")
        time.sleep(1.0)
        assert not errors(run.stderr), "its peer lives"
        os.kill(run.ranks()[1], signal.SIGKILL)
        run.wait_until_gone(ENDED_S)
        run.wait_for_error(r"rank 1 \(place 1 of the pipe, host \S+\) is gone; it had finished")


@pytest.mark.slow
@pytest.mark.parametrize("number", range(20))
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_no_save_is_lost_at_any_moment(name, number, tmp_path, capsys):
    wait, when = random.Random().uniform(0.0, 2.0), random.Random().choice(["before", "after"])
    with start(tmp_path, when, 1.5) as run:
        took = signalled(run, signal.Signals[name], wait)
        assert saved(tmp_path) == [0, 1], run.stderr[-4000:]
        assert run.mpirun.returncode == 0
    with capsys.disabled():
        print(f"\n{name} after {wait:.2f} s, handler set {when}: saved, all gone in {took:.2f} s", file=sys.stderr)
