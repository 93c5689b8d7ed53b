"""A real Slurm: what it does to a job before it ends it, under `srun` and `axonn-jax launch`, and a killed task."""

import json
import os
import re
import shutil
import signal
from pathlib import Path

import pytest
from launched import AXONN, succeeded
from launched import complete as saved
from slurm_rig import CORES, SBIN, Slurm, until
from test_two_hosts import hosts as hosts
from test_two_hosts import why_not

from axonn_jax.core.terminal import counted

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        CORES < 2 or not all(shutil.which(name, path=SBIN) for name in ("slurmctld", "slurmd", "sbatch")),
        reason="no Slurm (Debian: slurmctld, slurmd, slurm-client, slurm-wlm-basic-plugins), or one core",
    ),
]
OPTIONS = "--train.steps 1000000 --train.eval_every 0 --log.every 5"
SCRIPTS = {
    "srun": "srun --mpi=none -c $SLURM_CPUS_PER_TASK -n 2 axonn-jax train {config} {options}",
    "launch": "axonn-jax launch -n 2 train {config} {options}",
    "exec launch": "exec axonn-jax launch -n 2 train {config} {options}",
}
TRAINS = r"step +\d+/1000000"


@pytest.fixture(scope="module")
def slurm(tmp_path_factory, request):
    hosts = None if why_not() else request.getfixturevalue("hosts")
    with Slurm(tmp_path_factory.mktemp("slurm"), hosts) as slurm:
        yield slurm


def options(run, every=1_000_000, axis="data"):
    return f"{OPTIONS} --grid.{axis} 2 --checkpoint.every {every} --log.dir {run}"


def pmix(slurm):
    if "works" not in slurm.run("srun", "--mpi=pmix", "-n", "1", "echo", "works"):
        pytest.skip("Slurm's mpi/pmix does not load (Debian: slurm-wlm-basic-plugins, libpmix-dev)")


def test_tasks_are_bound_to_cores(slurm):
    """The plugin task/affinity is at work, whose binding the next test looks at."""
    assert slurm.run("srun", "--mpi=none", "-N", "1", "-n", "1", "nproc").strip() == "1"


@pytest.mark.parametrize("way", SCRIPTS)
def test_a_job_that_slurm_ends_saves_and_the_next_goes_on(way, slurm, config, tmp_path):
    run = tmp_path / "run"
    script = SCRIPTS[way].format(config=config, options=options(run))
    ends = {
        "scancel": ("scancel",),
        "requeue": ("scontrol", "requeue"),
        "a signal to the steps": ("scancel", "--signal=USR1"),
        "a signal to the batch shell": ("scancel", "--batch", "--signal=USR1"),
    }
    if way == "srun":  # bash waits for it, and dies of the signal with all that it began
        del ends["a signal to the batch shell"]
    tasks = slurm.packed if way == "exec launch" else slurm.spread
    step, job = 0, ""
    for end, words in ends.items():
        if not (job and slurm.queued(job)):
            job = slurm.submit(script, *tasks, "--time=20", "--requeue")
        began = rf"resumed at step {step}\b[\s\S]*" if step else ""
        slurm.wait_for(job, began + TRAINS)
        cores = [os.sched_getaffinity(slurm.task(job, rank)) for rank in (0, 1)]
        assert min(map(len, cores)) >= CORES // 2, cores
        assert len(cores[0] | cores[1]) >= CORES // 2 * 2, cores
        slurm.run(*words, job)
        if end == "requeue":
            until(lambda: saved(run) > step, lambda: slurm.output(job))  # noqa: B023
        else:
            slurm.wait_until_gone(job)
        assert saved(run) > step, f"{end}:\n{slurm.output(job)}"
        step = saved(run)
        assert "starting again" not in slurm.output(job)
        hosts = 2 if "--nodes=2" in tasks else 1
        assert f"2 processes on {counted(hosts, 'host')}, by Slurm" in slurm.output(job)


def test_a_job_told_before_its_time_limit_goes_to_the_queue_again(slurm, config, tmp_path):
    run = tmp_path / "run"
    script = f"axonn-jax launch --requeue -n $SLURM_NTASKS train {config} {options(run)}"
    job = slurm.submit(script, *slurm.spread, "--time=2", "--signal=USR1@30", "--requeue")
    slurm.wait_for(job, r"saved at SIGUSR1[\s\S]*resumed at step \d+[\s\S]*" + TRAINS)
    assert f"resumed at step {saved(run)} " in slurm.output(job)
    assert "Restarts=1" in slurm.run("scontrol", "show", "job", job)
    slurm.run("scancel", job)
    slurm.wait_until_gone(job)


def test_the_file_of_launch_saves_before_its_limit_and_goes_on(slurm, config, tmp_path):
    """But for a limit that a test can wait for."""
    run, nodes = tmp_path / "run", len(slurm.nodes)
    words = ["launch", "-n", "2", "--sbatch", tmp_path / "job.sh", "--nodes", nodes, "train", config]
    succeeded([*AXONN, *words, *options(run).split()])
    job = slurm.submit_file(tmp_path / "job.sh", "--time=3")
    shown = slurm.run("scontrol", "show", "job", job)
    assert re.search(rf"Requeue=1[\s\S]* NumNodes={nodes}[\s\S]* NumTasks=2 ", shown), shown
    slurm.wait_for(job, r"saved at SIGUSR1[\s\S]*resumed at step \d+[\s\S]*" + TRAINS)
    assert f"resumed at step {saved(run)} " in slurm.output(job)
    assert f"2 processes on {counted(nodes, 'host')}, by Slurm" in slurm.output(job)
    slurm.run("scancel", job)
    slurm.wait_until_gone(job)


def kill(slurm, job, rank, run):
    """Kills a task of a job that has saved; returns the step of the checkpoint that cannot be lost any more."""
    until(lambda: saved(run) > 0, lambda: slurm.output(job))
    step = saved(run)
    os.kill(slurm.task(job, rank), signal.SIGKILL)
    return step


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_task_ends_the_step_and_the_next_job_goes_on(rank, slurm, config, tmp_path):
    run = tmp_path / "run"
    script = SCRIPTS["srun"].format(config=config, options=options(run, every=10))
    job = slurm.submit(script, *slurm.spread, "--time=20")
    step = kill(slurm, job, rank, run)
    until(lambda: not slurm.queued(job), lambda: slurm.output(job), 60)
    # Where rank 0 has died, jax may end the process before the error reaches our own line.
    assert re.search(r"another (process of the run has ended|task died)", slurm.output(job)), slurm.output(job)
    assert saved(run) >= step
    following = slurm.submit(script, *slurm.spread, "--time=20")
    slurm.wait_for(following, rf"resumed at step {saved(run)}\b[\s\S]*{TRAINS}")
    slurm.run("scancel", following)
    slurm.wait_until_gone(following)


def test_launch_goes_on_after_a_killed_stage_of_a_pipeline_over_pmix(slurm, config, tmp_path):
    pmix(slurm)
    run = tmp_path / "run"
    script = SCRIPTS["launch"].format(config=config, options=options(run, every=10, axis="pipe"))
    job = slurm.submit(script, *slurm.spread, "--time=20")
    step = kill(slurm, job, 1, run)
    slurm.wait_for(job, rf"starting again in 1 s[\s\S]*resumed at step \d+\b[\s\S]*{TRAINS}")
    assert int(re.findall(r"resumed at step (\d+)", slurm.output(job))[-1]) >= step
    before = saved(run)
    slurm.run("scancel", job)
    slurm.wait_until_gone(job)
    assert saved(run) > before
    assert f"ended by SIGTERM after step {saved(run)}" in slurm.output(job)


def test_a_script_that_has_joined_its_processes_itself_trains_under_srun(slurm, tmp_path):
    """By jax's own look at Slurm; for a pipeline its processes part again, so each step of the job has a world."""
    pmix(slurm)
    script = Path(__file__).with_name("joined_script.py")
    steps = [
        f"srun --mpi={mpi} -n 2 python {script} script slurm {tmp_path} {axes}"
        for mpi, axes in (("none", "data z"), ("pmix", "pipe"))
    ]
    job = slurm.submit("\n".join(steps), *slurm.spread, "--time=10")
    slurm.wait_until_gone(job)
    lines = [json.loads(line) for line in slurm.output(job).splitlines() if line.startswith('{"axis"')]
    assert sorted(line["axis"] for line in lines) == sorted(2 * ["data", "z", "pipe"]), slurm.output(job)
    assert all(line["losses"] == pytest.approx(lines[0]["losses"], rel=2e-6) for line in lines)
    assert "by jax.distributed: initialised before, as process 0 of 2" in slurm.output(job)
    assert "jax.distributed is shut down: each stage of a pipeline has its own" in slurm.output(job)
    for axis in ("data", "z", "pipe"):
        assert (tmp_path / axis / "step_00000002" / "manifest.json").exists()
