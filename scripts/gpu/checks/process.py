"""Starts workers, reads their rows, and sees that none outlives its time."""

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable

from axonn_jax.core.distributed.gpu_limits import raise_fraction
from checks.report import Row, from_line


def environment(xla_flags: str) -> dict[str, str]:
    """The workers' environment: one GPU, nearly all of its memory, and whatever the user has set himself."""
    env = dict(os.environ)
    # Several GPUs would need a larger grid; this check is about one.
    env["CUDA_VISIBLE_DEVICES"] = env.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    raise_fraction(env)
    if env.get("JAX_PLATFORMS") in ("cuda", "gpu"):
        env["JAX_PLATFORMS"] = "cuda,cpu"  # the CPU is what parity is measured against
    env["XLA_FLAGS"] = f"{env.get('XLA_FLAGS', '')} {xla_flags}".strip()
    env["PYTHONUNBUFFERED"] = "1"
    env.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")
    return env


def driver() -> str:
    """What nvidia-smi says of the GPU and its driver; empty where it cannot be asked."""
    smi = shutil.which("nvidia-smi")
    if smi is None:
        return ""
    query = "name,driver_version,memory.total,power.limit,clocks.max.sm"
    try:
        done = subprocess.run(
            [smi, f"--query-gpu={query}", "--format=csv,noheader"], capture_output=True, text=True, timeout=20
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip().splitlines()[0] if done.returncode == 0 and done.stdout.strip() else ""


def run(command: list[str], env: dict[str, str], limit_s: float, add: Callable[[Row], None], section: str) -> None:
    """Runs a worker and hands on its rows as they come; its death or its time running out is a row too."""
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log:
        late = threading.Event()
        rows = 0
        # A session of its own, because torch.compile starts processes that have to go with it.
        with subprocess.Popen(
            command, env=env, stdout=subprocess.PIPE, stderr=log, text=True, errors="replace", start_new_session=True
        ) as worker:

            def stop() -> None:
                late.set()
                _kill(worker.pid)

            timer = threading.Timer(limit_s, stop)
            timer.start()
            try:
                assert worker.stdout is not None
                for line in worker.stdout:
                    row = from_line(line)
                    if row is None:
                        log.write(line)
                    else:
                        rows += 1
                        add(row)
                status = worker.wait()
            finally:
                timer.cancel()
                _kill(worker.pid)
        if status == 0 and rows:
            return
        log.seek(0)
        tail = [line.rstrip() for line in log.readlines() if line.strip()][-25:]
        why = f"stopped after {limit_s:.0f} s" if late.is_set() else f"exit status {status}"
        last = tail[-1][:300] if tail else "it printed nothing"
        add(Row(section, "worker", "failed", f"{why}: {last}", {"log": tail}))


def _kill(group: int) -> None:
    """Ends a worker with all it started; what is left of its group outlives the worker itself."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)
