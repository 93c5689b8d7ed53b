"""Statistical efficiency: tokens and seconds to a target held-out loss, by framework, seed and batch size."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from surveying.contestant import Contestant, enter, write_weights
from surveying.figures import Figures, fastest
from surveying.race import Say
from surveying.workloads import Workload

TARGET = 7.2
"""Held-out loss in nats; a fresh model has log(4096) = 8.3."""
SEEDS = (0, 1, 2)
BATCHES = (16, 8, 32)
"""Sequences; all frameworks run the first."""
EVERY = 16_384
"""Tokens between two evaluations, which take no part in the seconds."""
MOST_TOKENS = 400_000
Point = Mapping[str, float]


def race_to_target(
    workload: Workload, racers: Sequence[Contestant], writer: Contestant, folder: Path, say: Say
) -> list[dict[str, Any]]:
    """Curves of all racers on the first batch size and of the first racer on the others; `writer` makes the weights."""
    curves = []
    for seed in SEEDS:
        write_weights(workload, folder, seed, writer)
        pairs = [(one, BATCHES[0]) for one in racers]
        pairs += [(racers[0], rows) for rows in BATCHES[1:]]
        for one, rows in pairs:
            points = curve(one, workload, folder, seed, rows)
            reached = reach(points)
            curves.append({"name": one.name, "seed": seed, "rows": rows, "points": points, "reached": reached})
            shown = "not reached" if reached is None else f"{reached['tokens']:,.0f} tokens, {reached['seconds']:.0f} s"
            say(f"{one.name}, seed {seed}, batches of {rows}: {shown}")
    return curves


def curve(one: Contestant, workload: Workload, folder: Path, seed: int, rows: int) -> list[Point]:
    """Held-out loss at intervals, until the target; seconds are those of the steps, without compilation."""
    spec = {"workload": workload.name, "folder": str(folder), "seed": seed, "rows": rows}
    every = EVERY // (rows * workload.seq_len)
    entrant = enter(one, spec)
    try:
        points = [{"tokens": 0.0, "seconds": 0.0, "loss": entrant.ask("evaluate")[0]["loss"]}]
        while points[-1]["loss"] > TARGET and points[-1]["tokens"] < MOST_TOKENS:
            steps, last = [entrant.step()["seconds"] for _ in range(every)], points[-1]
            if len(points) == 1:
                steps[0] = sum(steps[1:]) / (every - 1)  # the first one compiles
            points.append(
                {
                    "tokens": last["tokens"] + every * rows * workload.seq_len,
                    "seconds": last["seconds"] + sum(steps),
                    "loss": entrant.ask("evaluate")[0]["loss"],
                }
            )
    finally:
        entrant.close()
    return list(points)


def reach(points: Sequence[Point]) -> Point | None:
    """Tokens and seconds at the target, on a straight line between the last two points; None if it is not reached."""
    if points[-1]["loss"] > TARGET:
        return None
    before, after = points[-2:]
    part = (before["loss"] - TARGET) / (before["loss"] - after["loss"])
    return {key: before[key] + part * (after[key] - before[key]) for key in ("tokens", "seconds")}


def fastest_of_each(work: Figures, contestants: Mapping[str, Contestant]) -> list[Contestant]:
    """The fastest contestant of each framework in two processes, this package's first."""
    frameworks = sorted({one.framework for one in contestants.values()}, key=lambda name: (name != "axonn_jax", name))
    asked = [name for name, one in contestants.items() if one.asks_planner]
    names = [fastest(work, framework, but=asked) for framework in frameworks]
    return [contestants[name] for name in names if name]
