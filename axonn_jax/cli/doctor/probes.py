"""Checks in other processes, where hangs and crashes do no harm, and versions of installed packages."""

import contextlib
import importlib.metadata
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

_MARK = "axonn-doctor "
_TELL = f"""
import json, os, sys, time
def tell(**known):
    print({_MARK!r} + json.dumps(known), flush=True)
"""


@dataclass(frozen=True)
class Row:
    """One finding, the runs that would fail, and the command to mend the fault."""

    check: str
    status: Literal["ok", "warning", "missing"]
    found: str
    fails: str
    fix: str = ""
    required: bool = False

    @property
    def broken(self) -> bool:
        """True if the project cannot be used at all with this finding."""
        return self.required and self.status == "missing"


@dataclass(frozen=True)
class Probe:
    """Output of another process before the end, or before the time limit."""

    answers: dict[str, Any]
    output: str
    error: str
    timed_out: float | None
    """The seconds after which its time was up; None for an end of its own."""
    status: int

    @property
    def ok(self) -> bool:
        """True if the process ended well and in time."""
        return self.status == 0 and not self.timed_out

    @property
    def trouble(self) -> str:
        """The reason for a missing answer, in one line."""
        if self.timed_out:
            return f"no answer within {self.timed_out:g} s"
        lines = [line.strip() for line in self.error.splitlines() if line.strip(" -*=")]
        named = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line)]
        return (named or lines or [f"exit status {self.status}"])[-1][:300]


def environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Environment for other processes, without the launcher's variables, which would make ranks of this launch."""
    kept = ("OMPI_MCA_", "OMPI_ALLOW_", "PMIX_MCA_", "PRTE_MCA_")
    launched = ("OMPI_", "PMIX_", "PRTE_", "PMI_", "HYDI_", "MPI_LOCAL")
    # Of mpirun of Open MPI 4, for its ranks: where its daemons are, and that none is to be started.
    launched_4 = ("OMPI_MCA_orte_", "OMPI_MCA_ess", "OMPI_MCA_pmix", "OMPI_MCA_initial_wdir")
    clean = {
        k: v
        for k, v in environ.items()
        if not k.startswith(launched_4) and (k.startswith(kept) or not k.startswith(launched))
    }
    # Looking at a GPU must not take its memory away from the run that uses it.
    return {**clean, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}


def probe(command: list[str], timeout: float, *, launched: bool = False) -> Probe:
    """Run a command and collect JSON objects behind the mark; child processes end with the command.

    `launched` keeps the launcher's variables, so that the command takes this process's rank.
    """
    # Files, not pipes: a grandchild that holds a pipe open would keep us waiting after the time is up.
    with tempfile.TemporaryFile("w+", errors="replace") as out, tempfile.TemporaryFile("w+", errors="replace") as err:
        timed_out, answers = False, dict[str, Any]()
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env=dict(os.environ) if launched else environment(os.environ),
                start_new_session=True,
            )
        except OSError as error:
            return Probe({}, "", str(error), None, 127)
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            timed_out = True
            _end(process)
        out.seek(0)
        err.seek(0)
        text = out.read()
        for line in text.splitlines():
            if line.startswith(_MARK):
                with contextlib.suppress(ValueError):  # cut off where the time was up
                    answers |= json.loads(line.removeprefix(_MARK))
        return Probe(answers, text, err.read(), timeout if timed_out else None, process.returncode)


def _end(process: subprocess.Popen[str] | subprocess.Popen[bytes]) -> None:
    """End a process group, first with a signal at which mpirun ends the ranks."""
    for number, wait in ((signal.SIGTERM, 3.0), (signal.SIGKILL, 5.0)):
        try:
            os.killpg(process.pid, number)
            process.wait(wait)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue


def python(code: str, *arguments: str) -> list[str]:
    """Return a command to run code that may `tell` its findings, in this Python, without this directory on the path."""
    return [sys.executable, "-P", "-c", _TELL + code, *arguments]


def release(version: str) -> tuple[int, ...]:
    """The numbers a version starts with, without trailing zeros."""
    match = re.match(r"\d+(\.\d+)*", version)
    numbers = [int(n) for n in match.group().split(".")] if match else []
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)


def satisfies(version: str, range_: str) -> bool:
    """Return True if a version lies in a range such as ``>=3.11,<3.14``."""
    have = release(version)
    for operator, text in re.findall(r"(>=|<=|==|!=|~=|<|>)\s*([\d.]+)", range_):
        want = release(text)
        holds = {">=": have >= want, "~=": have >= want, "<=": have <= want, "<": have < want, ">": have > want}
        if not holds.get(operator, (have == want) == (operator == "==")):
            return False
    return True


def ranges(distribution: str) -> dict[str, tuple[str, bool]]:
    """A distribution's requirements: name to (range, only in an extra)."""
    wanted: dict[str, tuple[str, bool]] = {}
    try:
        requirements = importlib.metadata.requires(distribution) or []
    except importlib.metadata.PackageNotFoundError:
        return wanted
    for text in requirements:
        requirement, _, marker = text.partition(";")
        parts = re.match(r"\s*([\w.-]+)\s*(\[.*?\])?\s*\(?([^)]*)", requirement)
        if parts:
            wanted.setdefault(parts.group(1), (parts.group(3).strip(), "extra" in marker))
    return wanted


def installed(distribution: str) -> str | None:
    """The version of an installed distribution."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def checkout() -> Path:
    """Return this package's folder: the repository's root, or site-packages."""
    return Path(__file__).resolve().parents[3]


def setup_command(*arguments: str) -> str | None:
    """Return the setup command of this Python's checkout, None for another Python."""
    root = checkout()
    script = root / "scripts/setup"
    if not script.is_file() or Path(sys.prefix).resolve() != (root / ".venv").resolve():
        return None
    return " ".join(["bash", shlex.quote(str(script)), *arguments])


def pip_command(*requirements: str) -> str:
    """The pip command for this very Python."""
    return " ".join([shlex.quote(sys.executable), "-m pip install", *map(shlex.quote, requirements)])


def which(program: str) -> tuple[str | None, bool]:
    """Return a program's path, this environment's first, and True if typing the name starts that program."""
    on_path = shutil.which(program)
    own = shutil.which(program, path=str(Path(sys.executable).parent))
    return own or on_path, (own or on_path) == on_path


def loopback() -> str:
    """Return the fault of 127.0.0.1, empty without one."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            server.settimeout(3)
            with socket.create_connection(server.getsockname(), 3) as client:
                peer, _ = server.accept()
                with peer:
                    client.sendall(b"x")
                    peer.settimeout(3)
                    return "" if peer.recv(1) == b"x" else "127.0.0.1 loses data"
    except OSError as error:
        return f"127.0.0.1: {error}"
