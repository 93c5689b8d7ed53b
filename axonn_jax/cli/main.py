"""The command `axonn-jax`: finds the subcommand, runs it, turns what happens into an exit status."""

import contextlib
import importlib
import os
import sys
from collections.abc import Sequence
from typing import NamedTuple

from axonn_jax.cli.report import report
from axonn_jax.errors import UserError, nearest
from axonn_jax.version import __version__

__all__ = ["COMMANDS", "Command", "main", "report"]

PROG = "axonn-jax"


class Command(NamedTuple):
    """A subcommand: its module has `main(argv) -> int`, or a dataclass named after it and `run(args) -> int`."""

    name: str
    module: str
    help: str


COMMANDS = (
    Command("train", "axonn_jax.cli.train", "train a model as a TOML file says"),
    Command("launch", "axonn_jax.cli.launch", "train under mpirun; on failure, start again from the last checkpoint"),
    Command("inspect", "axonn_jax.cli.inspect", "list the checkpoints of a run, and check that they are sound"),
    Command("prepare", "axonn_jax.cli.prepare", "turn a directory of text or code into tokenised shards"),
    Command("generate", "axonn_jax.cli.generate", "continue a prompt with a trained model"),
    Command("timeline", "axonn_jax.cli.timeline", "draw what the stages of a pipelined run did, and their idle time"),
    Command("plan", "axonn_jax.cli.plan", "find the best grids for a model on a machine, before a node-hour is spent"),
    Command(
        "simulate",
        "axonn_jax.cli.simulate",
        "run one step in virtual time, with jitter, slow ranks and failures",
    ),
    Command("calibrate", "axonn_jax.cli.calibrate", "measure this machine: a file for plan and simulate"),
    Command("bench", "axonn_jax.cli.bench", "measure or count what the package promises, such as bytes communicated"),
    Command("doctor", "axonn_jax.cli.doctor", "show what is installed, what would fail, and how to fix it"),
)

_LATER = ("convert",)  # names that documents promise

# Not imported for --version, only looked up: importing jax takes a second and may start a device.
_VERSIONS = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "mpi4py", "mpi4jax")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command line and returns the exit status: 0, 1 for a failed run, 2 for bad input, 130 if interrupted."""
    _open_closed_streams()
    try:
        status = _dispatch(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()
    except SystemExit as stop:
        if stop.code is None or isinstance(stop.code, int):
            return stop.code or 0
        return report(RuntimeError(stop.code))
    except BrokenPipeError as error:
        return 141 if _reader_is_gone() else report(error)
    except BaseException as error:
        return report(error)
    return status


def _open_closed_streams() -> None:
    """Lets standard streams that were closed (`>&-`) lead nowhere: else the next file to be opened would be one."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            with contextlib.suppress(OSError):
                os.fstat(number)
                continue
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, this one
            setattr(sys, name, open(number, "r" if number == 0 else "w", encoding="utf-8", closefd=False))  # noqa: SIM115


def _dispatch(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print(_overview())
        return 0
    if argv[0] in ("-V", "--version"):
        print(_versions())
        return 0
    name, rest = argv[0], argv[1:]
    command = next((command for command in COMMANDS if command.name == name), None)
    if command is None:
        names = [command.name for command in COMMANDS]
        later = "not built yet; " if name in _LATER else ""
        raise UserError("command", name, f"{later}one of {', '.join(names)}{'' if later else nearest(name, names)}")
    module = importlib.import_module(command.module)
    if hasattr(module, "main"):
        return int(module.main(rest))
    from axonn_jax.cli.parse import parse

    return int(module.run(parse(getattr(module, name.capitalize()), rest, f"{PROG} {name}")))


def _overview() -> str:
    width = max(len(command.name) for command in COMMANDS)
    return "\n".join(
        [
            f"usage: {PROG} COMMAND ...",
            "",
            "4D-sharded and pipelined training of Flax transformers.",
            "",
            "commands:",
            *(f"  {command.name:{width}}  {command.help}" for command in COMMANDS),
            "",
            f"{PROG} COMMAND --help shows a command's options, {PROG} --version what is installed.",
        ]
    )


def _versions() -> str:
    from importlib import metadata

    lines = [f"{PROG} {__version__}", f"python {sys.version.split()[0]}"]
    for name in _VERSIONS:
        try:
            lines.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            lines.append(f"{name} not installed")
    return "\n".join(lines)


def _reader_is_gone() -> bool:
    """Whether standard output is the broken pipe (`| head`); if so, the interpreter's last flush goes nowhere."""
    import select

    try:
        out = sys.stdout.fileno()
    except OSError:  # not a file at all
        return False
    poll = select.poll()
    poll.register(out, select.POLLOUT)
    if not any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0)):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), out)
    return True


if __name__ == "__main__":
    sys.exit(main())
