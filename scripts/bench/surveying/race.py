"""Race of the survey: contestants of a workload stand by, show that their losses are the same, and take turns."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from race import TOLERANCE, Entrant, Failed, Step, seconds, take_turns
from surveying.contestant import Contestant, enter, lines_of_code
from surveying.workloads import Workload

STARTING = 3
"""First steps, which compile and tune: their memory is counted apart."""
REFERENCES = ("torch-serial", "jax-serial")
"""Contestants whose losses the others are compared with: the first that runs."""
Say = Callable[[str], None]


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
    found = {"losses": losses, "difference": apart, "first_s": done[0]["seconds"], "start_s": entrant.start_s}
    return {**found, "with_start": with_start, **largest, "steps": []}


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
        "workload": workload.name, "folder": str(settings.folder), "rows": workload.rows, "choice": settings.choice,
    }  # fmt: skip
    rows: dict[str, Any] = {}
    failed: dict[str, str] = {}
    ratios: list[dict[str, Any]] = []
    differences: dict[str, float] = {}

    def stand_by(one: Contestant) -> Entrant | None:
        """A contestant that has shown that its losses are the reference's; None of one that has not, or has failed."""
        try:
            entrant = enter(one, spec)
            entrant.pause()
            say(f"{one.name}: ready after {entrant.start_s:.1f} s")
        except Failed as reason:
            failed[one.name] = f"does not start: {reason}"
            return None
        if one.name in rows:
            return entrant
        try:
            row = check_losses(entrant, settings.steps, next(iter(rows.values()), {"losses": []})["losses"])
        except Failed as reason:
            failed[one.name] = str(reason)
            return None
        differences[one.name] = row["difference"]
        say(f"{one.name}: last loss {row['losses'][-1]:.4f}, at most {row['difference']:.1e} apart")
        if row["difference"] > TOLERANCE:
            failed[one.name] = f"losses differ by {row['difference']:.1e}"
            entrant.close()
            return None
        rows[one.name] = row
        return entrant

    for group in heats(contestants):
        entrants: dict[str, Entrant] = {}
        try:
            for one in sorted(group, key=lambda one: one.name != REFERENCES[0]):
                if one.name not in failed and not (one.name in rows and not settings.rounds):
                    if (entrant := stand_by(one)) is not None:
                        entrants[one.name] = entrant
                    else:
                        say(f"{one.name}: {failed[one.name]}")
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
    names = ("framework", "ranks", "follows", "serial", "mpi", "weights", "moments")
    facts = {
        one.name: {**{name: getattr(one, name) for name in names}, "lines": lines_of_code(one.code)}
        for one in contestants
    }
    return {
        "title": workload.title, "unit": workload.unit, "per_step": workload.rows * workload.seq_len,
        "checked_steps": settings.steps, "rows": rows, "failed": failed, "facts": facts, "ratios": ratios,
        "differences": differences, "choice": settings.choice, "parameters": parameters(workload, settings.folder),
    }  # fmt: skip


def parameters(workload: Workload, folder: Path) -> int:
    """Parameters of the workload's model, from the file of its first weights."""
    with np.load(folder / f"{workload.name}-0.npz") as kept:
        return sum(int(kept[name].size) for name in kept.files)


def in_rounds(mine: Sequence[Step], theirs: Sequence[Step]) -> list[float]:
    """Speed over a peer's, round by round: whatever slowed a round met both."""
    return [b / a for a, b in zip(seconds(mine), seconds(theirs), strict=True)]
