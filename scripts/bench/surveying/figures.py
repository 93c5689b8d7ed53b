"""Figures of a survey, read from its record: medians, quartiles, shares of a step, formulas of memory."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

Figures = Mapping[str, Any]


def seconds_of(work: Figures, name: str, key: str = "seconds") -> float:
    """Median of a figure of a contestant's steps."""
    return float(statistics.median(step[key] for step in work["rows"][name]["steps"]))


def timed(work: Figures) -> list[str]:
    """Contestants that took turns."""
    return [name for name, row in work["rows"].items() if row["steps"]]


def fastest(work: Figures, framework: str, *, but: Sequence[str] = ()) -> str | None:
    """The fastest contestant of a framework in two processes, some left out; None if none ran."""
    facts = work["facts"]
    those = [n for n in timed(work) if facts[n]["framework"] == framework and facts[n]["ranks"] == 2 and n not in but]
    return min(those, key=lambda name: seconds_of(work, name), default=None)


def parts_of(work: Figures, name: str) -> dict[str, float]:
    """Seconds of a contestant's step: its part of the serial program's compute, more compute, kernel, idle.

    By the cores' accounting: user time up to the serial program's over the number of processes is compute, more user
    time is work that parallelism brings, kernel time is mostly transport, and the rest of the step the core was idle.
    """
    fact = work["facts"][name]
    total, user = seconds_of(work, name), seconds_of(work, name, "user")
    serial = fact["serial"]
    share = seconds_of(work, serial, "user") / fact["ranks"] if serial in timed(work) else user
    compute = min(user, share)
    parts = {"compute": compute, "more compute": user - compute, "kernel": seconds_of(work, name, "system")}
    parts["idle"] = max(0.0, total - sum(parts.values()))
    return parts


def formula(work: Figures, name: str) -> float | None:
    """Bytes of weights and AdamW's two moments in a process by the method's formula; None where there is none."""
    fact = work["facts"][name]
    if fact["weights"] is None or fact["moments"] is None:
        return None
    return float(4 * work["parameters"] * (fact["weights"] + 2 * fact["moments"]))
