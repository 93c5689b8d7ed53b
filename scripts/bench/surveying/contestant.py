"""Contestant of the survey: a name and a function that builds its step; and the files that hold them."""

import ast
import ctypes
import gc
import importlib
import inspect
import os
import textwrap
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from race import Entrant
from surveying.workloads import BENCHES, WORKLOADS, Data, Workload

FOLDER = Path(__file__).resolve().parents[1] / "survey_contestants"


@dataclass(frozen=True)
class Job:
    """The part of one process in a contestant's run."""

    workload: Workload
    data: Data
    rows: int
    """Rows of a global batch."""
    rank: int
    world: int
    port: str
    """Free port of loopback, the same for all processes."""
    choice: Mapping[str, Any]
    """Answer of the planner, for contestants that ask."""

    def microbatches(self, sharing: int = 1) -> int:
        """Parts of the batch in one of `sharing` processes; the size of a part is the same for all contestants."""
        return max(1, self.workload.microbatches * self.rows // self.workload.rows // sharing)


@dataclass(frozen=True)
class Runner:
    """A contestant in one process, ready to step."""

    step: Callable[[Any], float]
    """Global batch -> mean loss of all its rows before the update, which has then run too."""
    evaluate: Callable[[Any], float]
    """Rows -> mean loss of all."""
    state_bytes: Callable[[], int]
    """Bytes of weights and optimizer state that this process holds, from the sizes of its arrays."""
    finish: Callable[[], None] = lambda: None
    """Last work behind all steps."""


@dataclass(frozen=True)
class Contestant:
    """One way to train a workload."""

    name: str
    framework: str
    build: Callable[..., Runner]
    """Function of the job, and of options that a benchmark gives."""
    follows: str
    """Official example or page that the set-up follows."""
    workloads: tuple[str, ...]
    code: tuple[Callable[..., Any] | type, ...]
    """Functions and classes that a user writes for this, beside model, loss and data."""
    ranks: int = 2
    mpi: bool = False
    """True if mpirun starts the processes."""
    heat: str = ""
    """Contestants of ours that take turns together, and with all their peers; empty: a peer, or in the last heat."""
    peers: tuple[str, ...] = ()
    """Contestants that it is compared with."""
    serial: str = ""
    """Contestant of the same framework in one process; it is its own where empty."""
    weights: float | None = None
    """Share of the weights in a process by the method's formula; None where the formula depends on the cut."""
    moments: float | None = None
    """Share of AdamW's two moments in a process by the formula."""
    asks_planner: bool = False
    needs: str = ""
    """Package that the environment may lack."""

    def choosing(self, choice: Mapping[str, Any]) -> "Contestant":
        """Itself, started as the planner's `choice` needs if it asks for one: mpirun starts pipelines alone."""
        return replace(self, mpi="pipe" in choice["axes"]) if self.asks_planner else self


def found() -> dict[str, Contestant]:
    """All contestants of all files, by name."""
    files = sorted(path.stem for path in FOLDER.glob("*.py"))
    modules = [importlib.import_module(f"survey_contestants.{name}") for name in files]
    return {one.name: one for module in modules for one in module.CONTESTANTS}


class Answers:
    """Answers of one process to the orders of the main one: `step` with seconds, loss and the core's time, and others.

    `evaluate` with the held-out loss, `memory` with bytes, of which those of `settle` are gone.
    """

    def __init__(self, spec: Mapping[str, Any]):
        workload, contestant = {**WORKLOADS, **BENCHES}[spec["workload"]], found()[spec["name"]]
        data = Data(Path(spec["folder"]), workload, spec["seed"])
        rank = int(os.environ.get("OMPI_COMM_WORLD_RANK", spec["rank"]))
        self._job = Job(workload, data, spec["rows"], rank, spec["ranks"], spec["port"], spec.get("choice", {}))
        self._runner, self._number = contestant.build(self._job, **spec.get("options", {})), 0

    def __call__(self, order: str) -> dict[str, Any]:
        """Carry out one order."""
        if order == "step":
            batch = self._job.data.batch(self._number, self._job.rows)  # outside of the time
            self._number += 1
            before, start = os.times(), time.perf_counter()
            loss = self._runner.step(batch)
            seconds, after = time.perf_counter() - start, os.times()
            spent = {"user": after.user - before.user, "system": after.system - before.system}
            return {"seconds": seconds, "loss": loss, **spent}
        if order == "evaluate":
            return {"loss": self._runner.evaluate(self._job.data.held_out())}
        if order == "settle":
            largest = peak_resident()
            forget_start()
            return {"with_start": largest}
        if order == "finish":
            self._runner.finish()
            return {}
        return {"resident": peak_resident(), "state": self._runner.state_bytes()}


def peak_resident() -> int:
    """Largest resident memory of this process since the last `forget_start`, bytes."""
    (line,) = (one for one in Path("/proc/self/status").read_text().splitlines() if one.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def forget_start() -> None:
    """Return to the system what a compiler has freed, and let the largest resident memory count from now."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")


def enter(one: Contestant, spec: Mapping[str, Any], **more: Any) -> Entrant:
    """Start a contestant's processes.

    Raises:
        Failed: one does not start.
    """
    given = {"build": "surveying.contestant:Answers", "seed": 0, "name": one.name, **spec}
    return Entrant(given, one.ranks, mpi=one.mpi, **more)


def write_weights(workload: Workload, folder: Path, seed: int, writer: Contestant) -> None:
    """Have a contestant that makes the model write its first weights."""
    if not (folder / f"{workload.name}-{seed}.npz").exists():
        spec = {"workload": workload.name, "folder": str(folder), "seed": seed, "rows": workload.rows}
        enter(writer, spec).close()


def first_peers(everyone: Mapping[str, Contestant]) -> set[str]:
    """Names of those that have a peer, but for the planner's choice, and the first peer of each."""
    compared = [one for one in everyone.values() if one.peers and not one.asks_planner]
    return {name for one in compared for name in (one.name, one.peers[0])}


def lines_of_code(parts: tuple[Callable[..., Any] | type, ...]) -> int:
    """Lines of statements in functions and classes: no blank lines, comments and docstrings."""
    count = 0
    for part in parts:
        tree = ast.parse(textwrap.dedent(inspect.getsource(part)))
        taken: set[int] = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.stmt) and not _is_text(node):
                first = node.body[0].lineno if hasattr(node, "body") else (node.end_lineno or node.lineno) + 1
                taken.update(range(node.lineno, max(first, node.lineno + 1)))
        count += len(taken)
    return count


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
