"""Appendix of the survey's page: all figures of all contestants, versions and the command."""

from collections.abc import Mapping

from figures import markdown, quartiles
from surveying.figures import Figures, formula, parts_of, seconds_of, timed


def appendix(figures: Figures) -> list[str]:
    """Speeds, memory, parts of a step, losses, what was not run, and how to run the survey again."""
    works: Mapping[str, Figures] = figures["workloads"]
    return [
        "## Appendix", "", *_speeds(works), "### Memory", "", *_memory(works), "", "### Parts of a step", "",
        *_parts(works), "", "### Equal losses", "", *_equal(works), "", "### Not run here", "",
        *(f"* {name}: {why}" for name, why in figures["not_run"].items()), "", "### Again", "", "```sh",
        figures["command"], "```", "", _versions(figures), "",
    ]  # fmt: skip


def _speeds(works: Mapping[str, Figures]) -> list[str]:
    lines = []
    for key, work in works.items():
        rows = []
        for name in sorted(timed(work), key=lambda name: seconds_of(work, name)):
            row, fact, unit = work["rows"][name], work["facts"][name], work["per_step"]
            slow, middle, fast = (unit / s for s in reversed(quartiles([s["seconds"] for s in row["steps"]])))
            serial = fact["serial"]
            scaling = seconds_of(work, serial) / seconds_of(work, name) if serial in timed(work) else None
            sent = "-" if fact["mpi"] else f"{seconds_of(work, name, 'sent') / 1e6:.1f}"
            rows.append(
                (
                    name, f"{middle:,.0f} ({slow:,.0f} to {fast:,.0f})",
                    "-" if scaling is None else f"{scaling:.2f}", sent,
                    f"{row['start_s']:.1f} + {row['first_s']:.1f}", str(fact["lines"]),
                )
            )  # fmt: skip
        heads = ("contestant", f"{work['unit']}/s", "over own serial", "MB sent", "start + first step, s", "lines")
        lines += [f"### {key}: {work['title']}", "", *markdown(heads, rows), ""]
    lines.append(
        "*MB sent*: over loopback in a step, by all processes (- under MPI, which shares memory). *Lines*: statements "
        "that a user writes for the parallel set-up, model, loss and data left out.\n"
    )
    return lines


def _memory(works: Mapping[str, Figures]) -> list[str]:
    rows = []
    for key, work in works.items():
        for name, row in sorted(work["rows"].items(), key=lambda pair: pair[1]["state"]):
            expected = formula(work, name)
            shown = "-" if expected is None else f"{expected / 2**20:.1f}"
            resident = [f"{row[kind] / 2**20:.0f}" for kind in ("resident", "with_start")]
            rows.append((key, name, f"{row['state'] / 2**20:.1f}", shown, *resident))
    heads = ("workload", "contestant", "weights and optimizer state, MiB", "by formula", "peak resident", "with start")
    return ["The larger of the two processes.", "", *markdown(heads, rows)]


def _parts(works: Mapping[str, Figures]) -> list[str]:
    rows = [
        (key, name, *(f"{seconds:.3f}" for seconds in parts_of(work, name).values()))
        for key, work in works.items()
        for name in timed(work)
    ]
    return markdown(("workload", "contestant", "compute, s", "more compute", "kernel", "idle"), rows)


def _equal(works: Mapping[str, Figures]) -> list[str]:
    rows = [
        (key, name, f"{difference:.0e}", work["facts"][name]["follows"])
        for key, work in works.items()
        for name, difference in work["differences"].items()
    ]
    return markdown(("workload", "contestant", "largest difference of a loss", "follows"), rows)


def _versions(figures: Figures) -> str:
    return ", ".join(f"{name} {version}" for name, version in figures["versions"].items()) + "."
