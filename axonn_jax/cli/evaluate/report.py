"""Report of an evaluation: figures per execution model and problem type, as JSON or as tables."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from axonn_jax.core.errors import UserError
from axonn_jax.core.terminal import printable, say, table
from axonn_jax.judge.metrics import NAMES, Definition, Judged, has_script_runs, measure, resources_of

_DEFAULT_K = (1, 5, 10, 20)


def check_k(k: Sequence[int], samples: int, where: str = "") -> tuple[int, ...]:
    """Return the values of k in order; by default 1, 5, 10 and 20, up to the number of samples.

    Args:
        k: Values of the command line.
        samples: Number of samples per problem.
        where: Text for the error that names the problem with so few samples.

    Raises:
        UserError: A value is above the number of samples.
    """
    if above := [number for number in k if number > samples]:
        raise UserError("--k", above[0], f"at most the number of samples of each problem, {samples}{where}")
    return tuple(sorted(set(k))) or tuple(number for number in _DEFAULT_K if number <= samples)


def fewest(problems: Iterable[Judged]) -> tuple[int, str]:
    """Return the smallest number of samples of any problem, and a text that names that problem."""
    count, name, model = min((len(problem.samples), problem.name, problem.model) for problem in problems)
    return count, f" ({name}, {model})"


def figures(problems: Sequence[Judged], k: Sequence[int], definition: Definition) -> dict[str, Any]:
    """Return the figures of all execution models.

    Args:
        problems: Judged problems of any execution models.
        k: Numbers of samples drawn; empty for the default ones.
        definition: Definition of the metrics.

    Raises:
        UserError: A value of k is above the number of samples of a problem.
    """
    counted = check_k(k, *fewest(problems))
    models: dict[str, Any] = {}
    for model in sorted({problem.model for problem in problems}):
        selected = [problem for problem in problems if problem.model == model]
        resources = resources_of(selected)
        groups = {"all": selected} | {
            kind: [problem for problem in selected if problem.kind == kind]
            for kind in sorted({problem.kind for problem in selected})
        }
        values = {
            name: {str(number): measure(group, number, resources, definition) for number in counted}
            for name, group in groups.items()
        }
        samples = sum(len(problem.samples) for problem in selected)
        models[model] = {"problems": len(selected), "samples": samples, "n": resources} | {"types": values}
        if definition == "as-code":
            del models[model]["n"]  # the script fixes its own number of processes and threads
            if not has_script_runs(selected):
                say(f"warning: no run of {model} has the script's threads and processes: its speedup is 0")
    return {"metrics": definition, "k": list(counted), "models": models}


def ends(results: Iterable[dict[str, Any]]) -> dict[str, int]:
    """Count the samples by outcome, most frequent first."""
    counts = Counter(_end(output) for entry in results for output in entry["outputs"])
    return dict(counts.most_common())


def _end(output: dict[str, Any]) -> str:
    if not output["did_build"]:
        return "not built"
    if output["are_all_valid"]:
        return "right" if output["is_source_valid"] else "right, but sequential"
    # Runs end at the first invalid one, so the last run has the reason.
    return output["runs"][-1]["stopped"] or "wrong result"


def lines(report: dict[str, Any]) -> list[str]:
    """Return the figures as tables: every k over all problems, then the smallest k per problem type."""
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
