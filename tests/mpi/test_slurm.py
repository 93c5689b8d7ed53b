"""A real Slurm of one node: what it does to a job before it ends it, under `srun` and `axonn-jax launch`."""

import getpass
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launched import environment

from axonn_jax.checkpoint.manifest import all_steps, step_of

SBIN = os.pathsep.join([os.environ["PATH"], "/usr/sbin"])
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not all(shutil.which(name, path=SBIN) for name in ("slurmctld", "slurmd", "sbatch")), reason="no Slurm"
    ),
]
CONF = """
ClusterName=here
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/none
CredType=cred/none
MpiDefault=pmi2
ProctrackType=proctrack/linuxproc
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmdSpoolDir={folder}/spool
StateSaveLocation={folder}/state
SlurmdParameters=config_overrides
SchedulerType=sched/builtin
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
TaskPlugin=task/none
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
KillWait=30
NodeName=one NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs={cores}
PartitionName=all Nodes=ALL Default=YES State=UP
"""
OPTIONS = "--grid.data 2 --train.steps 1000000 --train.eval_every 0 --log.every 5"
SCRIPTS = {
    "srun": "srun --mpi=none -n 2 axonn-jax train {config} {options}",
    "launch": "axonn-jax launch -n 2 train {config} {options}",
    "exec launch": "exec axonn-jax launch -n 2 train {config} {options}",
}
WITHIN_S = 400
"""Slurm lets a job that was requeued wait for two minutes."""


def ports(number):
    sockets = [socket.socket() for _ in range(number)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    numbers = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return numbers


def until(condition, about, seconds=WITHIN_S):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, about()
        time.sleep(0.2)


class Slurm:
    """A controller and one node's daemon, of this user, that nobody else can meet."""

    def __init__(self, folder):
        self.folder = folder
        for name in ("spool", "state"):
            (folder / name).mkdir()
        known = {"host": socket.gethostname(), "user": getpass.getuser(), "cores": max(4, os.cpu_count() or 1)}
        text = CONF.format(**known, folder=folder, ports=ports(2))
        (folder / "slurm.conf").write_text(text)
        path = os.pathsep.join([str(Path(sys.executable).parent), SBIN])
        self._env = {**environment(), "SLURM_CONF": str(folder / "slurm.conf"), "PATH": path}
        self._daemons = []

    def __enter__(self):
        log = self.folder / "daemons.log"
        with log.open("ab") as out:
            for words in (["slurmctld", "-D"], ["slurmd", "-D", "-N", "one"]):
                self._daemons.append(subprocess.Popen(words, env=self._env, stdout=out, stderr=out))
        until(lambda: "idle" in self.run("sinfo", "-h", "-o", "%T"), log.read_text, 60)
        return self

    def __exit__(self, *_):
        self.run("scancel", "--full", "--signal=KILL", "-u", getpass.getuser())
        until(lambda: not self.run("squeue", "-h"), lambda: self.run("squeue"), 60)
        for daemon in reversed(self._daemons):
            daemon.send_signal(signal.SIGTERM)
            daemon.wait(60)

    def run(self, *words):
        done = subprocess.run(words, env=self._env, capture_output=True, text=True, timeout=60)
        return done.stdout + done.stderr

    def submit(self, script, *flags):
        """Starts a batch job; its output is `JOB.out` in the folder."""
        (self.folder / "job.sh").write_text(f"#!/bin/bash\n{script}\n")
        said = self.run("sbatch", "--parsable", f"--output={self.folder}/%j.out", "--open-mode=append", *flags,
                        str(self.folder / "job.sh"))  # fmt: skip
        assert said.strip().isdecimal(), said
        return said.strip()

    def output(self, job):
        path = self.folder / f"{job}.out"
        return path.read_text(errors="replace") if path.exists() else ""

    def wait_for(self, job, pattern):
        def here():
            assert re.search(pattern, self.output(job)) or self.queued(job), self.output(job)
            return re.search(pattern, self.output(job))

        until(here, lambda: f"no {pattern!r}:\n{self.output(job)}")

    def queued(self, job):
        return job in self.run("squeue", "-h", "-o", "%i").split()

    def wait_until_gone(self, job):
        until(lambda: not self.queued(job), lambda: self.output(job))


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    with Slurm(tmp_path_factory.mktemp("slurm")) as slurm:
        yield slurm


def saved(run):
    return max((step_of(path) or 0 for path in all_steps(run / "checkpoints")), default=0)


@pytest.mark.parametrize("way", SCRIPTS)
def test_a_job_that_slurm_ends_saves_and_the_next_goes_on(way, slurm, config, tmp_path):
    run = tmp_path / "run"
    options = f"{OPTIONS} --checkpoint.every 1000000 --log.dir {run}"
    script = SCRIPTS[way].format(config=config, options=options)
    ends = {
        "scancel": ("scancel",),
        "requeue": ("scontrol", "requeue"),
        "a signal to the steps": ("scancel", "--signal=USR1"),
        "a signal to the batch shell": ("scancel", "--batch", "--signal=USR1"),
    }
    if way == "srun":  # bash waits for it, and dies of the signal with all that it began
        del ends["a signal to the batch shell"]
    step, job = 0, ""
    for end, words in ends.items():
        if not (job and slurm.queued(job)):
            job = slurm.submit(script, "-n", "2", "--time=20", "--requeue")
        began = rf"resumed at step {step}\b[\s\S]*" if step else ""
        slurm.wait_for(job, began + r"step +\d+/1000000")
        slurm.run(*words, job)
        if end == "requeue":
            until(lambda: saved(run) > step, lambda: slurm.output(job))  # noqa: B023
        else:
            slurm.wait_until_gone(job)
        assert saved(run) > step, f"{end}:\n{slurm.output(job)}"
        step = saved(run)
        assert "starting again" not in slurm.output(job)


def test_a_job_told_before_its_time_limit_goes_to_the_queue_again(slurm, config, tmp_path):
    run = tmp_path / "run"
    options = f"{OPTIONS} --checkpoint.every 1000000 --log.dir {run}"
    script = f"axonn-jax launch --requeue -n $SLURM_NTASKS train {config} {options}"
    job = slurm.submit(script, "--nodes=1", "--ntasks-per-node=2", "--time=2", "--signal=USR1@30", "--requeue")
    slurm.wait_for(job, r"saved at SIGUSR1[\s\S]*resumed at step \d+[\s\S]*step +\d+/1000000")
    assert f"resumed at step {saved(run)} " in slurm.output(job)
    assert "Restarts=1" in slurm.run("scontrol", "show", "job", job)
    slurm.run("scancel", job)
    slurm.wait_until_gone(job)


def test_a_script_that_has_joined_its_processes_itself_trains_under_srun(slurm, tmp_path):
    at = f"127.0.0.1:{ports(1)[0]}"
    script = Path(__file__).with_name("joined_script.py")
    job = slurm.submit(f"srun --mpi=none -n 2 python {script} script {at} {tmp_path} data z", "-n", "2", "--time=10")
    slurm.wait_until_gone(job)
    lines = [json.loads(line) for line in slurm.output(job).splitlines() if line.startswith('{"axis"')]
    assert [line["axis"] for line in lines].count("z") == 2, slurm.output(job)
    assert {tuple(line["losses"]) for line in lines if line["axis"] == "z"} == {tuple(lines[-1]["losses"])}
    assert "by jax.distributed: initialised before, as process 0 of 2" in slurm.output(job)
    for axis in ("data", "z"):
        assert (tmp_path / axis / "step_00000002" / "manifest.json").exists()
