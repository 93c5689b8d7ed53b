"""Real faults: a rank killed, stopped, a run told to end, MPI missing. Everything ends in time and says why."""

import os
import random
import re
import shutil
import signal
import sys
import time
from math import prod
from pathlib import Path

import pytest
from launched import (
    AXONN,
    MPIRUN,
    UNDER_MPIRUN,
    Launched,
    alive,
    command,
    errors,
    finished,
    mpirun,
    slurm_tasks,
    together,
    write_config,
)  # fmt: skip

from axonn_jax.core.checkpoint.manifest import read
from axonn_jax.core.distributed.gossip import SILENT_S

SETUPS = {"pipe 4": {"grid_pipe": 4}, "two processes a stage": {"grid_pipe": 2, "grid_x": 2}}
TOLD = {"mpirun": {"grid_pipe": 2}, "ranks": SETUPS["two processes a stage"]}
KILLED_S, STOPPED_S, ENDED_S, STALL_S = 15, 25, 15, 10
REPEATS = 20

# What a report has to tell: who (and where), what it last did, and what the one who reports waits for.
DONE = r"(nothing yet|[FIWB]{1,2}\d+\.\d+)"
DOES = r"(waits for|is at|is between|is compiling|is saving|has sent no heartbeat)"


@pytest.fixture
def launch(prepared, tmp_path):
    def start(setup, **options):
        config = write_config(tmp_path / "c.toml", prepared, 2)
        long = {"train_steps": 100_000, "train_eval_every": 50, **setup, **options}
        return Launched(command(config, tmp_path / "run", prod(setup.values()), **long), tmp_path)

    return start


def moment(chance):
    return chance.uniform(0.0, 2.0)


def place_of(rank, setup):
    return rank if setup == "pipe 4" else rank // 2


def kill(launch, setup, rank, wait, capsys):
    with launch(SETUPS[setup]) as run:
        run.wait_for("step 1/")
        time.sleep(wait)
        os.kill(run.ranks()[rank], signal.SIGKILL)
        took = run.wait_until_gone(KILLED_S)
        assert run.mpirun.returncode != 0
        told = errors(run.stderr)
        place = place_of(rank, setup)
        gone = rf"rank {rank} \(place {place} of the pipe, host \S+\) is gone; it had finished {DONE} in step \d+ and "
        line = next((line for line in told if re.search(gone + DOES, line)), None)
        assert line, run.stderr[-4000:]
        assert re.search(rf"rank \d \(place \d of the pipe\) has finished {DONE} and {DOES}", line), line
        tell(capsys, f"{setup}: rank {rank} killed after {wait:.2f} s: all gone in {took:.2f} s, {len(told)} line(s)")


def stop(launch, setup, rank, wait, capsys):
    with launch(SETUPS[setup], pipeline_stall_timeout=STALL_S) as run:
        run.wait_for("step 1/")
        time.sleep(wait)
        os.kill(run.ranks()[rank], signal.SIGSTOP)
        took = run.wait_until_gone(STOPPED_S, stopped=(rank,))
        left = alive(run.ranks()[rank])
        assert run.mpirun.returncode != 0
        told = errors(run.stderr)
        silent = rf"nothing heard of rank {rank} \(place {place_of(rank, setup)} of the pipe, host \S+\) for \d+ s"
        assert any(re.search(silent, line) for line in told), run.stderr[-4000:]
        assert any("waits for" in line or "is at" in line for line in told), run.stderr[-4000:]
        tell(capsys, f"{setup}: rank {rank} stopped after {wait:.2f} s: others gone in {took:.2f} s, "
                     f"{len(told)} line(s), stopped one {'left' if left else 'gone'}")  # fmt: skip


def tell(capsys, line):
    """Shown also where the test passes: run with `-m slow`, these lines are the distribution."""
    with capsys.disabled():
        print("\n" + line, file=sys.stderr)


class TestFaults:
    pytestmark = UNDER_MPIRUN

    @pytest.mark.parametrize(
        ("setup", "rank"), [pytest.param("pipe 4", 1, marks=pytest.mark.slow), ("two processes a stage", 3)]
    )
    def test_a_killed_rank_ends_all(self, setup, rank, launch, capsys):
        kill(launch, setup, rank, moment(random.Random()), capsys)

    @pytest.mark.parametrize(
        ("setup", "rank"), [("pipe 4", 2), pytest.param("two processes a stage", 1, marks=pytest.mark.slow)]
    )
    def test_a_stopped_rank_ends_all(self, setup, rank, launch, capsys):
        stop(launch, setup, rank, moment(random.Random()), capsys)

    @pytest.mark.parametrize(("size", "rank"), [(2, 1), pytest.param(3, 0, marks=pytest.mark.slow)])
    def test_a_stopped_rank_of_one_mesh_is_named(self, size, rank, launch):
        """Jax alone would end the others later, by abort."""
        with launch({"grid_data": size}, train_global_batch=12 * size) as run:
            run.wait_for("step 1/")
            time.sleep(1)  # behind its second step it is no longer taken to compile
            os.kill(run.ranks()[rank], signal.SIGSTOP)
            run.wait_for_error(rf"^error: run ended: nothing heard of rank {rank} \(host \S+\) for \d+ s", 60)
            run.wait_until_gone(ENDED_S, stopped=(rank,))
            assert run.mpirun.returncode != 0

    @pytest.mark.slow
    @pytest.mark.parametrize("number", range(REPEATS))
    @pytest.mark.parametrize("setup", SETUPS)
    def test_a_rank_killed_at_any_moment(self, setup, number, launch, capsys):
        chance = random.Random()
        kill(launch, setup, chance.randrange(4), moment(chance), capsys)

    @pytest.mark.slow
    @pytest.mark.parametrize("number", range(REPEATS))
    @pytest.mark.parametrize("setup", SETUPS)
    def test_a_rank_stopped_at_any_moment(self, setup, number, launch, capsys):
        chance = random.Random()
        stop(launch, setup, chance.randrange(4), moment(chance), capsys)

    def test_a_run_that_stood_still_as_a_whole_goes_on(self, launch):
        """As by Ctrl-Z and fg, `scontrol suspend` or `docker pause`, for longer than silence and stall may last."""
        with launch({"grid_pipe": 2}, pipeline_stall_timeout=SILENT_S) as run:
            run.wait_for("step 1/")
            ranks = run.ranks().values()
            for sent, wait in ((signal.SIGSTOP, SILENT_S + 3), (signal.SIGCONT, 3)):  # several heartbeats
                for pid in ranks:
                    os.kill(pid, sent)
                time.sleep(wait)
            assert all(map(alive, ranks)), run.stderr[-4000:]
            for pid in ranks:
                os.kill(pid, signal.SIGTERM)
            run.wait_until_gone(ENDED_S)
            assert "ended by SIGTERM after step" in run.stderr

    @pytest.mark.slow
    @pytest.mark.parametrize("number", range(REPEATS // 2))
    def test_a_rank_killed_while_the_run_starts(self, number, launch, capsys):
        """In MPI's start, while it compiles, in the first steps: before the watch runs, mpirun alone reports."""
        with launch(SETUPS["two processes a stage"]) as run:
            end = time.monotonic() + random.Random().uniform(0.2, 8.0)
            while time.monotonic() < end or not run.ranks():
                time.sleep(0.02)
            rank = random.Random().choice(list(run.ranks()))
            said = run.stderr.splitlines()[-1:]
            os.kill(run.ranks()[rank], signal.SIGKILL)
            took = run.wait_until_gone(KILLED_S)
            assert run.mpirun.returncode != 0
            assert "Traceback" not in run.stderr
            tell(capsys, f"rank {rank} killed after {said}: all gone in {took:.2f} s")

    def test_data_that_changes_under_one_rank_ends_all_with_a_save(self, prepared, tmp_path):
        """Each rank has a copy of its own, by a relative path; only the second rank's changes."""
        words, config = [], write_config(tmp_path / "c.toml", "data", 2)
        for rank in range(2):
            shutil.copytree(prepared, tmp_path / str(rank) / "data")
            words += [":", "-n", "1", "--wdir", tmp_path / str(rank)]
            words += command(config, tmp_path / "run", grid_data=2, train_steps=100_000)
        with Launched(mpirun(1, *words[3:]), tmp_path) as run:
            run.wait_for("step 1/")
            os.truncate(tmp_path / "1" / "data" / "train-00000.bin", 4096)
            run.ranks()
            run.wait_until_gone(ENDED_S)
            assert run.mpirun.returncode == 2, run.stderr[-4000:]
            line = r"error: data.path = 'data': .* train-00000.bin has changed; ended after step (\d+); checkpoint (.*)"
            found = re.search(line, run.stderr)
            assert found, run.stderr[-4000:]
            assert read(Path(found[2])).run["position"] == int(found[1]) * 16

    @pytest.mark.parametrize("to", ["mpirun", pytest.param("ranks", marks=pytest.mark.slow)])
    def test_a_run_told_to_end(self, to, launch, capsys):
        """As a user's kill or Slurm's scancel does it: to mpirun, or to every rank at once.

        Told itself, mpirun gives the ranks a second or so and then kills; so what they say may be cut off.
        """
        with launch(TOLD[to]) as run:
            run.wait_for("step 1/")
            run.ranks()
            for pid in [run.mpirun.pid] if to == "mpirun" else run.ranks().values():
                os.kill(pid, signal.SIGTERM)
            took = run.wait_until_gone(ENDED_S)
            assert run.mpirun.returncode != 0
            assert not errors(run.stderr), run.stderr[-4000:]
            assert "Traceback" not in run.stderr
            if to == "ranks":
                assert "ended by SIGTERM after step" in run.stderr
                assert run.mpirun.returncode == 128 + signal.SIGTERM
            tell(capsys, f"SIGTERM to {to}: all gone in {took:.2f} s")


HIDDEN = """
import sys
sys.modules.update(dict.fromkeys(sys.argv[1].split(",")))
from axonn_jax.cli.main import main
sys.exit(main(sys.argv[2:]))
"""


def without(modules, words, ranks=1):
    hidden = [sys.executable, "-c", HIDDEN, modules, *words[len(AXONN) :]]
    return finished(mpirun(ranks, *hidden) if ranks > 1 else hidden, timeout=120)


def test_one_process_trains_a_pipeline_without_any_mpi(prepared, tmp_path):
    config, run = write_config(tmp_path / "c.toml", prepared, 2), tmp_path / "run"
    done = without("mpi4py,mpi4jax", command(config, run, grid_pipe=2, train_steps=2, train_warmup=0))
    assert done.returncode == 0, done.stderr[-3000:]
    assert "channel local" in done.stderr
    assert (run / "timeline.json").exists()


@pytest.mark.skipif(MPIRUN is None, reason="no mpirun; scripts/setup installs one")
@pytest.mark.parametrize(
    ("hidden", "ranks", "options", "said", "advice"),
    [
        ("mpi4py", 2, {}, "mpirun = 'several processes': mpi4py and an MPI that it loads", "scripts/setup"),
        ("mpi4jax", 2, {"pipeline_channel": "mpi4jax"}, "mpi4jax does not", "scripts/setup"),
        # In one process no package would help: these channels are for several.
        ("mpi4py", 1, {"pipeline_channel": "mpi4py"}, "pipeline.channel = 'mpi4py'", "local or auto"),
    ],
    ids=["mpi4py under mpirun", "mpi4jax under mpirun", "mpi4py alone"],
)
def test_a_missing_package_is_one_line(hidden, ranks, options, said, advice, prepared, tmp_path):
    config = write_config(tmp_path / "c.toml", prepared, 2)
    done = without(hidden, command(config, tmp_path / "run", grid_pipe=2, **options), ranks)
    assert done.returncode == 2, done.stderr[-3000:]
    (line,) = errors(done.stderr)
    assert said in line
    assert advice in line
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()


def test_processes_that_mpi_does_not_join_are_refused(prepared, tmp_path):
    """Two tasks as `srun` without PMIx starts them: each is a world of one process to MPI."""
    words = command(write_config(tmp_path / "c.toml", prepared, 2), tmp_path / "run", grid_pipe=2)
    both = together(lambda rank: words, slurm_tasks(), seconds=60)
    assert [done.returncode for done in both] == [2, 2], both
    (line,) = errors(both[0].stderr)
    assert "a launch that MPI takes part in (mpirun, or srun --mpi=pmix): MPI sees 1 process, Slurm 2" in line
    assert not (tmp_path / "run").exists()
