"""How an error reaches the user: one line on standard error and an exit status."""

import os
import time
import traceback
from collections.abc import Mapping

from axonn_jax.errors import UserError
from axonn_jax.terminal import say

TRACEBACK = "AXONN_JAX_TRACEBACK"
_MOST = 600  # characters of a foreign exception's text; XLA's run to pages
_GRACE_S = 1.0
_LAUNCHERS = (  # rank, size, rank on the host
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("PMIX_RANK", "PMIX_SIZE", "PMIX_LOCAL_RANK"),
    ("PMI_RANK", "PMI_SIZE", "PMI_LOCAL_RANK"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
    ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
)
# Files can be missing on one host only, so for these every host's first process speaks.
_OF_A_HOST = ("CONFIG.toml", "data.path", "log.dir")


def rank_of(environ: Mapping[str, str]) -> tuple[int, int]:
    """Returns this process's rank among all and on its host, as a launcher of several processes set them; else 0, 0.

    A rank counts only where the same launcher's size is above 1: shells inside batch jobs inherit stale ranks.
    """
    for rank, size, local in _LAUNCHERS:
        numbers = [environ.get(name, "") for name in (rank, size)]
        if all(map(_is_number, numbers)) and int(numbers[1]) > 1:
            text = environ.get(local, "")
            return int(numbers[0]), int(text) if _is_number(text) else int(numbers[0])
    return 0, 0


def _is_number(text: str) -> bool:
    return text.isdecimal() and len(text) < 20  # int() refuses thousands of digits


def report(error: BaseException) -> int:
    """Prints the line for an exception that ends the command and returns the exit status.

    A user's mistake is the same on every process of a run, so only the first one prints it.
    """
    rank, local = rank_of(os.environ)
    if isinstance(error, UserError):
        if rank == 0 or (local == 0 and error.field in _OF_A_HOST):
            _say(f"error: {error}")
        else:
            time.sleep(_GRACE_S)  # the launcher ends all at the first exit: the one that speaks must come first
        return 2
    if isinstance(error, KeyboardInterrupt):
        if rank == 0:
            _say("interrupted")
        return 130
    text = " ".join(str(error).split())
    shown = f"{type(error).__name__}: {text}" if text else type(error).__name__
    if os.environ.get(TRACEBACK, "") not in ("", "0"):
        say("".join(traceback.format_exception(error)).rstrip())
        _say(f"error: {shown}")
    else:
        cut = shown if len(shown) <= _MOST else shown[:_MOST] + "..."
        _say(f"error: {cut} (set {TRACEBACK}=1 for the traceback)")
    return 1


def _say(line: str) -> None:
    say(line.replace("\n", "\\n"))
