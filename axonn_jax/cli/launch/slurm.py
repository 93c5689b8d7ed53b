"""Slurm: the batch file of a run that saves before its time limit and returns to the queue, and the words of srun."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from axonn_jax.documents import own_file
from axonn_jax.errors import UserError
from axonn_jax.terminal import say

# Slurm kills at the limit, and knows it to the minute; a save of many gigabytes takes a while.
_WARNING_S, _LEAST_S = 120, 300
_PMIX_WORKS = "started"
_SHELL = "4294967290"
"""SLURM_STEP_ID of salloc's shell on a node; a batch script's shell has none."""
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
    """Write the batch file of a run; `words` are behind launch's number of processes.

    Raises:
        UserError: the nodes do not divide the processes, the time is none or too short, or the file cannot be made.
    """
    if processes % nodes:
        raise UserError("--nodes", nodes, f"a divisor of the {processes} processes of -n")
    parts = re.fullmatch(r"(?:(\d+)-)?(\d+):([0-5]\d):([0-5]\d)", time, re.ASCII)
    days, hours, minutes, seconds = map(int, parts.groups("0")) if parts else (0, 0, 0, 0)
    if ((days * 24 + hours) * 60 + minutes) * 60 + seconds < _LEAST_S:
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
        with open(path, "x", encoding="utf-8", opener=own_file) as file:  # it may have been edited
            file.write(text)
    except OSError as error:
        raise UserError("--sbatch", str(path), f"a file that can be made; {error.strerror}") from None


def srun(processes: int, pipe: int, environ: Mapping[str, str]) -> list[str]:
    """Return srun's words in a Slurm allocation, else none: Slurm signals its own steps, not mpirun's processes."""
    path = shutil.which("srun")
    if path is None or not environ.get("SLURM_JOB_ID") or environ.get("SLURM_STEP_ID", _SHELL) != _SHELL:
        return []
    mpi = "none"  # not the site's default, which may refuse, or start an MPI that nobody needs
    if pipe > 1 and processes > 1:
        mpi = "pmix"
        # The list of srun --mpi=list also has a plugin whose library is not there.
        if _PMIX_WORKS not in answer([path, f"--mpi={mpi}", "-n", "1", "echo", _PMIX_WORKS]):
            say("axonn-jax: no pmix of this Slurm works, which a pipeline needs; under mpirun, scancel saves nothing")
            return []
    cores = environ.get("SLURM_CPUS_PER_TASK")  # which srun does not take over from sbatch
    return [path, f"--mpi={mpi}", *([f"--cpus-per-task={cores}"] if cores else []), "-n", str(processes)]


def answer(words: Sequence[str]) -> str:
    """Return the output of a command that describes itself; empty on failure."""
    try:
        done = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=_ANSWER_S)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.decode(errors="replace")
