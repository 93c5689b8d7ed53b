"""`axonn-jax train` in processes of its own, alone or under mpirun: to its end, or started and watched."""

import json
import os
import random
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import pytest

from axonn_jax.core.checkpoint.manifest import all_steps, step_of

ROOT = Path(__file__).resolve().parents[1]
MPIRUN = shutil.which("mpirun", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
UNDER_MPIRUN = [
    pytest.mark.mpi,
    pytest.mark.skipif(MPIRUN is None or find_spec("mpi4py") is None, reason="no MPI; scripts/setup installs one"),
]
OPEN_MPI_4 = (
    MPIRUN is not None and b"(Open MPI) 4." in subprocess.run([MPIRUN, "--version"], capture_output=True).stdout
)
OF_OPEN_MPI_5 = pytest.mark.skipif(bool(OPEN_MPI_4), reason="mpirun's options and sockets are those of Open MPI 5")
AXONN = [sys.executable, "-m", "axonn_jax.cli.main"]

CONFIG = """
[model]
layers = {layers}
hidden = 32
heads = 4
seq_len = 32

[data]
path = "{data}"

[train]
steps = 20
global_batch = 16
microbatches = 4
lr = 3e-3
warmup = 2
eval_every = 10
eval_batches = 2
"""


def write_config(path, data, layers=1, more=""):
    """The file of a small run, with lines of further tables behind it."""
    path.write_text(f"{CONFIG.format(data=data, layers=layers)}\n{more}\n")
    return path


def environment():
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("OMPI_", "PMI", "SLURM_"))}
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    free = {"OMPI_MCA_hwloc_base_binding_policy": "none"}  # Open MPI 4 gives each of two ranks one core
    return {**kept, **root, **free, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}


def gpu_environment(folder, uuids):
    """As `environment`, of a machine whose nvidia-smi, in `folder`, lists these GPUs."""
    smi = folder / "nvidia-smi"
    listed = "".join(f"echo 'GPU {number}: A100 (UUID: {uuid})'\n" for number, uuid in enumerate(uuids))
    smi.write_text(f"#!/bin/sh\n{listed}")
    smi.chmod(0o755)
    kept = {key: value for key, value in environment().items() if key != "CUDA_VISIBLE_DEVICES"}
    return {**kept, "PATH": f"{folder}:{kept['PATH']}", "JAX_PLATFORMS": "cuda"}


def flags(options):
    """Keyword arguments as flags: `grid_pipe=2` is `--grid.pipe 2`."""
    return [word for key, value in options.items() for word in (f"--{key.replace('_', '.', 1)}", str(value))]


def mpirun(ranks, *words):
    return [MPIRUN, "--oversubscribe", "-n", str(ranks), *map(str, words)]


def command(config, run, ranks=1, **options):
    words = [*AXONN, "train", str(config), "--log.dir", str(run), *flags(options)]
    return words if ranks == 1 else mpirun(ranks, *words)


def finished(words, timeout=200, cwd=None, **variables):
    """What became of a command, in an environment with some variables changed."""
    env = {**environment(), **variables}
    return subprocess.run([*map(str, words)], capture_output=True, text=True, env=env, timeout=timeout, cwd=cwd)


def succeeded(words, timeout=200, cwd=None):
    """As `finished`; fails where the status is not 0."""
    done = finished(words, timeout, cwd)
    assert done.returncode == 0, done.stderr[-3000:]
    return done


def together(words_of, variables_of, seconds=240):
    """What becomes of two processes that nothing but their variables joins; each is given words by its rank."""
    starts = [(words_of(rank), {**environment(), **variables}) for rank, variables in enumerate(variables_of)]
    both = [subprocess.Popen(words, env=env, stdout=-1, stderr=-1, text=True) for words, env in starts]
    said = [process.communicate(timeout=seconds) for process in both]
    return [
        subprocess.CompletedProcess(one.args, one.returncode, *texts) for one, texts in zip(both, said, strict=True)
    ]


def slurm_tasks():
    """The variables of two tasks of one node, as srun sets them; the coordinator's port comes from the job's number."""
    job = {"SLURM_JOB_ID": str(random.SystemRandom().randrange(10**6)), "SLURM_STEP_ID": "0"}
    job |= {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NODELIST": "localhost"}
    return [{**job, "SLURM_PROCID": rank, "SLURM_LOCALID": rank} for rank in "01"]


def objects(text):
    """JSON among the lines that libraries write."""
    return [json.loads(line) for line in text.splitlines() if line.startswith(("{", "[["))]


def until(holds, about, seconds=120, process=None):
    """Waits until something holds; fails behind the seconds, or when a process has ended, with what is known."""
    end = time.monotonic() + seconds
    while not holds():
        assert process is None or process.poll() is None, about()
        assert time.monotonic() < end, f"not within {seconds} s: {about()}"
        time.sleep(0.02)


def complete(run):
    """The step of a run's newest complete checkpoint, 0 if there is none."""
    return max((step_of(path) or 0 for path in all_steps(run / "checkpoints")), default=0)


def curves(run):
    """Losses, gradient norms and held-out losses that a run wrote down."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [record for record in records if "loss" in record]
    held_out = [record["eval_loss"] for record in records if "eval_loss" in record]
    return [r["loss"] for r in steps], [r["grad_norm"] for r in steps], held_out


def errors(stderr):
    return [line for line in stderr.splitlines() if line.startswith("error:")]


class Launched:
    """A run under mpirun that a test does something to; leaving the block kills what is left of it."""

    def __init__(self, words, folder):
        self._err = open(folder / "stderr", "w+b")  # noqa: SIM115
        self.mpirun = subprocess.Popen(
            words, stdout=self._err, stderr=self._err, env={**environment(), "AXONN_TEST_RUN": str(folder)}
        )
        self._mark = f"AXONN_TEST_RUN={folder}".encode()
        self._pids: dict[int, int] = {}

    def __enter__(self):
        return self

    def __exit__(self, *_):
        with suppress(ProcessLookupError):
            os.kill(self.mpirun.pid, signal.SIGKILL)
        self.mpirun.wait(30)
        for pid, _ in self._processes():  # ranks, stopped ones too, and the daemons of other hosts
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._err.close()

    @property
    def stderr(self):
        self._err.flush()
        return Path(self._err.name).read_text(errors="replace")

    def ranks(self):
        """Process numbers by rank."""
        for pid, variables in self._processes():
            number = next((v for v in variables if v.startswith(b"OMPI_COMM_WORLD_RANK=")), None)
            if number is not None:
                self._pids[int(number.partition(b"=")[2])] = pid
        return self._pids

    def until(self, holds, what, seconds=120):
        until(holds, lambda: f"{what}:\n{self.stderr[-3000:]}", seconds, self.mpirun)

    def wait_for(self, text, seconds=120):
        self.until(lambda: text in self.stderr, repr(text), seconds)

    def wait_for_error(self, pattern, seconds=10):
        """Waits for an error line: the launcher may pass on what a rank said after the rank has gone."""
        found = lambda: any(re.search(pattern, line) for line in errors(self.stderr))  # noqa: E731
        until(found, lambda: f"no error {pattern!r}:\n{self.stderr[-4000:]}", seconds)

    def wait_until_gone(self, seconds, *, stopped=(), mpirun=True):
        """Seconds until all ranks but those `stopped`, and mpirun, have ended; fails after `seconds`."""
        began = time.monotonic()
        while True:
            left = [f"rank {rank}" for rank, pid in self._pids.items() if rank not in stopped and alive(pid)]
            left += ["mpirun"] * (mpirun and self.mpirun.poll() is None)
            took = time.monotonic() - began
            if not left:
                return took
            assert took < seconds, f"left after {took:.1f} s: {left}\n{self.stderr[-4000:]}"
            time.sleep(0.02)

    def _processes(self):
        """Everything that this run's mpirun has started, which inherits a mark in its environment."""
        for entry in Path("/proc").iterdir():
            with suppress(OSError):
                variables = (entry / "environ").read_bytes().split(b"\0") if entry.name.isdecimal() else ()
                if self._mark in variables:
                    yield int(entry.name), variables


class OnTerminal:
    """A command on a terminal of its own, in whose foreground it runs; leaving the block kills it."""

    def __init__(self, words):
        self._ours, theirs = os.openpty()
        on_it = {"stdin": theirs, "stdout": theirs, "stderr": theirs}
        self.process = subprocess.Popen(["setsid", "--ctty", *words], env=environment(), **on_it)
        os.close(theirs)
        self.shown = ""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.hang_up()
        self.process.kill()
        self.process.wait(30)

    def read(self, seconds):
        if select.select([self._ours], [], [], seconds)[0]:
            with suppress(OSError):  # the last process has closed it
                self.shown += os.read(self._ours, 65536).decode(errors="replace")

    def wait_for(self, text, seconds=120):
        end = time.monotonic() + seconds
        while text not in self.shown:
            assert time.monotonic() < end, self.shown[-3000:]
            assert self.process.poll() is None, self.shown[-3000:]
            self.read(0.1)

    def press(self, key):
        os.write(self._ours, key)

    def hang_up(self):
        if self._ours >= 0:
            os.close(self._ours)
            self._ours = -1

    def status(self, seconds=60):
        """Waits for the end, reading on while there is a terminal."""
        end = time.monotonic() + seconds
        while self.process.poll() is None:
            assert time.monotonic() < end, self.shown[-3000:]
            if self._ours >= 0:
                self.read(0.1)
            else:
                time.sleep(0.05)
        return self.process.returncode


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False
