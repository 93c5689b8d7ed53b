"""Worker processes of the training benchmarks: each pinned to a core, idle until it is told to run one step.

All contestants of a benchmark are alive at once and take turns step by step, so that whatever else the machine
does meets them alike. A worker reads `step` lines and answers each with the seconds it took.
"""

import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Task:
    """The model and batch of the foundation's benchmarks: about 7.4 million parameters, 16,384 tokens a step."""

    layers: int = 8
    hidden: int = 256
    heads: int = 8
    vocab: int = 4096
    seq_len: int = 256
    microbatch: int = 4
    microbatches: int = 16

    @property
    def tokens(self) -> int:
        """Tokens of one step."""
        return self.seq_len * self.microbatch * self.microbatches


class Worker:
    """A subprocess that runs training steps on one core, or under a launcher with ranks on cores of their own."""

    def __init__(self, script: str, core: int, arguments: Sequence[str], launcher: Sequence[str] = ()):
        command = [*launcher, sys.executable, str(HERE / script), *arguments]
        self._name = f"{script} on core {core}"
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115  closed with the worker
        self._ready, self._launched = False, bool(launcher)
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env={**os.environ, "BENCH_CORE": str(core), "PYTHONPATH": str(HERE.parents[1])},
        )

    def tell(self, order: str = "step") -> None:
        """Sends an order without waiting."""
        assert self._process.stdin is not None
        self._process.stdin.write(order + "\n")
        self._process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        """Waits for the answer to the last order; ends the benchmark if the worker died."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                return dict(json.loads(line))
        self._log.seek(0)
        sys.exit(f"{self._name} ended with status {self._process.wait()}:\n{self._log.read()[-3000:]}")

    def wait_ready(self) -> None:
        """Waits until the worker has built its model."""
        if not self._ready:
            self.answer()
            self._ready = True

    def pause(self) -> None:
        """Stops ranks under a launcher where they stand: one that only looks for messages takes 2 % of a core.

        Others sleep until they are told something, and jax.distributed would take a stopped process for dead.
        """
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Lets its processes go on."""
        self._signal(signal.SIGCONT)

    def close(self) -> None:
        """Ends the worker."""
        self.resume()
        self._process.kill()

    def _signal(self, number: int) -> None:
        tree = [self._process.pid] if self._launched else []  # grows by the children of its members
        for pid in tree:
            for thread in Path(f"/proc/{pid}/task").iterdir():
                tree += map(int, (thread / "children").read_text().split())
        for pid in tree:
            os.kill(pid, number)


def mpirun(ranks: int) -> list[str]:
    """The command that starts so many ranks, which choose their cores themselves."""
    import shutil

    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    found = shutil.which("mpirun", path=path)
    if found is None:
        sys.exit("error: this benchmark needs mpirun: scripts/setup installs one")
    os.environ.update(OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")  # in a container one is root
    return [found, "-n", str(ranks), "--bind-to", "none", "--oversubscribe"]


def free_port() -> str:
    """A free TCP port on loopback."""
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def pin() -> None:
    """In a worker: keeps this process on its core. Call before jax or torch is imported: they size their pools."""
    os.sched_setaffinity(0, {int(os.environ["BENCH_CORE"])})


def serve(step: Any) -> NoReturn:
    """In a worker: runs `step()`, which returns a loss, for every order, and answers with seconds and loss."""
    import time

    print(json.dumps({"ready": True}), flush=True)
    for _ in sys.stdin:
        start = time.perf_counter()
        loss = step()
        print(json.dumps({"seconds": time.perf_counter() - start, "loss": loss}), flush=True)
    os._exit(0)


def race(contestants: dict[str, list[Worker]], rounds: int, *, quiet: bool) -> dict[str, list[dict[str, float]]]:
    """Lets every contestant (its workers in step) run a warm-up and `rounds` steps in turn; seconds and losses."""
    for workers in contestants.values():
        for worker in workers:
            worker.wait_ready()
    results: dict[str, list[dict[str, float]]] = {name: [] for name in contestants}
    everyone = [worker for workers in contestants.values() for worker in workers]
    for worker in everyone:
        worker.pause()
    for number in range(rounds + 1):
        for name, workers in contestants.items():
            for worker in workers:
                worker.resume()
            for worker in workers:
                worker.tell()
            answers = [worker.answer() for worker in workers]
            result = {"seconds": max(a["seconds"] for a in answers), "loss": answers[0]["loss"]}
            results[name].append(result)
            for worker in workers:
                worker.pause()
            if not quiet:
                what = "warm-up" if number == 0 else f"round {number}"
                print(f"{what:8} {name:26} {result['seconds']:7.2f} s  loss {result['loss']:.4f}", file=sys.stderr)
    for worker in everyone:
        worker.close()
    return results


def tokens_per_s(results: list[dict[str, float]], tokens: int) -> float:
    """Median speed over the rounds, the warm-up left out."""
    return tokens / statistics.median(r["seconds"] for r in results[1:])


def in_turn(results: dict[str, list[dict[str, float]]], name: str, reference: str) -> float:
    """Speed of one contestant over another's, as the median over the rounds: whatever slowed a round met both."""
    pairs = zip(results[name][1:], results[reference][1:], strict=True)
    return statistics.median(theirs["seconds"] / ours["seconds"] for ours, theirs in pairs)


def report(ratios: dict[str, float], raw: dict[str, Any], *, as_json: bool) -> None:
    """Prints the result: one JSON object, or lines for people."""
    import importlib.metadata

    packages = {one.name: one.version for one in importlib.metadata.distributions()}
    versions = {name: packages.get(name) for name in ("jax", "flax", "optax", "torch", "mpi4py", "mpi4jax")}
    if as_json:
        headline = {"ratio": next(iter(ratios.values()))} if len(ratios) == 1 else {}
        device = f"{platform.machine()}, {os.cpu_count()} cores: {_cpu()}"
        print(json.dumps({**headline, "ratios": ratios, **raw, "versions": versions, "device": device}))
        return
    for name, value in raw.items():
        print(f"{name:34} {value:,.0f}" if isinstance(value, float) else f"{name:34} {value}")
    for name, value in ratios.items():
        print(f"{name:34} {value:.3f}")


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def need_torch() -> None:
    """Ends with one line where PyTorch is missing: it is the other contestant, not a dependency."""
    import importlib.util

    if importlib.util.find_spec("torch") is None:
        sys.exit("error: this benchmark runs PyTorch beside axonn_jax: pip install torch==2.13.0 (a CPU build)")
