"""Judge of the survey: the page's tables from recorded figures; nothing here is typed by hand."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

Figures = Mapping[str, Any]

_NOTES = {
    "torch-fsdp2": "gloo's reduce-scatter is naive (an all-reduce a rank), a handicap that GPUs do not have; DDP, with "
    "all-reduces alone, is the fair neighbour",
}
"""Facts that a table must not be read without."""


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Lower quartile, median, upper quartile."""
    if len(values) < 2:
        return (values[0],) * 3
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def page(figures: Figures) -> str:
    """Markdown of a survey: a section a question, then what was failed or not run, and how to run it again."""
    works: Mapping[str, Figures] = figures["workloads"]
    lines = ["# Survey", "", _head(figures), ""]
    for title, part in (("Performance", _speeds), ("Peers", _peers), ("Memory", _memory), ("Hindrances", _splits)):
        lines += [f"## {title}", "", *part(works), ""]
    if failed := [f"* {work} {name}: {why}" for work, of in works.items() for name, why in of["failed"].items()]:
        lines += ["## Failed", "", *failed, ""]
    lines += ["## Not run here", "", *(f"* {name}: {why}" for name, why in figures["not_run"].items()), ""]
    lines += ["## Appendix", "", *_equal(works), "", "```sh", figures["command"], "```", "", _versions(figures), ""]
    return "\n".join(lines)


def _head(figures: Figures) -> str:
    checked = next(iter(figures["workloads"].values()))["checked_steps"]
    return (
        f"Two processes of one core each, float32, on {figures['device']}; load before {figures['load']:.2f}. "
        "All contestants start from the same weights, see the same batches by number and have the same AdamW, clipping "
        f"and schedule; only those whose loss is the reference's for {checked} steps are timed. Contestants of a heat "
        "take turns step by step. Brackets hold quartiles. Nothing here says anything about another machine."
    )


def _markdown(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return ["|" + "|".join(cells) + "|" for cells in (heads, ["---"] * len(heads), *rows)]


def seconds_of(work: Figures, name: str, key: str = "seconds") -> float:
    """Median of a figure of a contestant's steps."""
    return quartiles([step[key] for step in work["rows"][name]["steps"]])[1]


def _timed(work: Figures) -> list[str]:
    return [name for name, row in work["rows"].items() if row["steps"]]


def _speeds(works: Mapping[str, Figures]) -> list[str]:
    lines = []
    for key, work in works.items():
        rows = []
        for name in sorted(_timed(work), key=lambda name: seconds_of(work, name)):
            row, fact, unit = work["rows"][name], work["facts"][name], work["per_step"]
            slow, middle, fast = (unit / s for s in reversed(quartiles([s["seconds"] for s in row["steps"]])))
            serial = fact["serial"]
            scaling = seconds_of(work, serial) / seconds_of(work, name) if serial in _timed(work) else None
            sent = "-" if fact["mpi"] else f"{seconds_of(work, name, 'sent') / 1e6:.1f}"
            rows.append(
                (
                    name, f"{middle:,.0f} ({slow:,.0f} to {fast:,.0f})",
                    "-" if scaling is None else f"{scaling:.2f}", sent,
                    f"{row['start_s']:.1f} + {row['first_s']:.1f}", str(fact["lines"]),
                )
            )  # fmt: skip
        heads = ("contestant", f"{work['unit']}/s", "over own serial", "MB sent", "start + first step, s", "lines")
        lines += [f"### {key}: {work['title']}", "", *_markdown(heads, rows), ""]
        lines += [f"{name}: {note}.\n" for name, note in _NOTES.items() if name in _timed(work)]
    lines.append(
        "*MB sent*: over loopback in a step, by all processes (- under MPI, which shares memory). *Lines*: statements "
        "that a user writes for the parallel set-up, model, loss and data left out."
    )
    return lines


def _peers(works: Mapping[str, Figures]) -> list[str]:
    rows, below = [], []
    for key, work in works.items():
        for one in work["ratios"]:
            low, middle, high = quartiles(one["rounds"])
            rows.append((key, one["ours"], one["peer"], f"{middle:.2f} ({low:.2f} to {high:.2f})"))
            if middle < 1:
                below.append(f"{key} {one['ours']} over {one['peer']}")
    said = f"Below 1: {', '.join(below)}." if below else "None is below 1."
    return [*_markdown(("workload", "ours", "over", "speed, round by round"), rows), "", said]


def _memory(works: Mapping[str, Figures]) -> list[str]:
    rows = [
        (key, name, f"{row['state'] / 2**20:.1f}", f"{row['resident'] / 2**20:.0f}")
        for key, work in works.items()
        for name, row in sorted(work["rows"].items(), key=lambda pair: pair[1]["state"])
    ]
    heads = ("workload", "contestant", "weights and optimizer state, MiB", "peak resident, MiB")
    return ["The larger of the two processes.", "", *_markdown(heads, rows)]


def split(work: Figures, name: str) -> dict[str, float]:
    """Shares of a contestant's step: its part of the serial program's compute, more compute, kernel, waiting.

    By the cores' accounting: user time up to the serial program's over the number of processes is compute, more user
    time is work that parallelism brings, kernel time is mostly transport, and the rest of the step the core was idle.
    """
    fact = work["facts"][name]
    total, user = seconds_of(work, name), seconds_of(work, name, "user")
    system = seconds_of(work, name, "system")
    serial = fact["serial"]
    share = seconds_of(work, serial, "user") / fact["ranks"] if serial in _timed(work) else user
    compute = min(user, share)
    parts = {"compute": compute, "more compute": user - compute, "kernel": system}
    parts["idle"] = max(0.0, total - sum(parts.values()))
    return {key: seconds / total for key, seconds in parts.items()}


def _splits(works: Mapping[str, Figures]) -> list[str]:
    rows = []
    for key, work in works.items():
        for name in _timed(work):
            if work["facts"][name]["ranks"] == 1:
                continue
            shares = split(work, name)
            worst = max(list(shares)[1:], key=lambda part: shares[part])
            rows.append((key, name, *(f"{share:.0%}" for share in shares.values()), worst))
    text = (
        "Shares of a step by the cores' accounting: *compute* is user time up to the serial program's over two; *more "
        "compute* is user time beyond, which parallelism brings; *kernel* is mostly transport; *idle* is waiting: "
        "bubbles and exposed latency."
    )
    return [text, "", *_markdown(("workload", "contestant", "compute", "more compute", "kernel", "idle", "most"), rows)]


def _equal(works: Mapping[str, Figures]) -> list[str]:
    rows = [
        (key, name, f"{difference:.0e}", work["facts"][name]["follows"])
        for key, work in works.items()
        for name, difference in work["differences"].items()
    ]
    return _markdown(("workload", "contestant", "largest difference of a loss", "follows"), rows)


def _versions(figures: Figures) -> str:
    return ", ".join(f"{name} {version}" for name, version in figures["versions"].items()) + "."
