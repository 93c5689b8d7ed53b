"""`axonn-jax launch` on a terminal: Ctrl-C, a terminal that is closed, and output that nobody reads any more."""

import signal
import subprocess
import time

import pytest
from launched import AXONN, UNDER_MPIRUN, OnTerminal, command, complete, environment, flags, until

from axonn_jax.core.checkpoint.manifest import all_steps, step_of
from axonn_jax.run.tracking.records import read_metrics

pytestmark = [*UNDER_MPIRUN, pytest.mark.slow, pytest.mark.usefixtures("hangup")]


def launch(config, run, **options):
    words = [*AXONN, "launch", "-n", "2", "train", str(config), "--log.dir", str(run)]
    return [*words, *flags({"grid_pipe": 2, "checkpoint_every": 0, "train_eval_every": 2, **options})]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_what_happens_to_the_terminal_lets_all_processes_save_and_end(number, config, tmp_path):
    run = tmp_path / "run"
    with OnTerminal(launch(config, run, train_steps=100_000)) as job:
        job.wait_for("step 2: held-out")
        if number == signal.SIGINT:
            job.press(b"\x03")
        else:
            job.hang_up()
        assert job.status() == 128 + number, job.shown[-3000:]
    assert [step_of(path) for path in all_steps(run / "checkpoints")] == [read_metrics(run)[-1]["step"]]
    assert not (run / "restarts.log").exists()


def test_training_ends_well_when_nobody_reads_the_lines_of_mpirun(config, tmp_path):
    """`2>&1 | head -2`: mpirun itself ends its processes where its output is closed."""
    run = tmp_path / "run"
    words = launch(config, run, train_steps=10)
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment()) as process:
        for _ in range(2):
            process.stdout.readline()
        process.stdout.close()
        assert process.wait(120) == 0
    assert [step_of(path) for path in all_steps(run / "checkpoints")] == [10]
    assert not (run / "restarts.log").exists()


@pytest.mark.alone
def test_ctrl_c_under_a_bare_mpirun_ends_soon_and_loses_no_earlier_save(config, tmp_path):
    """What README and docs/checkpoints.md say of it."""
    run = tmp_path / "run"
    words = command(config, run, 2, grid_pipe=2, train_steps=100_000, checkpoint_every=20, train_eval_every=0)
    with OnTerminal(words) as job:
        until(lambda: job.read(0.05) or complete(run), lambda: job.shown)
        before = complete(run)
        job.press(b"\x03")
        began = time.monotonic()
        assert job.status() != 0
        assert time.monotonic() - began < 10
    assert complete(run) >= before
