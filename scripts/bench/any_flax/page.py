"""The page of results: a table with a row a model, and the commands that make the copies."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from textwrap import fill
from typing import Any

from any_flax.sources import NEEDED, SOURCES
from figures import markdown

_MEANING = """Each model runs as its authors wrote it, in a small size, in float32 on virtual CPU devices: plain on one
device, and once a grid through `ax.parallelize` or `ax.parallelize_linen`. Four figures a grid:

1. largest relative error of a gradient's element beside the plain model;
2. bytes of parameters on a device over the ideal, all bytes over `z * y * x`;
3. bytes sent by the layers' compiled collectives, over those in `sharding_report`;
4. share of all bytes that XLA sends between layers; the last column has the operation with the most.

*Loss*: largest relative error of all grids. *Rounding*: the first figure for the plain model beside itself, with
parameters and inputs moved by a unit in the last place: no program can be expected to be closer. The third figure is
above 1 where XLA gathers an activation's gradient at a layer's border: that counts as the layer's."""


def page(figures: Mapping[str, Any]) -> str:
    """Markdown of all rows, NNX first."""
    grids: Sequence[str] = figures["grids"]
    rows: Mapping[str, Any] = figures["rows"]
    heads = ("model", "kind", "parameters", "loss", "rounding", *grids, "XLA")
    lines = ["# Models of other people", "", _MEANING, "", _summary(rows.values()), ""]
    for title, linen in (("NNX", False), ("Linen", True)):
        cells = [_cells(name, row, grids) for name, row in rows.items() if row["linen"] == linen]
        if cells:
            lines += [f"## {len(cells)} {title} models", "", *markdown(heads, cells), ""]
    lines += ["## Again", "", "```sh", *commands(rows), figures["command"], "```", "", versions(figures), ""]
    return "\n".join(lines)


def _summary(rows: Iterable[Mapping[str, Any]]) -> str:
    """One sentence on all cells."""
    both = [(row, one) for row in rows for one in row["outcomes"].values()]
    cells = [(row, one) for row, one in both if "failed" not in one]
    failed = len(both) - len(cells)
    exact = sum(one["gradient"] <= max(1e-5, 3 * row["rounding"]) for row, one in cells)
    lean = sum(one["share"] <= 1.10 for _, one in cells)
    counted = [one["traffic"]["layers"] / one["traffic"]["reported"] for _, one in cells if one["traffic"]["reported"]]
    said = sum(0.95 <= ratio <= 1.05 for ratio in counted)
    return fill(
        f"Of {len(cells)} pairs of model and grid ({failed} more fail), {exact} have gradients within 1e-5 or three "
        f"times rounding, {lean} at most 1.10 of the ideal bytes, and {said} of {len(counted)} with a count of the "
        "layers' bytes are within 5 % of it.",
        120,
    )


def _cells(name: str, row: Mapping[str, Any], grids: Sequence[str]) -> list[str]:
    outcomes = row["outcomes"]
    losses = [one["loss"] for one in outcomes.values() if "loss" in one]
    return [
        name, row["kind"], f"{row['parameters']:,}", power(max(losses, default=0.0)), power(row["rounding"]),
        *(_cell(outcomes.get(grid, {})) for grid in grids), _most(outcomes.values()),
    ]  # fmt: skip


def power(value: float) -> str:
    """A number such as 2e-7."""
    return f"{value:.0e}".replace("e-0", "e-") if value else "0"


def _cell(outcome: Mapping[str, Any]) -> str:
    if "failed" in outcome:
        return f"fails: {outcome['failed'][:60]}"
    if not outcome:
        return ""
    traffic = outcome["traffic"]
    layers, reported = traffic["layers"], traffic["reported"]
    counted = f"{layers / reported:.2f}" if reported else "-"
    added = sum(traffic["added"].values())
    share = added / (added + layers) if added else 0.0
    return f"{power(outcome['gradient'])}/{outcome['share']:.2f}/{counted}/{share:.2f}"


def _most(outcomes: Iterable[Mapping[str, Any]]) -> str:
    """The operation at which XLA sends most, of all grids together."""
    sums = Counter[str]()
    for outcome in outcomes:
        sums.update(outcome.get("traffic", {}).get("added", {}))
    return "".join(f"{key} {count / sums.total():.0%}" for key, count in sums.most_common(1))


def commands(rows: Mapping[str, Any]) -> list[str]:
    """Shell commands that make the copies."""
    used = [SOURCES[name] for name in dict.fromkeys(row["source"] for row in rows.values())]
    packages = sorted(f"{source.name}=={source.version}" for source in used if not source.folder)
    clones = sorted({source.clone for source in used if source.folder})
    return [f'pip install --no-deps --target "$PACKAGES" {" ".join(packages)} {NEEDED}', *clones]


def versions(figures: Mapping[str, Any]) -> str:
    """The versions that were measured."""
    return ", ".join(f"{name} {version}" for name, version in figures["versions"].items()) + "."
