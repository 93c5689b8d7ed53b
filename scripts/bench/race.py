"""Racing harness: contestants, processes on cores of their own (`racer.py`), take turns step by step.

All stand by at once, so that whatever else the machine does meets them alike.
"""

import contextlib
import importlib.util
import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from figures import over

HERE = Path(__file__).resolve().parent
TOLERANCE = 1e-3
"""Largest difference of a loss, in nats, of contestants that train the same: float32 sums in another order."""
TORCH = "torch==2.13.0+cpu, by the index for CPUs that pytorch.org names"
"""Words behind `pip install`; PyPI's wheel would bring CUDA."""
Step = Mapping[str, float]
Taken = dict[str, list[dict[str, float]]]


class Failed(Exception):
    """The end of a contestant's process; the text has the reason, `log` the last lines that it wrote."""

    def __init__(self, reason: str, log: str = ""):
        super().__init__(reason)
        self.log = log


def report_progress(line: str) -> None:
    """Print a line for whoever waits."""
    print(line, file=sys.stderr, flush=True)


class Process:
    """A process on one core, or under a launcher with ranks on cores of their own."""

    def __init__(self, spec: Mapping[str, Any], core: int, launcher: Sequence[str] = ()):
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115  closed with the process
        self._launched = bool(launcher)
        threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
        own = {"BENCH_CORE": str(core), "PYTHONPATH": str(HERE.parents[1]), **spec.get("environment", {})}
        self._process = subprocess.Popen(
            [*launcher, sys.executable, str(HERE / "racer.py"), json.dumps(spec)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env={"JAX_PLATFORMS": "cpu", **os.environ, **threads, **own},
        )

    def tell(self, order: str) -> None:
        """Sends an order without waiting."""
        assert self._process.stdin is not None
        self._process.stdin.write(order + "\n")
        self._process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        """Waits for the answer to the last order; at first until it is ready.

        Raises:
            Failed: the process has ended.
        """
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                return dict(json.loads(line))
        self._log.seek(0)
        log = self._log.read()
        lines = [line.strip() for line in log.splitlines() if any(map(str.isalpha, line))]
        errors = [line for line in lines if "Error" in line or line.startswith("error")]
        raise Failed((errors or lines or [f"status {self._process.wait()}"])[-1][:200], log[-3000:])

    def signal(self, number: int) -> None:
        """Stops ranks under a launcher where they stand, or lets them go on.

        One that only looks for messages takes 2 % of a core. Others sleep until they are told something, and
        jax.distributed would take a stopped process for dead.
        """
        tree = [self._process.pid] if self._launched else []  # grows by the children of its members
        for pid in tree:
            for thread in Path(f"/proc/{pid}/task").iterdir():
                tree += map(int, (thread / "children").read_text().split())
        for pid in tree:
            os.kill(pid, number)

    def close(self) -> None:
        """Ends it, with the ranks that a launcher has started."""
        with contextlib.suppress(ProcessLookupError, FileNotFoundError):  # it has ended by itself
            self.signal(signal.SIGKILL)
        self._process.kill()
        self._process.wait()
        for file in (self._process.stdin, self._process.stdout, self._log):
            with contextlib.suppress(BrokenPipeError):
                file.close()  # type: ignore[union-attr]  # all are pipes


class Entrant:
    """The processes of one contestant, ready; copies `apart` know nothing of each other.

    Raises:
        Failed: a process does not start.
    """

    def __init__(self, spec: Mapping[str, Any], ranks: int = 1, *, mpi: bool = False, apart: int = 1):
        self.spec, self.apart = spec, apart
        begin, port = time.perf_counter(), free_port()
        each = [{**spec, "port": port, "rank": rank, "ranks": ranks} for rank in range(ranks)] * apart
        if mpi:
            self._processes = [Process(each[0], 0, mpirun(ranks))]
        else:
            self._processes = [Process(one, core) for core, one in enumerate(each)]
        self._all(Process.answer)
        self.start_s = time.perf_counter() - begin

    def _all(self, ask: Callable[[Process], dict[str, Any]]) -> list[dict[str, Any]]:
        try:
            return [ask(process) for process in self._processes]
        except (Failed, BrokenPipeError) as ended:
            self.close()
            raise ended if isinstance(ended, Failed) else Failed("it has ended") from None

    def ask(self, order: str) -> list[dict[str, Any]]:
        """Give an order to all processes and wait.

        Raises:
            Failed: a process has ended.
        """
        with contextlib.suppress(BrokenPipeError):  # the answer says why
            for process in self._processes:
                process.tell(order)
        return self._all(Process.answer)

    def step(self, order: str = "step") -> dict[str, float]:
        """One step: the slowest process's seconds, the first one's other figures, and bytes over loopback."""
        before = loopback_bytes()
        answers = self.ask(order)
        found: dict[str, float] = {
            key: max(one[key] for one in answers) for key in ("seconds", "user", "system") if key in answers[0]
        }
        return {**answers[0], **found, "sent": loopback_bytes() - before}

    def pause(self) -> None:
        """Stop ranks under a launcher, which look for messages."""
        for process in self._processes:
            process.signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let them go on."""
        for process in self._processes:
            process.signal(signal.SIGCONT)

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.close()


def loopback_bytes() -> int:
    """Bytes that have been sent over loopback on this machine."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name.strip() == "lo":
            return int(rest.split()[8])
    return 0


def mpirun(ranks: int) -> list[str]:
    """The command that starts so many ranks, which choose their cores themselves."""
    found = shutil.which("mpirun", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    if found is None:
        sys.exit("error: this benchmark needs mpirun: scripts/setup installs one")
    os.environ.update(OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")  # in a container one is root
    return [found, "-n", str(ranks), "--bind-to", "none", "--oversubscribe"]


def free_port() -> str:
    """A free TCP port on loopback."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def need_torch() -> None:
    """Ends with one line where PyTorch is missing: it is the other contestant, not a dependency."""
    if importlib.util.find_spec("torch") is None:
        sys.exit(f"error: this benchmark runs PyTorch beside axonn_jax: pip install {TORCH}")


def take_turns(
    entrants: Mapping[str, Any], rounds: int, failed: dict[str, str], order: str = "step", say: Any = lambda line: None
) -> Taken:
    """So many steps of each in turns, behind one that warms up; one that ends is `failed` and has none.

    Another order than "step" is told the round's number.
    """
    taken: Taken = {name: [] for name in entrants}
    for number in range(rounds + 1):
        for name in list(taken):
            entrant = entrants[name]
            try:
                entrant.resume()
                step = entrant.step() if order == "step" else entrant.step(f"{order} {number}")
                entrant.pause()
            except (Failed, OSError) as reason:
                failed[name] = f"ends when others take turns: {reason}"
                say(f"{name}: {getattr(reason, 'log', reason)}")
                del taken[name]
                continue
            taken[name] += [step] if number else []
            say(f"{f'round {number}' if number else 'warm-up':8} {name:32} {step['seconds']:7.3f} s")
    return taken


def race(
    entrants: Mapping[str, Entrant],
    rounds: int,
    *,
    quiet: bool,
    order: str = "step",
    close: bool = True,
    last: str = "",
) -> Taken:
    """All entrants' rounds in turns, and a last order; ends the benchmark where one fails or losses differ.

    What must be equal is the first round's loss, or all checksums, of those with the same workload and rows.
    """
    failed: dict[str, str] = {}
    try:
        taken = take_turns(entrants, rounds, failed, order, (lambda line: None) if quiet else report_progress)
        for entrant in entrants.values() if last and not failed else ():
            entrant.resume()
            entrant.ask(last)
    finally:
        for entrant in entrants.values() if close else ():
            entrant.close()
    if failed:
        sys.exit("\n".join(f"error: {name} {reason}" for name, reason in failed.items()))
    same: dict[Any, dict[str, float]] = {}
    for name, steps in taken.items():
        key = tuple(map(entrants[name].spec.get, ("workload", "rows")))
        same.setdefault(key, {})[name] = steps[0]["loss"] if "loss" in steps[0] else sum(s["checksum"] for s in steps)
    for found in same.values():
        if not max(found.values()) - min(found.values()) <= TOLERANCE:
            sys.exit(f"error: not the same step: {found}")
    return taken


def seconds(steps: Sequence[Step]) -> list[float]:
    """Those of every step."""
    return [step["seconds"] for step in steps]


def rate(steps: Sequence[Step], count: float) -> float:
    """Things a second, so many a step: the median."""
    return count / statistics.median(seconds(steps))


def in_turn(taken: Taken, name: str, reference: str) -> float:
    """Speed of one contestant over another's, as the median over the rounds."""
    return over(seconds(taken[reference]), seconds(taken[name]))
