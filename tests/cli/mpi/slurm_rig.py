"""A real Slurm: a controller and the daemon of one node, or of two where two hosts can be made."""

import getpass
import os
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import launched
from launched import environment

SBIN = os.pathsep.join([os.environ["PATH"], "/usr/sbin"])
CORES = len(os.sched_getaffinity(0))
CONF = """
ClusterName=here
SlurmctldHost={first}({address})
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/none
AuthInfo=cred_expire=5
CredType=cred/none
MpiDefault=pmi2
ProctrackType=proctrack/linuxproc
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmdSpoolDir={folder}/spool.%n
TmpFS={folder}/tmp.%n
StateSaveLocation={folder}/state
SlurmdParameters=config_overrides
SchedulerType=sched/builtin
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
TaskPlugin=task/affinity
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
KillWait=30
PartitionName=all Nodes=ALL Default=YES State=UP
"""
NODE = "NodeName={name} NodeHostname={name} NodeAddr={address} Port={port} SocketsPerBoard=1 CoresPerSocket={cores}\n"
WITHIN_S = 400


def ports(number):
    sockets = [socket.socket() for _ in range(number)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    numbers = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return numbers


def until(condition, about, seconds=WITHIN_S):
    launched.until(lambda: condition() or time.sleep(0.2), about, seconds)


class Slurm:
    """A controller and its nodes' daemons, of this user, that nobody else can meet.

    `hosts` are two hosts (`test_two_hosts.Hosts`), a node each; None: this host alone is the one node.
    """

    def __init__(self, folder, hosts=None):
        self.folder = folder
        self.nodes = hosts.names if hosts else [socket.gethostname()]
        addresses = hosts.addresses if hosts else ["127.0.0.1"]
        for name in ("state", *(f"{kind}.{node}" for kind in ("spool", "tmp") for node in self.nodes)):
            (folder / name).mkdir()
        known = {"first": self.nodes[0], "address": addresses[0], "user": getpass.getuser()}
        numbers = ports(2)
        text = CONF.format(**known, folder=folder, ports=numbers)
        for name, address in zip(self.nodes, addresses, strict=True):
            text = NODE.format(name=name, address=address, port=numbers[1], cores=CORES) + text
        (folder / "slurm.conf").write_text(text)
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")  # none is used, or looked for
        self.packed = ["--nodes=1", "--ntasks=2", f"--cpus-per-task={CORES // 2}"]
        """sbatch's options for two tasks on one node."""
        on_two = ["--nodes=2", "--ntasks-per-node=1", f"--cpus-per-task={CORES}"]
        self.spread = on_two if hosts else self.packed
        """sbatch's options for two tasks on as many nodes as there are."""
        path = os.pathsep.join([str(Path(sys.executable).parent), SBIN])
        self._env = {**environment(), "SLURM_CONF": str(folder / "slurm.conf"), "PATH": path}
        self._hosts, self._daemons = hosts, []

    def __enter__(self):
        log = self.folder / "daemons.log"
        words = [(self.nodes[0], ["slurmctld", "-D"]), *((node, ["slurmd", "-D", "-N", node]) for node in self.nodes)]
        with log.open("ab") as out:
            for node, daemon in words:
                begin = self._hosts.on(node, daemon) if self._hosts else daemon
                self._daemons.append(subprocess.Popen(begin, env=self._env, stdout=out, stderr=out))
        idle = ["idle"] * len(self.nodes)
        try:
            until(lambda: self.run("sinfo", "-h", "-N", "-o", "%T").split() == idle, log.read_text, 60)
        except AssertionError:
            self.end()
            raise
        return self

    def __exit__(self, *_):
        self.run("scancel", "--full", "--signal=KILL", "-u", getpass.getuser())
        until(lambda: not self.run("squeue", "-h"), lambda: self.run("squeue"), 60)
        self.end()

    def end(self):
        for daemon in reversed(self._daemons):
            daemon.send_signal(signal.SIGTERM)
            daemon.wait(60)

    def run(self, *words):
        begin = self._hosts.on(self.nodes[0], words) if self._hosts else words
        done = subprocess.run(begin, env=self._env, capture_output=True, text=True, timeout=60)
        return done.stdout + done.stderr

    def submit(self, script, *flags):
        """Starts a batch job; its output is `JOB.out` in the folder."""
        (self.folder / "job.sh").write_text(f"#!/bin/bash\n{script}\n")
        return self.submit_file(self.folder / "job.sh", "--open-mode=append", *flags)

    def submit_file(self, path, *flags):
        said = self.run("sbatch", "--parsable", f"--output={self.folder}/%j.out", *flags, str(path))
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

    def task(self, job, rank):
        """The process number of a task of a job's step; the batch shell, which also has a rank, has no tasks."""
        wanted = [f"SLURM_JOB_ID={job}".encode(), f"SLURM_PROCID={rank}".encode(), b"SLURM_STEP_NUM_TASKS="]
        for entry in Path("/proc").iterdir():
            with suppress(OSError):
                variables = (entry / "environ").read_bytes() if entry.name.isdecimal() else b""
                command = (entry / "cmdline").read_bytes().split(b"\0") if variables else [b""]
                if b"python" in command[0] and all(word in variables for word in wanted):
                    return int(entry.name)
        raise AssertionError(f"no task {rank} of job {job}:\n{self.output(job)}")
