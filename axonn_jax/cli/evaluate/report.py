"""Report of an evaluation: figures for each execution model and type of problem, as JSON or as tables."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from axonn_jax.errors import UserError
from axonn_jax.evaluate.metrics import NAMES, Definition, Judged, has_script_runs, measure, resources_of
from axonn_jax.terminal import printable, say, table

_USUAL = (1, 5, 10, 20)


def check_k(k: Sequence[int], samples: int, where: str = "") -> tuple[int, ...]:
    """Return the numbers of draws in order, by default the usual ones up to the number of samples.

    Raises:
        UserError: one is above the number of samples.
    """
    if above := [number for number in k if number > samples]:
        raise UserError("--k", above[0], f"at most the number of samples of each problem, {samples}{where}")
    return tuple(sorted(set(k))) or tuple(number for number in _USUAL if number <= samples)


def fewest(problems: Iterable[Judged]) -> tuple[int, str]:
    """Return the least number of samples of a problem, and a text that names the problem."""
    count, name, model = min((len(problem.samples), problem.name, problem.model) for problem in problems)
    return count, f" ({name}, {model})"


def figures(problems: Sequence[Judged], k: Sequence[int], definition: Definition) -> dict[str, Any]:
    """Return the figures of every execution model.

    Args:
        problems: Judged problems of any models.
        k: Numbers of draws; empty for the usual ones.
        definition: Definition of the metrics.

    Raises:
        UserError: k is above the number of samples of a problem.
    """
    counted = check_k(k, *fewest(problems))
    models: dict[str, Any] = {}
    for model in sorted({problem.model for problem in problems}):
        own = [problem for problem in problems if problem.model == model]
        resources = resources_of(own)
        groups = {"all": own} | {
            kind: [problem for problem in own if problem.kind == kind]
            for kind in sorted({problem.kind for problem in own})
        }
        values = {
            name: {str(number): measure(group, number, resources, definition) for number in counted}
            for name, group in groups.items()
        }
        samples = sum(len(problem.samples) for problem in own)
        models[model] = {"problems": len(own), "samples": samples, "n": resources} | {"types": values}
        if definition == "as-code":
            del models[model]["n"]  # the script has its own
            if not has_script_runs(own):
                say(f"warning: no run of {model} has the script's threads and processes: its speedup is 0")
    return {"metrics": definition, "k": list(counted), "models": models}


def ends(results: Iterable[dict[str, Any]]) -> dict[str, int]:
    """Return how many samples ended in which way, the commonest first."""
    counts = Counter(_end(output) for entry in results for output in entry["outputs"])
    return dict(counts.most_common())


def _end(output: dict[str, Any]) -> str:
    if not output["did_build"]:
        return "not built"
    if output["are_all_valid"]:
        return "right" if output["is_source_valid"] else "right, but sequential"
    return output["runs"][-1]["stopped"] or "wrong result"


def lines(report: dict[str, Any]) -> list[str]:
    """Return the figures as tables: every k over all problems, then the least k for each type."""
    heads = ["model", "problems", "n", "k", *(f"{name}@k" for name in NAMES)]
    rows = [
        [model, str(values["problems"]), str(values.get("n", "")), number, *_cells(row)]
        for model, values in report["models"].items()
        for number, row in values["types"]["all"].items()
    ]
    least = str(report["k"][0])
    kinds = [
        [model, kind, *_cells(row[least])]
        for model, values in report["models"].items()
        for kind, row in values["types"].items()
        if kind != "all"
    ]
    by_kind = table(["model", "type", *(f"{name}@{least}" for name in NAMES)], kinds, left=(0, 1))
    used = {"paper": "metrics: paper", "as-code": "metrics: as-code, the published script's, faults included"}
    text = [used[report["metrics"]], "", *table(heads, rows, left=(0,)), "", *by_kind]
    return [printable(line) for line in text]


def _cells(values: dict[str, float | None]) -> list[str]:
    return ["-" if value is None else f"{value:.3f}" for value in map(values.get, NAMES)]
