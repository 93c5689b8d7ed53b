"""Runs that are killed, told to end, out of disk, and started again."""

import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import grids
import jax
import numpy as np
import pytest
from jax import NamedSharding, P
from launched import (
    AXONN,
    UNDER_MPIRUN,
    Launched,
    command,
    complete,
    curves,
    environment,
    errors,
    finished,
    flags,
    mpirun,
    objects,
    slurm_tasks,
    succeeded,
    until,
)  # fmt: skip
from saved import disk_of

from axonn_jax.core.checkpoint.manifest import all_steps, step_of
from axonn_jax.core.checkpoint.restore import load, newest
from axonn_jax.core.distributed.host_sync import LocalSync
from axonn_jax.core.grid import GridShape

pytestmark = UNDER_MPIRUN

EVERY = 2
"""Steps between saves, as the fixture `config` has it."""
# A fixed order adds up gradients in the same order each time, so that runs can be compared to the bit.
SETUPS = {
    "pipe 2": (2, {"grid_pipe": 2, "pipeline_policy": "1f1b"}),
    "x 2": (2, {"grid_x": 2}),
    "two processes a stage": (4, {"grid_pipe": 2, "grid_x": 2, "pipeline_policy": "1f1b"}),
}
KILLS = {"pipe 2": 20, "x 2": 20}


def arrays(run):
    """Everything in the newest checkpoint of a run."""
    found = newest(run / "checkpoints", LocalSync(), pytest.fail)
    one = NamedSharding(grids.lay(GridShape()).mesh, P())
    wanted = {
        name: jax.ShapeDtypeStruct(stored.shape, stored.dtype, sharding=one)
        for name, stored in found.manifest.arrays.items()
    }
    return found.manifest.step, {name: np.asarray(value) for name, value in load(found, wanted).items()}


def same_bits(run, other):
    (step, mine), (step_there, theirs) = arrays(run), arrays(other)
    assert step == step_there
    assert set(mine) == set(theirs)
    for name, value in mine.items():
        np.testing.assert_array_equal(value, theirs[name], err_msg=name, strict=True)


def last_logged(run):
    try:
        lines = (run / "metrics.jsonl").read_text().splitlines()
    except OSError:
        return 0
    steps = [int(found[1]) for line in lines if (found := re.match(r'\{"step": (\d+), "loss"', line))]
    return max(steps, default=0)


def saving_in(run):
    return any(path.name.startswith("unfinished") for path in (run / "checkpoints").iterdir())


def launch(config, run, ranks, restarts, **options):
    return [*AXONN, "launch", "-n", str(ranks), "--restarts", str(restarts), "train", str(config),
            "--log.dir", str(run), *flags(options)]  # fmt: skip


def killed_again_and_again(setup, kills, config, tmp_path, steps, capsys):
    ranks, options = SETUPS[setup]
    options = {**options, "train_steps": steps}
    chance = random.Random()
    run, saving, lost = tmp_path / "run", 0, []
    with Launched(launch(config, run, ranks, kills, **options), tmp_path) as launched:
        seen = 0
        for number in range(kills):
            launched.until(lambda: last_logged(run) > seen, "a new step")  # noqa: B023
            if number % 2:  # on purpose while a checkpoint is being written
                launched.until(lambda: saving_in(run), "a save", 60)
                time.sleep(chance.uniform(0, 0.05))
            else:
                time.sleep(chance.uniform(0, 0.8))
            pids = launched.ranks()
            said = launched.stderr.count("starting again")
            rank = chance.randrange(ranks)
            saving += saving_in(run)
            os.kill(pids[rank], signal.SIGKILL)
            launched.until(lambda: launched.stderr.count("starting again") > said, "a restart", 30)  # noqa: B023
            seen, left = last_logged(run), complete(run)
            lost.append(seen - left)
            # The save that the death interrupted, and what came after it; never more.
            assert left >= seen // EVERY * EVERY - EVERY, (seen, left)
            resumed = f"resumed at step {left} " if left else "compiling"
            launched.until(lambda: resumed in launched.stderr.rpartition("starting again")[2], resumed)  # noqa: B023
        assert launched.mpirun.wait(300) == 0, launched.stderr[-3000:]
        assert "Traceback" not in launched.stderr
        assert "damaged" not in launched.stderr
        log = (run / "restarts.log").read_text().splitlines()
    assert len(log) == kills
    assert all("the job " in line and "last complete checkpoint: " in line for line in log)
    succeeded(command(config, tmp_path / "whole", ranks, **options))
    same_bits(run, tmp_path / "whole")
    assert curves(run)[0] == curves(tmp_path / "whole")[0]
    with capsys.disabled():
        print(f"\n{setup}: {kills} kills, {saving} of them during a save; steps lost {sorted(lost)}", file=sys.stderr)


@pytest.mark.slow
def test_a_killed_run_goes_on_and_ends_as_the_uninterrupted_one(config, tmp_path, capsys):
    killed_again_and_again("pipe 2", 1, config, tmp_path, 12, capsys)


@pytest.mark.slow
@pytest.mark.parametrize("setup", KILLS)
def test_many_kills(setup, config, tmp_path, capsys):
    killed_again_and_again(setup, KILLS[setup], config, tmp_path, 200, capsys)


@pytest.mark.slow
@pytest.mark.parametrize("setup", ["x 2", "two processes a stage"])
def test_told_to_end_it_saves_and_goes_on_later(setup, config, tmp_path):
    ranks, options = SETUPS[setup]
    run = tmp_path / "run"
    with Launched(
        command(config, run, ranks, train_steps=100_000, checkpoint_every=0, **options), tmp_path
    ) as launched:
        launched.wait_for("step 1/")
        launched.ranks()
        time.sleep(random.Random().uniform(0, 1))
        os.kill(random.Random().choice(list(launched.ranks().values())), signal.SIGTERM)  # one is enough
        launched.wait_until_gone(30)
        assert launched.mpirun.returncode == 128 + signal.SIGTERM, launched.stderr[-3000:]
        (ended,) = re.findall(r"^ended by SIGTERM after step (\d+); checkpoint", launched.stderr, re.MULTILINE)
        assert "Traceback" not in launched.stderr
        assert not errors(launched.stderr)
    assert complete(run) == int(ended)
    steps = int(ended) + 2
    done = succeeded(command(config, run, ranks, train_steps=steps, **options))
    assert f"resumed at step {ended} " in done.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_the_launcher_passes_on_what_it_is_told(number, config, tmp_path):
    run = tmp_path / "run"
    with Launched(launch(config, run, 2, 3, grid_pipe=2, train_steps=100_000), tmp_path) as launched:
        launched.wait_for("step 1/")
        launched.ranks()
        os.kill(launched.mpirun.pid, number)
        launched.wait_until_gone(30)
        assert launched.mpirun.returncode == 128 + number, launched.stderr[-3000:]
        (ended,) = re.findall(r"^ended by SIGUSR1 after step (\d+); checkpoint", launched.stderr, re.MULTILINE)
    assert complete(run) == int(ended)
    assert not (run / "restarts.log").exists()


def test_a_second_signal_ends_at_once(config, tmp_path):
    with Launched(command(config, tmp_path / "run", train_steps=100_000), tmp_path) as launched:
        launched.wait_for("step 1/")
        os.kill(launched.mpirun.pid, signal.SIGSTOP)  # so that the first cannot be over before the second
        os.kill(launched.mpirun.pid, signal.SIGINT)
        os.kill(launched.mpirun.pid, signal.SIGCONT)
        launched.wait_until_gone(30)
        assert launched.mpirun.returncode == 128 + signal.SIGINT
        assert "ended by SIGINT after step" in launched.stderr


@pytest.mark.slow
def test_restarts_of_one_process_give_up_and_say_why(config, tmp_path):
    run = tmp_path / "run"
    words = launch(config, run, 1, 1, train_steps=100_000, checkpoint_every=0)
    with Launched(words, tmp_path) as launched:
        for attempt in range(2):
            launched.until(lambda: launched.stderr.count("compiling") > attempt, "a start", 60)  # noqa: B023
            ended = lambda: launched.stderr.count("the job was ended by SIGKILL")  # noqa: E731
            said = ended()
            child = next(pid for pid, _ in launched._processes() if pid != launched.mpirun.pid)
            os.kill(child, signal.SIGKILL)
            until(lambda: ended() > said, lambda: launched.stderr, 20)  # noqa: B023
        assert launched.mpirun.wait(30) == 128 + signal.SIGKILL
    first, second = (run / "restarts.log").read_text().splitlines()
    assert "last complete checkpoint: none; starting again in 1 s (1 of 1)" in first
    assert "not started again, --restarts 1 used up" in second


def test_bad_input_is_not_tried_again(config, tmp_path):
    done = finished(launch(config, tmp_path / "run", 2, 3, grid_pipe=3))
    assert done.returncode == 2
    assert "starting again" not in done.stderr
    assert len(errors(done.stderr)) == 1


@pytest.fixture
def small_disk(tmp_path):
    with disk_of("3m", tmp_path / "disk") as disk:
        yield disk


@pytest.mark.slow
@pytest.mark.parametrize("setup", ["x 2", "pipe 2"])
def test_a_disk_that_runs_full_does_not_end_training(setup, config, small_disk, tmp_path):
    ranks, options = SETUPS[setup]
    run = small_disk / "run"
    with Launched(command(config, run, ranks, train_steps=40, **options), tmp_path) as launched:
        launched.until(lambda: complete(run) >= 2, "a checkpoint")
        free = shutil.disk_usage(small_disk).free
        (small_disk / "filler").write_bytes(bytes(max(free - 700_000, 0)))
        launched.wait_for("was not saved in", 60)
        kept = complete(run)
        (small_disk / "filler").unlink()
        assert launched.mpirun.wait(120) == 0, launched.stderr[-3000:]
        told = [line for line in launched.stderr.splitlines() if line.startswith("warning:")]
        assert told
        assert all(re.search(r"the checkpoint of step \d+ was not saved in \S+: no space left on the device", line)
                   for line in told), told  # fmt: skip
        assert "Traceback" not in launched.stderr
    assert kept >= 2
    assert complete(run) == 40


def test_a_last_checkpoint_that_cannot_be_saved_is_status_1(config, small_disk, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "checkpoints").symlink_to(small_disk)
    (small_disk / "filler").write_bytes(bytes(2_950_000))
    done = finished(command(config, run, train_steps=3, checkpoint_every=0))
    assert done.returncode == 1, done.stderr[-3000:]
    assert "error: the last checkpoint was not saved" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_tasks_that_no_mpi_joins_agree_too(config, tmp_path):
    """As `srun` starts them: jax alone connects the two, and one of them is told to end."""
    run = tmp_path / "run"
    words = command(config, run, grid_x=2, train_steps=100_000, checkpoint_every=4)
    tasks = []
    for rank, variables in enumerate(slurm_tasks()):
        with (tmp_path / f"stderr{rank}").open("w") as err:
            tasks.append(subprocess.Popen(words, stderr=err, env={**environment(), **variables}))
    try:
        until(lambda: complete(run) >= 8, lambda: (tmp_path / "stderr0").read_text()[-3000:])
        tasks[1].send_signal(signal.SIGTERM)
        statuses = [task.wait(60) for task in tasks]
    finally:
        for task in tasks:
            task.kill()
    said = (tmp_path / "stderr0").read_text()
    assert statuses == [128 + signal.SIGTERM] * 2, said[-3000:]
    (ended,) = re.findall(r"^ended by SIGTERM after step (\d+); checkpoint", said, re.MULTILINE)
    assert complete(run) == int(ended)
    assert "Traceback" not in said


def test_a_process_that_fails_while_it_copies_keeps_nobody_waiting_and_later_saves_succeed(tmp_path):
    script = Path(__file__).with_name("failing_save_script.py")
    done = objects(succeeded(mpirun(2, sys.executable, script, tmp_path), timeout=60).stdout)
    full = "no space left on the device"
    assert [each["said"] for each in done] == [["", full, "", full, "", ""]] * 2
    assert [step_of(path) for path in all_steps(tmp_path)] == [6, 5]
    for each in done:  # what processes have told each other of a save does not stay
        assert each["keys"][0] == each["keys"][1]
