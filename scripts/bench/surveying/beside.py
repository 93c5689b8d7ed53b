"""Benchmarks beside the survey: its contestants on a workload of their own, all at once, for a few ratios."""

import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from race import Failed, Taken, need_torch, race, rate
from surveying.contestant import enter, found, write_weights
from surveying.workloads import BENCHES


@dataclass(frozen=True)
class Entry:
    """A contestant's part in a race."""

    name: str
    """Contestant of the survey."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of its `build`."""
    workload: str = "T1"
    times: int = 1
    """Global batches of the workload in one of its own."""
    apart: int = 1
    """Copies that run at once, each for itself: what sharing the machine costs."""
    choice: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        """Tokens of one step."""
        one = BENCHES[self.workload]
        return one.rows * one.seq_len * self.times * self.apart


def beside(entries: Mapping[str, Entry], rounds: int, *, quiet: bool) -> tuple[Taken, dict[str, float]]:
    """Steps of all entries in turns, from the same weights on the same tokens, and their tokens a second."""
    everyone = found()
    if any("torch" in entry.name for entry in entries.values()):
        need_torch()
    with tempfile.TemporaryDirectory() as made:
        entrants = {}
        try:
            for label, entry in entries.items():
                workload = BENCHES[entry.workload]
                write_weights(workload, Path(made), 0, everyone["ours-serial"])
                entrants[label] = enter(
                    everyone[entry.name],
                    {
                        "workload": workload.name, "folder": made, "rows": workload.rows * entry.times,
                        "options": entry.options, "choice": entry.choice, "environment": entry.environment,
                    },
                    apart=entry.apart,
                )  # fmt: skip
                entrants[label].pause()
        except Failed as reason:
            for entrant in entrants.values():
                entrant.close()
            sys.exit(f"error: {label} does not start: {reason}\n{reason.log}")
        taken = race(entrants, rounds, quiet=quiet, last="finish")
    return taken, {f"{label} tokens/s": rate(taken[label], entry.tokens) for label, entry in entries.items()}
