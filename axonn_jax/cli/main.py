"""Entry point of `axonn-jax`: dispatch to subcommands, and errors as one line and an exit status."""

import contextlib
import importlib
import io
import os
import re
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path

from axonn_jax.core.errors import UserError, nearest, status_of
from axonn_jax.core.terminal import columns, last_flush, open_missing, reader_closed, say, wrapped
from axonn_jax.version import __version__

PROG = "axonn-jax"

COMMANDS = {
    "train": "train a model as a TOML file says",
    "launch": "train under mpirun; on failure, start again from the last checkpoint",
    "inspect": "list the checkpoints of a run, and check that they are sound",
    "prepare": "turn text or code into tokenised shards",
    "generate": "continue prompts with a trained model",
    "evaluate": "measure generated programs: built, right and fast, with ParEval's metrics and files",
    "loki": "calibrate generation that ranks keys by a few features",
    "convert": "convert a Hugging Face model to a directory to train from, or a run to a Hugging Face model",
    "prune": "prune a run's kernels to their largest entries",
    "timeline": "draw the tasks and the idle time of a pipelined run's stages",
    "plan": "find the best grids for a model on a machine, without using the machine",
    "simulate": "run one step in virtual time, with jitter, slow ranks and failures",
    "calibrate": "measure this machine: a file for plan and simulate",
    "doctor": "check the installation, and show how to fix faults",
}
"""Subcommands; their module defines `main(argv) -> int`, or a dataclass named after it and `run(args) -> int`."""

# --version reads their metadata instead of importing them: importing jax takes a second and may start a device.
_VERSIONS = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "mpi4py", "mpi4jax")

TRACEBACK = "AXONN_JAX_TRACEBACK"
_MAX_TEXT = 600  # characters of an exception's text; those of XLA can fill pages
_PEER_ENDED = re.compile(r"Gloo .*(by peer|Broken pipe)|remote process exited")
"""Errors of gloo and of NCCL in the remaining processes of a run when another one has ended."""
_GRACE_S, _APART_S, _MAX_STAGGERED = 1.0, 0.5, 8
"""Seconds that processes other than the first wait before they report, the extra seconds per rank, and their limit."""
# Variables of the rank, the size, and the rank on the host. The last one is named only for Slurm, which lets the other
# processes live when one fails.
_LAUNCHERS = (
    ("JAX_PROCESS_ID", "JAX_NUM_PROCESSES", ""),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", ""),
    ("PMIX_RANK", "PMIX_SIZE", ""),
    ("PMI_RANK", "PMI_SIZE", ""),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
    ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line and return the exit status: 0, 1 for a failed run, 2 for bad input, 130 if interrupted.

    A failed process of a distributed run exits immediately, so that the launcher ends the others.
    """
    open_missing()
    for stream in (sys.stdout, sys.stderr):  # an ASCII locale cannot encode every path and text
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        status = _dispatch(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()
    except SystemExit as stop:
        plain = stop.code is None or isinstance(stop.code, int)
        status = int(stop.code or 0) if plain else report(RuntimeError(stop.code))
    except BrokenPipeError as error:
        status = 141 if reader_closed(sys.stdout) else report(error)
    except BaseException as error:
        status = report(error)
    last_flush()
    if status and _is_distributed():
        # A regular exit would deadlock: MPI and jax wait for processes that wait for this one.
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
        os._exit(status)
    return status


def _is_distributed() -> bool:
    jax = sys.modules.get("jax")
    connected = "mpi4py.MPI" in sys.modules or (jax is not None and jax.distributed.is_initialized())
    return connected and rank_of(os.environ)[1] > 1


def _dispatch(argv: list[str]) -> int:
    if argv and argv[0] in ("-V", "--version"):
        print(_versions())
        return 0
    if not argv or argv[0] in ("-h", "--help"):
        print(_overview())
        return 0
    if argv[0] == "--completion":
        print(_completion())
        return 0
    name, command_argv = argv[0], argv[1:]
    if name not in COMMANDS:
        raise UserError("command", name, f"one of {', '.join(COMMANDS)}{nearest(name, COMMANDS)}")
    module = importlib.import_module(f"axonn_jax.cli.{name}")
    if hasattr(module, "main"):
        return int(module.main(command_argv))
    from axonn_jax.cli.arguments import parse

    return int(module.run(parse(getattr(module, name.title()), command_argv, f"{PROG} {name}")))


def _overview() -> str:
    wide, width = columns(), max(map(len, COMMANDS))
    lines = [f"usage: {PROG} COMMAND ...", "", "4D-sharded and pipelined training of Flax transformers.", ""]
    lines.append("commands:")
    for name, text in COMMANDS.items():
        lines += wrapped(f"  {name:{width}}  {text}", wide, " " * (width + 4))
    end = f"{PROG} COMMAND --help shows a command's options, {PROG} --version what is installed. In bash and zsh "
    end += f'`eval "$({PROG} --completion)"` completes both (zsh: behind `autoload -U bashcompinit; bashcompinit`).'
    return "\n".join([*lines, "", *wrapped(end, wide)])


_COMPLETION = """_axonn_jax() {{
  local word=${{COMP_WORDS[COMP_CWORD]}} words="{commands}"
  if [[ $COMP_CWORD -gt 1 ]]; then
    case ${{COMP_WORDS[1]}} in
{cases}
      *) words= ;;
    esac
  fi
  COMPREPLY=()
  # Other words are files, which the shell completes itself.
  if [[ $COMP_CWORD -eq 1 || $word == -* ]]; then COMPREPLY=($(compgen -W "$words" -- "$word")); fi
}}
complete -o default -F _axonn_jax {prog}"""


def _completion() -> str:
    # Flags are read from the help texts, so that completion cannot disagree with them.
    cases = []
    for name in COMMANDS:
        with contextlib.redirect_stdout(io.StringIO()) as shown, contextlib.suppress(SystemExit):
            _dispatch([name, "--help"])
        flags = dict.fromkeys(re.findall(r"^ +(--[\w.-]*\w)", shown.getvalue(), re.M))
        cases.append(f'      {name}) words="{" ".join(flags)} --help" ;;')
    return _COMPLETION.format(commands=" ".join((*COMMANDS, "--help")), cases="\n".join(cases), prog=PROG)


def _versions() -> str:
    from importlib import metadata

    lines = [f"{PROG} {__version__}", f"python {sys.version.split()[0]}"]
    for name in _VERSIONS:
        try:
            lines.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            lines.append(f"{name} not installed")
    return "\n".join(lines)


def rank_of(environ: Mapping[str, str]) -> tuple[int, int, int]:
    """Return this process's rank, the number of processes, and its rank on the host under Slurm; 0, 1, 0 if single."""
    # Trust a rank only together with a size above 1 of the same launcher: shells in batch jobs inherit stale ranks.
    for names in _LAUNCHERS:
        rank, size, local = (int(text) if _is_number(text := environ.get(name, "")) else None for name in names)
        if rank is not None and size is not None and size > 1:
            return rank, size, local or 0
    return 0, 1, 0


def _is_number(text: str) -> bool:
    return text.isdecimal() and len(text) < 20  # int() raises for thousands of digits


def report(error: BaseException) -> int:
    """Print one line for an exception that ends the command, and return the exit status."""
    # Most mistakes reach every process of a run, and the first process should be the only one to report them. Before
    # the processes are connected, no process knows whether the others fail too. So all but the first wait: if the first
    # one fails, its launcher ends them meanwhile, and whoever is still alive afterwards reports its error.
    rank, _, local = rank_of(os.environ)
    if isinstance(error, KeyboardInterrupt):
        if rank == 0:
            _say("interrupted")
        return status_of(error)
    if rank:
        time.sleep(_GRACE_S + _APART_S * min(rank, _MAX_STAGGERED))
    whose = f"rank {rank}: " if rank else ""
    if isinstance(error, UserError):
        if local == 0 or _first_lives(os.environ):
            _say(f"error: {whose}{error}")
        return status_of(error)
    text = " ".join(str(error).split())
    name = type(error).__name__ if type(error).__name__ != "error" else f"{type(error).__module__}.error"  # zlib's, say
    shown = f"{name}: {text}" if text else name
    if _PEER_ENDED.search(text):
        shown = f"another process of the run has ended; its own or the launcher's lines have the reason: {shown}"
    if os.environ.get(TRACEBACK, "") not in ("", "0"):
        say("".join(traceback.format_exception(error)).rstrip())
        _say(f"error: {whose}{shown}")
    else:
        cut = shown if len(shown) <= _MAX_TEXT else shown[:_MAX_TEXT] + "..."
        _say(f"error: {whose}{cut} (set {TRACEBACK}=1 for the traceback)")
    return status_of(error)


def _first_lives(environ: Mapping[str, str]) -> bool:
    # If the first process of the Slurm step on this host is alive, it has not had the error and will not report it.
    variables = {f"{name}={environ.get(name, '')}".encode() for name in ("SLURM_JOB_ID", "SLURM_STEP_ID")}
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # the process has ended, or belongs to another user
            if {*variables, b"SLURM_LOCALID=0"} <= set((process / "environ").read_bytes().split(b"\0")):
                return True
    return False


def _say(line: str) -> None:
    say(line.replace("\n", "\\n"))


if __name__ == "__main__":
    sys.exit(main())
