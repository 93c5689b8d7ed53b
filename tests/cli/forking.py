"""Commands in processes that are forked from one that has imported everything: quick, alone, and ended when they hang.

Run as a program it is that process: a JSON object a line in, one out.
"""

import contextlib
import gc
import importlib
import io
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PICTURES = ("matplotlib.backends.backend_agg", "matplotlib.figure", "axonn_jax.pipe.timeline.picture")
TRAINING = ("grain", "axonn_jax.text.inference.texts", "axonn_jax.run.main", *PICTURES)
"""What takes a while to import."""
MOST_BYTES = 3 << 30
"""Memory at which a command is ended, so that the machine lives on."""


@dataclass(frozen=True)
class Done:
    """What became of a command."""

    argv: list[str]
    status: int
    out: bytes
    err: bytes
    cpu_s: float
    peak_bytes: int
    ended: str
    """Why it was ended from outside, if it was."""


class Forks:
    """The process that forks; `run` waits for one command."""

    def __init__(self, scratch: Path, modules: tuple[str, ...], **environ: str):
        self._files = [scratch / name for name in ("stdout", "stderr")]
        environ = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "TERM": "dumb", **environ}
        self._process = subprocess.Popen(
            [sys.executable, __file__, *modules], env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def run(self, argv: list[str], cwd: Path, limit_s: float) -> Done:
        """Runs `axonn-jax ARGV` in a directory; ends it after `limit_s` seconds."""
        request = {"argv": argv, "cwd": str(cwd), "files": [str(path) for path in self._files], "limit_s": limit_s}
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        told = json.loads(self._process.stdout.readline())
        return Done(argv, out=self._files[0].read_bytes(), err=self._files[1].read_bytes(), **told)

    def close(self) -> None:
        self._process.communicate()


def serve() -> None:
    for name in sys.argv[1:]:
        importlib.import_module(name)
    from axonn_jax.cli.main import main

    told = os.fdopen(os.dup(1), "w", buffering=1)
    for command in ("inspect", "timeline", "plan"):  # parsers are quicker once used
        with contextlib.redirect_stdout(io.StringIO()):
            main([command, "--help"])
    gc.freeze()
    for line in sys.stdin:
        request = json.loads(line)
        child = os.fork()
        if child == 0:
            os.setsid()
            os.chdir(request["cwd"])
            for number, path in ((1, request["files"][0]), (2, request["files"][1])):
                os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            status = 1
            try:
                status = main(request["argv"])
            finally:
                with contextlib.suppress(OSError, ValueError):
                    sys.stdout.flush()
                os._exit(status)
        told.write(json.dumps(_wait(child, request["limit_s"])) + "\n")


def _wait(child: int, limit_s: float) -> dict[str, object]:
    ended, until = "", time.monotonic() + limit_s
    while True:
        pid, code, used = os.wait4(child, os.WNOHANG)
        if pid:
            break
        if not ended and time.monotonic() > until:
            ended = f"hung for {limit_s} s"
        if not ended and _resident(child) > MOST_BYTES:
            ended = f"took {MOST_BYTES} bytes"
        if ended:
            os.killpg(child, signal.SIGKILL)
        time.sleep(0.005)
    status = os.waitstatus_to_exitcode(code)
    return {
        "status": status,
        "cpu_s": used.ru_utime + used.ru_stime,
        "peak_bytes": used.ru_maxrss * 1024,
        "ended": ended,
    }


def _resident(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return 0


if __name__ == "__main__":
    serve()
