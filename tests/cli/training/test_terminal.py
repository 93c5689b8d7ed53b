"""Runs whose terminal or pipe is closed: they train on, or save and end, with the exit status that is theirs."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from launched import AXONN, OnTerminal, command, environment, succeeded, write_config

from axonn_jax.core.terminal import printable
from axonn_jax.run.tracking.records import read_metrics

# What a run prints, without the run: lines, warnings of libraries, a bar on a terminal, the last flush.
TALKS = """
import logging, sys, time, warnings
from axonn_jax.core.terminal import last_flush, open_missing, say
from axonn_jax.run.progress import Progress

open_missing()
say("ready")
sys.stdin.readline() if sys.argv[1] == "pipe" else time.sleep(1)
with Progress(20, interval=0.0) as progress:
    for step in range(20):
        progress.update(step, 2.0, 1000.0, 0.5)
        progress.say("a line")
        warnings.warn("a library's")
        logging.warning("a library's")
        time.sleep(0.01)
last_flush()
sys.exit(7)
"""
IGNORING = ["sh", "-c", 'trap "" HUP; exec "$@"', "sh"]  # as nohup does, which would also redirect


pytestmark = pytest.mark.usefixtures("hangup")


@pytest.fixture
def config(prepared, tmp_path):
    return write_config(tmp_path / "c.toml", prepared, more="[checkpoint]\nevery = 0")


def test_lines_into_a_closed_pipe():
    words = [sys.executable, "-c", TALKS, "pipe"]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stderr=subprocess.PIPE, env=environment()) as process:
        assert process.stderr.readline() == b"ready\n"
        process.stderr.close()
        process.stdin.write(b"\n")
        process.stdin.close()
        assert process.wait(30) == 7


def test_a_bar_on_a_closed_terminal():
    with OnTerminal([*IGNORING, sys.executable, "-c", TALKS, "terminal"]) as talking:
        talking.wait_for("ready")
        talking.hang_up()
        assert talking.status() == 7


@pytest.mark.parametrize("closed", ["2>/dev/full", "2>&-", ">&- 2>&-"])
def test_lines_that_cannot_be_written(closed):
    words = [sys.executable, "-c", TALKS, "none"]
    done = subprocess.run(["sh", "-c", f'exec "$@" {closed}', "sh", *words], capture_output=True, env=environment())
    assert (done.returncode, done.stdout, done.stderr) == (7, b"", b"")


@pytest.mark.slow
def test_training_ends_well_when_nobody_reads_its_lines_any_more(config, tmp_path):
    """`2>&1 | head -2`."""
    words = command(config, tmp_path / "run", train_steps=4, train_eval_every=1)
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment()) as process:
        for _ in range(2):
            process.stdout.readline()
        process.stdout.close()
        assert process.wait(120) == 0
    assert [path.name for path in (tmp_path / "run/checkpoints").iterdir()] == ["step_00000004"]
    assert (tmp_path / "run/loss.png").exists()


def test_a_terminal_that_is_closed_lets_training_save_and_end(config, tmp_path):
    run = tmp_path / "run"
    with OnTerminal(command(config, run, train_steps=100_000, train_eval_every=2)) as training:
        training.wait_for("step 2: held-out")
        training.hang_up()
        assert training.status() == 128 + signal.SIGHUP
    (saved,) = (run / "checkpoints").iterdir()
    assert saved.name == f"step_{read_metrics(run)[-1]['step']:08d}"


@pytest.mark.slow
def test_under_nohup_training_goes_on_to_its_end(config, tmp_path):
    run = tmp_path / "run"
    with OnTerminal([*IGNORING, *command(config, run, train_steps=500, train_eval_every=2)]) as training:
        training.wait_for("step 2: held-out")
        training.hang_up()
        time.sleep(0.2)
        os.kill(training.process.pid, signal.SIGHUP)
        assert training.status(120) == 0
    assert (run / "checkpoints/step_00000500").exists()


@pytest.mark.slow
@pytest.mark.parametrize("closed", ["2>/dev/full", "2>&-", ">&-", "<&- >&- 2>&-"])
def test_training_without_a_standard_stream(closed, config, tmp_path):
    words = command(config, tmp_path / "run", train_steps=3)
    succeeded(["sh", "-c", f'exec "$@" {closed}', "sh", *words])
    assert (tmp_path / "run/checkpoints/step_00000003").exists()
    assert json.loads((tmp_path / "run/metrics.jsonl").read_text().splitlines()[0])["step"] == 1


def test_a_command_without_standard_output_is_no_failure():
    done = subprocess.run(["sh", "-c", 'exec "$@" >&-', "sh", *AXONN, "--help"], capture_output=True, env=environment())
    assert (done.returncode, done.stderr) == (0, b"")


def test_what_strangers_wrote_cannot_steer_a_terminal():
    assert printable("a\x1b[2J\x9b1m\u202eb\nc\td é") == "a\\x1b[2J\\x9b1m\\u202eb\nc\td é"
