"""Slurm support of launch: batch files of runs that save before the time limit and requeue, and srun's options."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from axonn_jax.core.documents import open_for_writing
from axonn_jax.core.errors import UserError
from axonn_jax.core.terminal import say

# Slurm kills a job at its limit, with a resolution of a minute, and saving many gigabytes takes a while.
_WARNING_S, _MIN_TIME_S = 120, 300
_PMIX_WORKS = "started"
_SHELL = "4294967290"
"""SLURM_STEP_ID in a shell that salloc starts on a node; a batch script's shell has none."""
_ANSWER_S = 20.0
_TEXT = """\
#!/bin/bash
# Your site's own options (--account, --partition, --gpus-per-task=1) belong here, or behind sbatch on its command line.
#SBATCH --nodes={nodes}
#SBATCH --ntasks={tasks}
#SBATCH --ntasks-per-node={per_node}
#SBATCH --time={time}
# The run is told to save before the limit. Then, and when a node fails, the job is queued again and the run goes on.
#SBATCH --signal=B:USR1@{warning}
#SBATCH --requeue
#SBATCH --open-mode=append

cd {folder} || exit
exec {axonn} launch --requeue -n "$SLURM_NTASKS" {words}
"""


def write(path: Path, processes: int, nodes: int, time: str, words: Sequence[str]) -> None:
    """Write the batch file of a run.

    Args:
        path: The new file.
        processes: Processes of the job.
        nodes: Nodes of the job, a divisor of the processes.
        time: Time limit, [DAYS-]HOURS:MINUTES:SECONDS.
        words: Words of `axonn-jax launch` behind the number of processes.

    Raises:
        UserError: The nodes do not divide the processes, the time is invalid or too short, or the file exists already
            or cannot be written.
    """
    if processes % nodes:
        raise UserError("--nodes", nodes, f"a divisor of the {processes} processes of -n")
    parts = re.fullmatch(r"(?:(\d+)-)?(\d+):([0-5]\d):([0-5]\d)", time, re.ASCII)
    days, hours, minutes, seconds = map(int, parts.groups("0")) if parts else (0, 0, 0, 0)
    if ((days * 24 + hours) * 60 + minutes) * 60 + seconds < _MIN_TIME_S:
        raise UserError("--time", time, "[DAYS-]HOURS:MINUTES:SECONDS, five minutes at least, such as 4:00:00")
    text = _TEXT.format(
        nodes=nodes,
        tasks=processes,
        per_node=processes // nodes,
        time=time,
        warning=_WARNING_S,
        folder=shlex.quote(os.getcwd()),
        axonn=shlex.join([sys.executable, "-m", "axonn_jax.cli.main"]),
        words=shlex.join(words),
    )
    try:
        # Never overwrite a file: the user is expected to add options of the site to it.
        with open(path, "x", encoding="utf-8", opener=open_for_writing) as file:
            file.write(text)
    except OSError as error:
        raise UserError("--sbatch", str(path), f"a file that can be made; {error.strerror}") from None


def srun(processes: int, pipe: int, environ: Mapping[str, str]) -> list[str]:
    """Return the words of srun inside a Slurm allocation, and no words elsewhere.

    Args:
        processes: Processes of the job.
        pipe: Pipeline stages; several in several processes need MPI.
        environ: Environment variables.
    """
    # Prefer srun to mpirun: Slurm signals its own steps before the time limit, but not the processes of an mpirun.
    path = shutil.which("srun")
    if path is None or not environ.get("SLURM_JOB_ID") or environ.get("SLURM_STEP_ID", _SHELL) != _SHELL:
        return []
    mpi = "none"  # the site's default may refuse to start, or start an MPI that the job does not need
    if pipe > 1 and processes > 1:
        mpi = "pmix"
        # Try it instead of reading srun --mpi=list, which also names plugins whose library is missing.
        if _PMIX_WORKS not in answer([path, f"--mpi={mpi}", "-n", "1", "echo", _PMIX_WORKS]):
            say("axonn-jax: no pmix of this Slurm works, which a pipeline needs; under mpirun, scancel saves nothing")
            return []
    cores = environ.get("SLURM_CPUS_PER_TASK")  # srun does not inherit it from sbatch
    return [path, f"--mpi={mpi}", *([f"--cpus-per-task={cores}"] if cores else []), "-n", str(processes)]


def answer(words: Sequence[str]) -> str:
    """Return the output of a short command, standard error included; empty if it does not start or end in time."""
    try:
        result = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=_ANSWER_S)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return result.stdout.decode(errors="replace")
