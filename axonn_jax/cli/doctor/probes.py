"""Probes in other processes, where hangs and crashes do no harm, and versions of installed packages."""

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
    """Finding, the runs that would fail because of it, and the command that fixes it."""

    check: str
    status: Literal["ok", "warning", "missing"]
    found: str
    fails: str
    fix: str = ""
    required: bool = False

    @property
    def broken(self) -> bool:
        """True if nothing works with this finding."""
        return self.required and self.status == "missing"


@dataclass(frozen=True)
class Probe:
    """Output of another process until its end or the time limit."""

    answers: dict[str, Any]
    output: str
    error: str
    timed_out: float | None
    """Time limit that the process exceeded, in seconds; None if it ended in time."""
    status: int

    @property
    def ok(self) -> bool:
        """True if the process succeeded in time."""
        return self.status == 0 and not self.timed_out

    @property
    def trouble(self) -> str:
        """Reason for a missing answer, in one line."""
        if self.timed_out:
            return f"no answer within {self.timed_out:g} s"
        lines = [line.strip() for line in self.error.splitlines() if line.strip(" -*=")]
        exceptions = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line)]
        return (exceptions or lines or [f"exit status {self.status}"])[-1][:300]


def environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without the launcher's variables, which would turn a process into a rank of this launch."""
    settings_prefixes = ("OMPI_MCA_", "OMPI_ALLOW_", "PMIX_MCA_", "PRTE_MCA_")
    launcher_prefixes = ("OMPI_", "PMIX_", "PRTE_", "PMI_", "HYDI_", "MPI_LOCAL")
    # Open MPI 4 passes the addresses of its daemons to its ranks in variables that look like settings.
    open_mpi_4_prefixes = ("OMPI_MCA_orte_", "OMPI_MCA_ess", "OMPI_MCA_pmix", "OMPI_MCA_initial_wdir")
    clean = {
        k: v
        for k, v in environ.items()
        if not k.startswith(open_mpi_4_prefixes)
        and (k.startswith(settings_prefixes) or not k.startswith(launcher_prefixes))
    }
    # A probe must not preallocate the memory of a GPU that a run is using.
    return {**clean, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}


def probe(command: list[str], timeout: float, *, launched: bool = False) -> Probe:
    """Run a command and collect the JSON objects that it prints.

    Args:
        command: Words of the command; at the time limit its child processes end with it.
        timeout: Time limit in seconds.
        launched: True to keep the launcher's variables, so that the command takes this process's rank.
    """
    # Use files rather than pipes: a grandchild that keeps a pipe open would block reading beyond the time limit.
    with tempfile.TemporaryFile("w+", errors="replace") as out, tempfile.TemporaryFile("w+", errors="replace") as err:
        timed_out, answers = False, dict[str, object]()
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
                with contextlib.suppress(ValueError):  # the time limit may have truncated the last line
                    answers |= json.loads(line.removeprefix(_MARK))
        return Probe(answers, text, err.read(), timeout if timed_out else None, process.returncode)


def _end(process: subprocess.Popen[str] | subprocess.Popen[bytes]) -> None:
    # SIGTERM first: at it mpirun ends its ranks, which SIGKILL could leave running.
    for number, wait in ((signal.SIGTERM, 3.0), (signal.SIGKILL, 5.0)):
        try:
            os.killpg(process.pid, number)
            process.wait(wait)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue


def python(code: str, *arguments: str) -> list[str]:
    """Return a command that runs code in this Python; the code reports findings by calling `tell`."""
    # -P: a file in the working directory must not shadow a package.
    return [sys.executable, "-P", "-c", _TELL + code, *arguments]


def release(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version, without trailing zeros."""
    match = re.match(r"\d+(\.\d+)*", version)
    numbers = [int(n) for n in match.group().split(".")] if match else []
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)


def satisfies(version: str, range_: str) -> bool:
    """Return True if a version is in a range such as ``>=3.11,<3.14``."""
    have = release(version)
    for operator, text in re.findall(r"(>=|<=|==|!=|~=|<|>)\s*([\d.]+)", range_):
        want = release(text)
        holds = {">=": have >= want, "~=": have >= want, "<=": have <= want, "<": have < want, ">": have > want}
        if not holds.get(operator, (have == want) == (operator == "==")):
            return False
    return True


def ranges(distribution: str) -> dict[str, tuple[str, bool]]:
    """Return a distribution's requirements by name: the version range, and True if only an extra requires it."""
    required: dict[str, tuple[str, bool]] = {}
    try:
        requirements = importlib.metadata.requires(distribution) or []
    except importlib.metadata.PackageNotFoundError:
        return required
    for text in requirements:
        requirement, _, marker = text.partition(";")
        parts = re.match(r"\s*([\w.-]+)\s*(\[.*?\])?\s*\(?([^)]*)", requirement)
        if parts:
            required.setdefault(parts.group(1), (parts.group(3).strip(), "extra" in marker))
    return required


def installed(distribution: str) -> str | None:
    """Return the version of a distribution; None if it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def checkout() -> Path:
    """Return the folder that holds this package: the root of the repository, or site-packages."""
    return Path(__file__).resolve().parents[3]


def setup_command(*arguments: str) -> str | None:
    """Return the setup command of the checkout, or None if this Python is not the one in its .venv."""
    root = checkout()
    script = root / "scripts/setup"
    if not script.is_file() or Path(sys.prefix).resolve() != (root / ".venv").resolve():
        return None
    return " ".join(["bash", shlex.quote(str(script)), *arguments])


def pip_command(*requirements: str) -> str:
    """Return the pip command for the running Python."""
    return " ".join([shlex.quote(sys.executable), "-m pip install", *map(shlex.quote, requirements)])


def which(program: str) -> tuple[str | None, bool]:
    """Return a program's path, preferring this environment's, and True if its plain name starts that program."""
    on_path = shutil.which(program)
    local = shutil.which(program, path=str(Path(sys.executable).parent))
    return local or on_path, (local or on_path) == on_path


def loopback() -> str:
    """Return what is wrong with 127.0.0.1; empty if it works."""
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
