"""Judge of the survey: the page from recorded figures; nothing here is typed by hand."""

import statistics
from collections.abc import Mapping
from typing import Any

from figures import markdown, quartiles
from surveying.appendix import appendix
from surveying.efficiency import TARGET
from surveying.figures import Figures, fastest, formula, parts_of, seconds_of, timed
from surveying.race import STARTING

PLANNED = "ours-best"
"""Contestant that trains on the planner's choice."""
_NOTES = {
    "torch-fsdp2": "gloo's reduce-scatter is naive (an all-reduce a rank), a handicap that GPUs do not have; DDP, with "
    "all-reduces alone, is the fair neighbour",
}
"""Facts that a table must not be read without."""
_HINDERED = (
    "ours-data", "torch-ddp", "jax-data", "deepspeed-0", "ours-z", "torch-fsdp2", "deepspeed-3", "ours-y", "torch-tp",
    "jax-tensor", "ours-pipe", "torch-pp-1f1b", "torch-pp-zbv",
)  # fmt: skip
"""Rows of the first workload that the main part shows."""


def page(figures: Figures) -> str:
    """Markdown of a survey: a section a question, and an appendix of all figures."""
    works: Mapping[str, Figures] = figures["workloads"]
    parts = [("Performance", _peers(works)), ("Memory", _memory(works))]
    if figures["efficiency"]:
        parts.append(("Statistical efficiency", _efficiency(figures["efficiency"])))
    parts.append(("Hindrances", _hindrances(works)))
    if figures["simulated"]:
        parts.append(("Large scale, simulated", _simulated(figures["simulated"])))
    if failed := [f"* {work} {name}: {why}" for work, of in works.items() for name, why in of["failed"].items()]:
        parts.append(("Failed", failed))
    lines = ["# Survey", "", _head(figures), ""]
    for title, part in parts:
        lines += [f"## {title}", "", *part, ""]
    return "\n".join([*lines, *appendix(figures)])


def _head(figures: Figures) -> str:
    works = figures["workloads"]
    titles = "; ".join(f"**{key}** {work['title']}" for key, work in works.items())
    checked = next(iter(works.values()))["checked_steps"]
    return (
        f"{titles}. Two processes of one core each, float32, on {figures['device']}; load before "
        f"{figures['load']:.2f}. All contestants start from the same weights, see the same batches by number and have "
        f"the same AdamW, clipping and schedule; only those whose loss is the reference's for {checked} steps are "
        "timed. Contestants of a heat take turns step by step. Nothing here says anything about another machine."
    )


def _peers(works: Mapping[str, Figures]) -> list[str]:
    cells: dict[tuple[str, str], dict[str, str]] = {}
    below: dict[str, list[str]] = {}
    for key, work in works.items():
        for one in (each for each in work["ratios"] if each["ours"] != PLANNED):
            low, middle, high = quartiles(one["rounds"])
            cells.setdefault((one["ours"], one["peer"]), {})[key] = f"{middle:.2f} ({low:.2f}, {high:.2f})"
            if middle < 1:
                part, seconds = _why(work, one["ours"], one["peer"])
                below.setdefault(f"{key}, {part}", []).append(f"{one['ours']} over {one['peer']} ({seconds})")
        best, other = fastest(work, "axonn_jax"), fastest(work, "deepspeed")
        if best and other:
            shown = f"{seconds_of(work, other) / seconds_of(work, best):.2f} ({best}, {other})"
            cells.setdefault(("the fastest of ours", "the best DeepSpeed stage"), {})[key] = shown
    rows = [(ours, peer, *(cell.get(key, "") for key in works)) for (ours, peer), cell in cells.items()]
    said = ["None is below 1."]
    if below:
        reasons = [f"* {why}: {', '.join(pairs)}" for why, pairs in below.items()]
        said = ["Below 1, with the part of a step that takes longer, seconds:", "", *reasons]
    notes = [f"{name}: {note}." for name, note in _NOTES.items() if any(name in timed(work) for work in works.values())]
    heads = ("ours", "over", *works)
    intro = "Speed over a peer's, round by round; quartiles in brackets."
    return [intro, "", *markdown(heads, rows), "", *said, "", *_planned(works), *notes]


def _why(work: Figures, ours: str, peer: str) -> tuple[str, str]:
    """The part of a step in which ours spends most beyond the peer, and the seconds of both."""
    mine, theirs = parts_of(work, ours), parts_of(work, peer)
    part = max(mine, key=lambda name: mine[name] - theirs[name])
    return part, f"{mine[part]:.2f}, not {theirs[part]:.2f}"


def _planned(works: Mapping[str, Figures]) -> list[str]:
    lines = []
    for key, work in works.items():
        over = {one["peer"]: quartiles(one["rounds"]) for one in work["ratios"] if one["ours"] == PLANNED}
        if over:
            chosen = {**work["choice"]["axes"], "microbatches": work["choice"]["microbatches"]}
            axes = ", ".join(f"{name} {value}" for name, value in chosen.items())
            best = min(over, key=lambda name: over[name][1])
            low, middle, high = over[best]
            apart = seconds_of(work, best) / seconds_of(work, PLANNED)
            lines += [
                f"`plan` picks {axes} for {key}: {middle:.2f} ({low:.2f}, {high:.2f}) of the speed of {best}, round by "
                f"round, the fastest beside it of {', '.join(over)}; {apart:.2f} by the medians of all heats below.",
                "",
            ]
    return lines


def _memory(works: Mapping[str, Figures]) -> list[str]:
    families = (
        ("ours-zero", "torch-zero", "deepspeed-1", "deepspeed-2"),
        ("ours-z", "torch-fsdp2", "jax-fsdp", "deepspeed-3"),
    )
    rows = []
    for key, work in works.items():
        for names in families:
            found = [name for name in names if name in work["rows"]]
            if len(found) < 2 or found[0] != names[0]:
                continue
            rows.append((key, "; ".join(f"{name} {_bytes(work, name)}" for name in found)))
    text = (
        f"Peak resident memory of the larger process in steps after the first {STARTING}, with them (and compilation) "
        "behind a slash, MiB; in brackets weights and optimizer state over the method's formula, 12 bytes a parameter "
        "less what is divided:"
    )
    return [text, "", *markdown(("workload", "of the same method"), rows)]


def _bytes(work: Figures, name: str) -> str:
    row, expected = work["rows"][name], formula(work, name)
    over = "" if expected is None else f" ({row['state'] / expected:.2f})"
    return f"{row['resident'] / 2**20:.0f} / {row['with_start'] / 2**20:.0f}{over}"


def _efficiency(curves: Any) -> list[str]:
    rows = []
    groups = dict.fromkeys((one["name"], one["rows"]) for one in curves)
    for name, size in groups:
        reached = [one["reached"] for one in curves if (one["name"], one["rows"]) == (name, size)]
        cells = []
        for key in ("tokens", "seconds"):
            values = [one[key] for one in reached if one]
            spread = f"{statistics.median(values):,.0f} ({min(values):,.0f} to {max(values):,.0f})" if values else "-"
            cells.append(spread)
        rows.append((name, str(size), *cells, f"{sum(map(bool, reached))} of {len(reached)}"))
    text = (
        f"To a held-out loss of {TARGET} nats on L1, the fastest of each framework; median of the seeds, their range:"
    )
    heads = ("contestant", "sequences a batch", "tokens", "seconds of steps", "reached")
    return [text, "", *markdown(heads, rows), "", "![Loss over tokens, over seconds, and batch sizes](survey.png)"]


def _hindrances(works: Mapping[str, Figures]) -> list[str]:
    key, work = next(iter(works.items()))
    rows = []
    for name in _HINDERED:
        if name in timed(work):
            parts = parts_of(work, name)
            worst = max(list(parts)[1:], key=lambda part: parts[part])
            rows.append((name, *(f"{seconds:.2f}" for seconds in parts.values()), worst))
    text = (
        f"Seconds of a step on {key} by the cores' accounting: *compute* is user time up to the serial program's over "
        "two, *more compute* user time beyond, which parallelism brings; *kernel* is mostly transport; *idle* is "
        "waiting: bubbles and exposed latency."
    )
    heads = ("contestant", "compute", "more compute", "kernel", "idle", "hindered most by")
    return [text, "", *markdown(heads, rows)]


def _simulated(found: Figures) -> list[str]:
    groups: dict[tuple[str, str, str], list[Any]] = {}
    for row in [*found["rows"], *found["others"]]:
        groups.setdefault((row["source"], row["machine"], row["unit"]), []).append(row)
    rows = []
    for (source, machine, unit), of in groups.items():
        spans = [f"{min(r[k] for r in of):,.4g} to {max(r[k] for r in of):,.4g}" for k in ("published", "predicted")]
        published = of[0]["span"] or spans[0]
        middle = f"{statistics.median(abs(row['error']) for row in of):.1%}"
        if of[0]["span"]:  # no error where a range is published
            middle = f"{sum(row['error'] == 0 for row in of)} of {len(of)} in the range"
        sizes = f"{of[0]['model']} on {of[0]['devices']:,} to {of[-1]['model']} on {of[-1]['devices']:,}"
        rows.append((source, machine, sizes, unit, published, spans[1], middle))
    ratios = "; ".join(f"{name} {ratio:.2f}" for name, ratio in found["ratios"].items())
    text = "**Simulated** by the planner, none of it run here, beside what was published (`scripts/bench/published`):"
    heads = ("source", "machine", "models on devices", "unit", "published", "simulated", "median error")
    return [text, "", *markdown(heads, rows), "", f"Ratios of step times, simulated: {ratios}."]
