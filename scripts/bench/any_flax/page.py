"""The page of results: a table with a row a model, and the commands that make the copies."""

from collections.abc import Mapping, Sequence
from typing import Any

from any_flax.sources import NEEDED, SOURCES


def page(figures: Mapping[str, Any]) -> str:
    """Markdown of all rows, NNX first."""
    grids: Sequence[str] = figures["grids"]
    rows: Mapping[str, Any] = figures["rows"]
    heads = ("model", "kind", "parameters", "loss", "rounding", *grids)
    lines = [
        "# Models of other people",
        "",
        "Each model runs as its authors wrote it, in a small size, float32, on virtual CPU devices: once plain, and",
        "once a grid through `ax.parallelize` or `ax.parallelize_linen`. A cell has, for one grid:",
        "",
        "1. worst relative error of a gradient's element against the plain model (**loss**: the largest of all grids;",
        "   **rounding**: the same of the plain model beside itself with parameters and inputs moved by a unit in the",
        "   last place);",
        "2. bytes of parameters a device, over the ideal (all bytes over `z * y * x`);",
        "3. bytes that the layers' compiled collectives send, over those that `sharding_report` says;",
        "4. bytes that XLA sends beside them, between layers, over those of the layers.",
        "",
    ]
    for title, linen in (("NNX", False), ("Linen", True)):
        mine = {name: row for name, row in rows.items() if row["linen"] == linen}
        if mine:
            lines += [
                f"## {title}: {len(mine)} models",
                "",
                *_markdown(heads, [_cells(n, r, grids) for n, r in mine.items()]),
                "",
            ]
    lines += _added(rows)
    lines += ["## Again", "", "```sh", *_commands(rows), figures["command"], "```", "", _versions(figures), ""]
    return "\n".join(lines)


def _markdown(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return ["| " + " | ".join(cells) + " |" for cells in (heads, ["---"] * len(heads), *rows)]


def _cells(name: str, row: Mapping[str, Any], grids: Sequence[str]) -> list[str]:
    outcomes = row["outcomes"]
    losses = [one["loss"] for one in outcomes.values() if "loss" in one]
    return [
        name, row["kind"], f"{row['parameters']:,}", f"{max(losses):.0e}" if losses else "-", f"{row['rounding']:.0e}",
        *(_cell(outcomes.get(grid, {})) for grid in grids),
    ]  # fmt: skip


def _cell(outcome: Mapping[str, Any]) -> str:
    if "failed" in outcome:
        return f"fails: {outcome['failed'][:60]}"
    if not outcome:
        return ""
    traffic = outcome["traffic"]
    added = sum(traffic["added"].values())
    layers, reported = traffic["layers"], traffic["reported"]
    counted = f"{layers / reported:.2f}" if reported else "-"
    return f"{outcome['gradient']:.0e} / {outcome['share']:.2f} / {counted} / {added / layers if layers else 0:.2f}"


def _added(rows: Mapping[str, Any]) -> list[str]:
    """Lines on the operations at which XLA sends most."""
    lines = ["## Where XLA adds traffic", "", "The three operations with the most bytes, of all grids together.", ""]
    for name, row in rows.items():
        sums: dict[str, float] = {}
        for outcome in row["outcomes"].values():
            for key, count in outcome.get("traffic", {}).get("added", {}).items():
                sums[key] = sums.get(key, 0) + count
        total = sum(sums.values())
        most = sorted(sums, key=lambda key: -sums[key])[:3]
        if total:
            lines.append(f"* {name}: " + ", ".join(f"{key} {sums[key] / total:.0%}" for key in most))
    return [*lines, ""]


def _commands(rows: Mapping[str, Any]) -> list[str]:
    used = {row["source"] for row in rows.values()}
    commands = sorted({source.command for name, source in SOURCES.items() if name in used})
    return [*commands, f'pip install --no-deps --target "$PACKAGES" {NEEDED}']


def _versions(figures: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {version}" for name, version in figures["versions"].items()) + "."
