"""A batch file for Slurm: a run that saves before its time limit, returns to the queue and goes on."""

import os
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from axonn_jax.documents import own_file
from axonn_jax.errors import UserError

# Slurm kills at the limit, and knows it to the minute; a save of many gigabytes takes a while.
_WARNING_S, _LEAST_S = 120, 300
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
