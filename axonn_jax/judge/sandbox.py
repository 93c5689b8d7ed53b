"""Sandbox for programs: limits of time, memory, threads and file sizes, and a filter of system calls for samples."""

import contextlib
import json
import os
import platform
import re
import secrets
import selectors
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from axonn_jax.core.errors import UserError
from axonn_jax.judge import jail

_TURN_S = 0.02
_MAX_OUTPUT = 8_192
"""Most bytes stored of a program's errors, and of its results."""
_MAX_THREADS = 256
_NEARLY_FULL = 0.8
"""Share of the memory limit above which a crash is attributed to the limit."""
_INHERITED = ("PATH", "LD_LIBRARY_PATH", "LANG", "TZ")


@dataclass(frozen=True)
class Limits:
    """Limits of a program."""

    seconds: float
    """Wall-clock time, in seconds."""
    memory: int
    """Address space, in bytes."""
    threads: int = 1
    file: int = 0
    """Size of a written file, in bytes."""
    as_root: bool = False
    """True to let a program started by root keep root's rights; otherwise it runs as nobody."""


class Ended(NamedTuple):
    """End of a program."""

    status: int
    """Exit status; negative for a signal."""
    results: str
    errors: str
    stopped: str
    """Reason why the program was stopped or died; empty if it ended by itself."""


def check_sandbox(*, as_root: bool) -> None:
    """Run a program without effect; raise ``UserError`` if programs cannot run under limits here."""
    if not sys.platform.startswith("linux") or (machine := platform.machine()) not in jail.MACHINES:
        machines = " or ".join(jail.MACHINES)
        raise UserError("--execute", True, f"Linux on {machines}, whose system calls the sandbox knows; not {machine}")
    limits = Limits(seconds=30.0, memory=1 << 30, as_root=as_root)
    ended = run([shutil.which("true") or "/bin/true"], Path("/"), limits, filtered=True)
    if ended.status:
        why = " ".join(f"{ended.stopped} {ended.errors}".split()) or f"status {ended.status}"
        raise UserError("--execute", True, f"a system whose programs start in the sandbox; `true`: {why}")


def run(
    command: Sequence[str],
    folder: Path,
    limits: Limits,
    *,
    filtered: bool,
    environ: Mapping[str, str] | None = None,
) -> Ended:
    """Run a program in a folder until it ends or exceeds a limit.

    Args:
        command: Path of the program, and its arguments.
        folder: Working directory of the program.
        limits: Limits of the program.
        filtered: True to filter system calls: no writing of files, no processes, no network.
        environ: Environment variables to add to the inherited ones, which are only a few under the filter.

    Raises:
        UserError: The system refuses a limit or the filter.
    """
    inherited = {name: os.environ[name] for name in _INHERITED if name in os.environ} if filtered else os.environ
    out, results = os.pipe()
    orders = {
        "results": results,
        "failed": (failed := f"{secrets.token_hex(8)}: "),
        "nobody": os.geteuid() == 0 and not limits.as_root,
        "memory": limits.memory,
        "cpu": int(limits.seconds * limits.threads) + 1,
        "file": limits.file,
        "filtered": filtered,
    }
    try:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", jail.__file__, json.dumps(orders), *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            cwd=folder,
            env={**inherited, **(environ or {})},
            pass_fds=(results,),
            start_new_session=True,
        )
    finally:
        os.close(results)
    with process, open(out, "rb", buffering=0) as pipe:
        try:
            texts, stopped = _watch(process, pipe.fileno(), limits)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # before wait(), while the number cannot be reused
            status = process.wait()
    lines, errors = (bytes(text).decode(errors="replace") for text in texts)
    if lines.startswith(failed):
        hint = "; or --as-root" if orders["nobody"] else ""
        accepted = f"a system that gives the sandbox its means{hint}; missing: {lines.removeprefix(failed).strip()}"
        raise UserError("--execute", True, accepted)
    return Ended(status, lines, errors, stopped or _reason(status, lines, errors, limits))


def _watch(process: "subprocess.Popen[bytes]", results: int, limits: Limits) -> tuple[list[bytearray], str]:
    # Returns the results and the errors of the program, and the reason for stopping it.
    assert process.stderr is not None
    end = time.monotonic() + limits.seconds
    texts = {results: bytearray(), process.stderr.fileno(): bytearray()}
    with selectors.DefaultSelector() as selector:
        for file in texts:
            os.set_blocking(file, False)
            selector.register(file, selectors.EVENT_READ)
        stopped = ""
        while not stopped:
            # WNOWAIT leaves the ended program as a zombie, so that its group can still be signalled safely.
            over = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
            ready = selector.select(0 if over else _TURN_S)
            for key, _ in ready:
                raw = os.read(key.fd, 65_536)
                texts[key.fd] += raw[: _MAX_OUTPUT - len(texts[key.fd])]
                if not raw:
                    selector.unregister(key.fd)
            if over and not ready:
                break
            # A program may close its outputs and go on: then there is nothing to select on.
            if not over and not selector.get_map():
                time.sleep(_TURN_S)
            if _threads(process.pid) > _MAX_THREADS:
                stopped = f"threads: over {_MAX_THREADS}"
            elif time.monotonic() > end:
                stopped = f"time: over {limits.seconds:g} s"
    return list(texts.values()), stopped


def _threads(process: int) -> int:
    try:
        match = re.search(r"^Threads:\s*(\d+)", Path(f"/proc/{process}/status").read_text(), re.MULTILINE)
    except OSError:
        return 0
    return int(match[1]) if match else 0


def _reason(status: int, results: str, errors: str, limits: Limits) -> str:
    if call := re.search(r"^Forbidden: (?:([0-9]{1,9})|memory)$", results, re.MULTILINE):  # samples can write any text
        return f"forbidden: {jail.purpose(int(call[1]))}" if call[1] else f"memory: over {limits.memory / 2**30:g} GiB"
    if status >= 0:
        return ""
    peak = re.search(r"^VmPeak:\s*([0-9]{1,15}) kB", results, re.MULTILINE)
    if "bad_alloc" in errors or (peak and 1024 * int(peak[1]) > _NEARLY_FULL * limits.memory):
        return f"memory: over {limits.memory / 2**30:g} GiB"
    reasons: dict[int, str] = {
        signal.SIGSYS: "forbidden: a system call",
        signal.SIGXCPU: f"time: over {limits.seconds:g} s on each thread",
        signal.SIGKILL: "time: killed",
        signal.SIGXFSZ: f"file: over {limits.file:,} bytes",
    }
    names = {number.value: number.name for number in signal.Signals}  # most real-time signals have no name
    return reasons.get(-status, f"crash: {names.get(-status, f'signal {-status}')}")
