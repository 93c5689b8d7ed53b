"""The page of results of models in a pipeline: a table with a row a model."""

from collections.abc import Mapping, Sequence
from textwrap import fill
from typing import Any

from any_flax.page import commands, power, versions
from any_flax.staged import MICROBATCHES, STEPS
from figures import markdown

_MEANING = f"""Each model runs as its authors wrote it, in a small size, in float32 on virtual CPU devices of one
process, or of two under mpirun with the channel that is named: `ax.Trainer(model, optax.sgd(0.05), grid, loss=loss,
microbatches={MICROBATCHES})` for {STEPS} steps, beside a plain loop on one device that adds up the gradients of the
same microbatches. On `pipe2` and `pipe3` in one process the run is saved after {STEPS // 2} steps and goes on with the
other number of stages. Three figures a grid:

1. largest relative difference of the losses of all steps;
2. largest difference of the change of a parameter's element over all steps, relative to the parameter's largest;
3. bytes of parameters on a device over its stage's bytes by `z * y * x`, of the worst stage.

*Rounding*: the first two figures for the plain loop beside itself, with parameters and inputs moved by a unit in the
last place: no program can be expected to be closer. The rows of jraphx GCN are the nodes of one graph: parts of
them are no graph, and the loss is NaN on one device too."""


def staged_page(figures: Mapping[str, Any]) -> str:
    """Markdown of all rows, NNX first."""
    grids: Sequence[str] = figures["grids"]
    rows: Mapping[str, Any] = figures["rows"]
    heads = ("model", "kind", "rounding", *grids)
    lines = ["# Models of other people in the pipeline", "", _MEANING, "", _summary(rows), ""]
    for title, linen in (("NNX", False), ("Linen", True)):
        cells = [
            [name, row["kind"], f"{power(row['loss_rounding'])}/{power(row['rounding'])}"]
            + [_cell(row["outcomes"].get(grid, {})) for grid in grids]
            for name, row in rows.items()
            if row["linen"] == linen
        ]
        lines += [f"## {len(cells)} {title} models", "", *markdown(heads, cells), ""] if cells else []
    lines += ["## What differs", "", *_notes(rows), ""]
    lines += ["## Again", "", "```sh", *commands(rows), figures["command"], "```", "", versions(figures), ""]
    return "\n".join(lines)


def _summary(rows: Mapping[str, Any]) -> str:
    """One sentence on all cells."""
    both = [(row, one) for row in rows.values() for one in row["outcomes"].values()]
    cells = [(row, one) for row, one in both if "failed" not in one]
    exact = sum(
        one["loss"] <= max(1e-6, 3 * row["loss_rounding"]) and one["gradient"] <= max(1e-5, 3 * row["rounding"])
        for row, one in cells
    )
    lean = sum(one["share"] <= 1.15 for _, one in cells)
    return fill(
        f"Of {len(cells)} pairs of model and grid ({len(both) - len(cells)} more are refused), {exact} have losses "
        f"within 1e-6 and changes within 1e-5, or three times rounding, and {lean} at most 1.15 of the ideal bytes.",
        120,
    )


def _cell(outcome: Mapping[str, Any]) -> str:
    if "failed" in outcome or not outcome:
        return "refused" if outcome else ""
    return f"{power(outcome['loss'])}/{power(outcome['gradient'])}/{outcome['share']:.2f}"


def _notes(rows: Mapping[str, Any]) -> list[str]:
    """Lines on what a model's stages hold whole, and on what the trainer says or refuses."""
    found: dict[str, list[str]] = {}
    for name, row in rows.items():
        for grid, one in row["outcomes"].items():
            said = [line for line in one.get("lines", ()) if not line.startswith("stage ")]
            said += [f"refused: {one['failed'].partition(': ')[2]}"] if "failed" in one else []
            over = ", ".join(one.get("whole", ()))
            said += [f"on every device of its stage: {over}"] if one.get("share", 0) > 1.15 else []
            for line in dict.fromkeys(said):
                found.setdefault(f"{name}: {line}", []).append(grid)
    return [f"* {line} ({', '.join(grids)})" for line, grids in found.items()]
