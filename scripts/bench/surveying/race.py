"""Race of the survey: contestants of a workload stand by, show that their losses are the same, and take turns."""

import contextlib
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from surveying.contestant import Contestant, lines_of_code
from surveying.workloads import Workload
from workers import Worker, free_port, mpirun

TOLERANCE = 1e-3
"""Largest difference of a loss, in nats, within the checked steps: float32 sums in another order, through AdamW."""
STARTING = 3
"""First steps, which compile and tune: their memory is counted apart."""
REFERENCES = ("torch-serial", "jax-serial")
"""Contestants whose losses the others are compared with: the first that runs."""
Say = Callable[[str], None]


def report_progress(line: str) -> None:
    """Print a line for whoever waits."""
    print(line, file=sys.stderr, flush=True)


class Entrant:
    """The processes of one contestant."""

    def __init__(self, contestant: Contestant, spec: Mapping[str, Any]):
        self.contestant = contestant
        begin, port = time.perf_counter(), free_port()
        given = [
            json.dumps({**spec, "name": contestant.name, "port": port, "rank": r}) for r in range(contestant.ranks)
        ]
        self._workers: list[Worker] = []
        if contestant.mpi:
            self._workers = [Worker("worker_survey.py", 0, given[:1], mpirun(contestant.ranks))]
        else:
            self._workers = [Worker("worker_survey.py", rank, [one]) for rank, one in enumerate(given)]
        self.ask("")
        self.start_s = time.perf_counter() - begin

    def ask(self, order: str) -> list[dict[str, Any]]:
        """Give an order to all processes and wait; "" waits until they are ready.

        Raises:
            Failed: a process has ended.
        """
        try:
            if not order:
                for worker in self._workers:
                    worker.wait_ready()
                return []
            for worker in self._workers:
                worker.tell(order)
            return [worker.answer() for worker in self._workers]
        except (SystemExit, BrokenPipeError) as ended:
            self.close()
            raise Failed(_last_line(str(ended))) from None

    def step(self) -> dict[str, float]:
        """One step: the slowest process's seconds, the loss, mean CPU seconds, and bytes over loopback."""
        before = loopback_bytes()
        answers = self.ask("step")
        found = {key: max(one[key] for one in answers) for key in ("seconds", "user", "system")}
        return {**found, "loss": answers[0]["loss"], "sent": loopback_bytes() - before}

    def pause(self) -> None:
        """Stop ranks under a launcher, which look for messages."""
        for worker in self._workers:
            worker.pause()

    def resume(self) -> None:
        """Let them go on."""
        for worker in self._workers:
            worker.resume()

    def close(self) -> None:
        """End the processes."""
        for worker in self._workers:
            with contextlib.suppress(ProcessLookupError, FileNotFoundError):  # it has ended by itself
                worker.close()


class Failed(Exception):
    """The end of a contestant's process; the text has the reason."""


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if any(map(str.isalpha, line))]
    errors = [line for line in lines if "Error" in line or line.startswith("error")]
    return (errors or lines or ["no output"])[-1][:200]


def loopback_bytes() -> int:
    """Bytes that have been sent over loopback on this machine."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name.strip() == "lo":
            return int(rest.split()[8])
    return 0


def heats(contestants: Sequence[Contestant]) -> list[list[Contestant]]:
    """Groups that stand by at once, for all together would not fit into memory: each with its peers.

    The first has the references; in the last are all that are nobody's peers.
    """
    by_name = {one.name: one for one in contestants}
    groups: dict[str, dict[str, Contestant]] = {}
    for one in contestants:
        if one.heat:
            names = [name for name in (one.name, *one.peers) if name in by_name]
            groups.setdefault(one.heat, {}).update({name: by_name[name] for name in names})
    seen = {name for group in groups.values() for name in group}
    rest = [one for one in contestants if one.name not in seen]
    made = [list(group.values()) for group in groups.values()] + ([rest] if rest else [])
    return sorted(made, key=lambda group: not any(one.name in REFERENCES for one in group))


def enter(contestant: Contestant, spec: Mapping[str, Any], say: Say) -> Entrant:
    """Start a contestant and let it stand by.

    Raises:
        Failed: it does not start.
    """
    try:
        entrant = Entrant(contestant, spec)
    except Failed as reason:
        raise Failed(f"does not start: {reason}") from None
    entrant.pause()
    say(f"{contestant.name}: ready after {entrant.start_s:.1f} s")
    return entrant


def check_losses(entrant: Entrant, steps: int, reference: Sequence[float]) -> dict[str, Any]:
    """Run the steps of the check by itself: losses, largest difference, first step's seconds, bytes of memory.

    Memory is the largest of the steps after the first `STARTING`, and with them.

    Raises:
        Failed: a process ended.
    """
    entrant.resume()
    done = [entrant.step() for _ in range(STARTING)]
    started = entrant.ask("settle")
    done += [entrant.step() for _ in range(STARTING, steps)]
    losses = [one["loss"] for one in done]
    apart = max(abs(a - b) if a == a else float("inf") for a, b in zip(losses, reference or losses, strict=True))
    memory = entrant.ask("memory")
    entrant.pause()
    largest = {key: max(one[key] for one in memory) for key in ("resident", "state")}
    with_start = max(largest["resident"], *(one["with_start"] for one in started))
    found = {
        "losses": losses,
        "difference": apart,
        "first_s": done[0]["seconds"],
        "start_s": entrant.start_s,
        "with_start": with_start,
        **largest,
    }
    return {**found, "steps": []}


def take_turns(entrants: dict[str, Entrant], rounds: int, failed: dict[str, str]) -> dict[str, list[dict[str, float]]]:
    """So many steps of each in turns, behind one that warms up; one that ends is `failed` and has none."""
    taken: dict[str, list[dict[str, float]]] = {name: [] for name in entrants}
    for number in range(rounds + 1):
        for name in list(taken):
            entrant = entrants[name]
            try:
                entrant.resume()
                step = entrant.step()
                entrant.pause()
            except (Failed, OSError) as reason:
                failed[name] = f"ends when others take turns: {reason}"
                del taken[name]
                continue
            if number:
                taken[name].append(step)
    return taken


@dataclass(frozen=True)
class Settings:
    """Lengths of a survey."""

    steps: int
    rounds: int
    folder: Path
    choice: Mapping[str, Any] = field(default_factory=dict)
    """Answer of the planner."""


def survey(workload: Workload, contestants: Sequence[Contestant], settings: Settings, say: Say) -> dict[str, Any]:
    """All figures of a workload: the check of each, then the heats, with ratios of steps in the same round."""
    spec = {
        "workload": workload.name, "folder": str(settings.folder), "seed": 0, "rows": workload.rows,
        "choice": settings.choice,
    }  # fmt: skip
    rows: dict[str, Any] = {}
    failed: dict[str, str] = {}
    differences: dict[str, float] = {}
    ratios: list[dict[str, Any]] = []
    reference: list[float] = []
    for group in heats(contestants):
        entrants: dict[str, Entrant] = {}
        try:
            for one in sorted(group, key=lambda one: one.name != REFERENCES[0]):
                if one.name in failed or (one.name in rows and not settings.rounds):
                    continue
                try:
                    entrants[one.name] = enter(one, spec, say)
                    if one.name in rows:
                        continue
                    row = check_losses(entrants[one.name], settings.steps, reference)
                except Failed as reason:
                    failed[one.name] = str(reason)
                    entrants.pop(one.name, None)
                    say(f"{one.name}: {reason}")
                    continue
                differences[one.name] = row["difference"]
                say(f"{one.name}: last loss {row['losses'][-1]:.4f}, at most {row['difference']:.1e} apart")
                if row["difference"] > TOLERANCE:
                    failed[one.name] = f"losses differ by {row['difference']:.1e}"
                    entrants.pop(one.name).close()
                    continue
                reference = reference or row["losses"]
                rows[one.name] = row
            taken = take_turns(entrants, settings.rounds, failed) if settings.rounds else {}
        finally:
            for entrant in entrants.values():
                entrant.close()
        for name, steps in taken.items():
            rows[name]["steps"] += steps
        ratios += [
            {"ours": one.name, "peer": peer, "rounds": in_rounds(taken[one.name], taken[peer])}
            for one in group
            for peer in one.peers
            if one.name in taken and peer in taken
        ]
    facts = {
        one.name: {
            "framework": one.framework, "ranks": one.ranks, "follows": one.follows, "lines": lines_of_code(one.code),
            "serial": one.serial, "mpi": one.mpi, "weights": one.weights, "moments": one.moments,
        }
        for one in contestants
    }  # fmt: skip
    return {
        "title": workload.title, "unit": workload.unit, "per_step": workload.rows * workload.seq_len,
        "checked_steps": settings.steps, "rows": rows, "failed": failed, "facts": facts, "ratios": ratios,
        "differences": differences, "choice": settings.choice, "parameters": parameters(workload, settings.folder),
    }  # fmt: skip


def parameters(workload: Workload, folder: Path) -> int:
    """Parameters of the workload's model, from the file of its first weights."""
    with np.load(folder / f"{workload.name}-0.npz") as kept:
        return sum(int(kept[name].size) for name in kept.files)


def in_rounds(mine: Sequence[Mapping[str, float]], theirs: Sequence[Mapping[str, float]]) -> list[float]:
    """Speed over a peer's, round by round: whatever slowed a round met both."""
    return [b["seconds"] / a["seconds"] for a, b in zip(mine, theirs, strict=True)]


def write_weights(workload: Workload, folder: Path, seed: int, writer: Contestant) -> None:
    """Have a contestant that makes the model write its first weights."""
    if (folder / f"{workload.name}-{seed}.npz").exists():
        return
    spec = {"workload": workload.name, "folder": str(folder), "seed": seed, "rows": workload.rows, "choice": {}}
    Entrant(writer, spec).close()
