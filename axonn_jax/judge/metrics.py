"""ParEval's metrics build@k, pass@k, speedup_n@k and efficiency_n@k, as in the paper or as in its published script.

The script (analysis/metrics.py of ParEval) differs from the paper: it counts a build once per run, uses the worst of k
draws instead of the best, ignores failed samples, takes binomials of too few samples as 1, and divides OpenMP's speedup
with 32 threads by 8. It accepts sequential answers as parallel ones, and merges outputs of the same index in several
entries of a problem.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import comb
from statistics import fmean
from typing import Literal, NamedTuple

Definition = Literal["paper", "as-code"]
"""Definition of the metrics: the paper's, or that of the script published with it."""
NAMES = ("build", "pass", "speedup", "efficiency")
_LEAST_S = 1e-8
_PAPERS_N: Mapping[str, int] = {"omp": 32, "kokkos": 32, "mpi": 512, "mpi+omp": 256}
_ON_DEVICES = ("cuda", "hip")
_ALL = ((None, None), 1)
_CODE: Mapping[str, tuple[tuple[int | None, int | None], int]] = {
    "kokkos": ((None, 32), 32),
    "omp": ((None, 32), 8),
    "mpi": ((512, None), 512),
    "mpi+omp": ((4, 64), 256),
}
"""Processes and threads of the runs that the script counts, and its divisor of the speedup, by execution model."""


class TimedRun(NamedTuple):
    """Timed run of a built sample."""

    valid: bool
    seconds: float | None
    """Time of the generated function; None for a failed run."""
    processes: int | None = None
    threads: int | None = None

    @property
    def resources(self) -> int:
        """Number of threads over all processes."""
        return (self.processes or 1) * (self.threads or 1)


class Sample(NamedTuple):
    """Generated program."""

    built: bool
    runs: tuple[TimedRun, ...] = ()
    sequential: float | None = None
    """Seconds of the best sequential program."""
    parallel: bool = True
    """True if the text uses its execution model, ParEval's field `is_source_valid`."""
    place: int = 0
    """Index among the outputs of its entry in the file."""

    @property
    def valid(self) -> bool:
        """True if the sample has runs and all of them are valid."""
        return self.built and bool(self.runs) and all(run.valid for run in self.runs)

    @property
    def correct(self) -> bool:
        """True if the sample is valid and, as the paper requires, uses its execution model."""
        return self.valid and self.parallel


@dataclass(frozen=True)
class Judged:
    """Problem in one execution model, with its judged samples."""

    name: str
    kind: str
    model: str
    samples: tuple[Sample, ...]

    @property
    def sequential(self) -> float:
        """Shortest time of the sequential program in seconds; 0 if it was not measured."""
        return min((sample.sequential for sample in self.samples if sample.sequential is not None), default=0.0)


def pass_at_k(samples: int, good: int, k: int) -> float:
    """Return the probability that at least one of k samples, drawn without replacement, is good.

    Args:
        samples: Number of samples.
        good: Number of good samples.
        k: Number of draws, at most `samples`.
    """
    draws = comb(samples, k)
    return (draws - comb(samples - good, k)) / draws


def best_of_k(values: Sequence[float], k: int) -> float:
    """Return the expected maximum of k values, drawn without replacement."""
    # The value of rank j is the maximum of comb(j, k - 1) draws: the other k - 1 are among the j smaller ones.
    ordered, draws = sorted(values), comb(len(values), k)
    return sum(comb(j, k - 1) / draws * value for j, value in enumerate(ordered))


def resources_of(problems: Sequence[Judged]) -> int:
    """Return the threads over all processes of the runs whose speed counts.

    This is the paper's number for the execution model, or the largest one measured if no run has the paper's.
    """
    used = {run.resources for problem in problems for sample in problem.samples for run in sample.runs}
    papers = _PAPERS_N.get(problems[0].model, 1)
    return papers if papers in used else max(used, default=1)


def has_script_runs(problems: Iterable[Judged]) -> bool:
    """Return True if a run has the processes and threads that the script requires for its execution model."""
    return any(
        _counts(run, _CODE.get(problem.model, _ALL)[0])
        for problem in problems
        for sample in problem.samples
        for run in sample.runs
    )


def measure(
    problems: Sequence[Judged], k: int, resources: int, definition: Definition = "paper"
) -> dict[str, float | None]:
    """Return the metrics of problems of one execution model, as means over the problems.

    Args:
        problems: At least one problem, with at least k samples each.
        k: Number of samples drawn.
        resources: Threads over all processes of the runs whose speed counts under the paper's definition.
        definition: Definition of the metrics.

    Returns:
        A value for each of `NAMES`; efficiency is None for GPU programs, whose number of threads the files lack.
    """
    values = [_PROBLEM[definition](problem, k, resources) for problem in problems]
    means: dict[str, float | None] = {name: _mean(value[name] for value in values) for name in NAMES}
    return means | ({"efficiency": None} if problems[0].model in _ON_DEVICES else {})


def _mean(values: Iterable[float | None]) -> float:
    present = [value for value in values if value is not None]
    return fmean(present) if present else 0.0


def _by_paper(problem: Judged, k: int, resources: int) -> dict[str, float | None]:
    number = len(problem.samples)
    speedups = []
    for sample in problem.samples:
        times = [run.seconds for run in sample.runs if run.resources == resources and run.seconds is not None]
        speedups.append(problem.sequential / max(min(times), _LEAST_S) if sample.correct and times else 0.0)
    speedup = best_of_k(speedups, k)
    return {
        "build": pass_at_k(number, sum(sample.built for sample in problem.samples), k),
        "pass": pass_at_k(number, sum(sample.correct for sample in problem.samples), k),
        "speedup": speedup,
        "efficiency": speedup / resources,
    }


def _by_code(problem: Judged, k: int, resources: int) -> dict[str, float | None]:
    required, divisor = _CODE.get(problem.model, _ALL)
    samples = list(problem.samples)
    # Faults of the script are reproduced on purpose, so that its published numbers can be compared.
    if problem.model == "kokkos":
        samples = [sample._replace(runs=tuple(run for run in sample.runs if run.threads != 64)) for sample in samples]
    builds = [sample.built for sample in samples for _ in sample.runs or (None,)]
    counted = [(sample, [run for run in sample.runs if run.valid and _counts(run, required)]) for sample in samples]
    times = sorted(run.seconds or 0.0 for _, runs in counted for run in runs)
    sequential = min((sample.sequential or 0.0 for sample, runs in counted if runs), default=0.0)
    draws = _binomial(len(times), k)
    right: dict[int, bool] = {}
    for sample in samples:
        right[sample.place] = sample.valid and right.get(sample.place, True)
    terms = [_binomial(j, k - 1) * sequential / (draws * max(time, _LEAST_S)) for j, time in enumerate(times)]
    speedup = sum(terms) if terms else None  # a problem without a valid run is not in the script's mean
    return {
        "build": _script_pass(len(builds), sum(builds), k),
        "pass": _script_pass(len(right), sum(right.values()), k),
        "speedup": speedup,
        "efficiency": None if speedup is None else speedup / divisor,
    }


def _counts(run: TimedRun, required: tuple[int | None, int | None]) -> bool:
    pairs = zip((run.processes, run.threads), required, strict=True)
    return all(number is None or value == number for value, number in pairs)


def _binomial(number: int, size: int) -> int:
    return 1 if number < size else comb(number, size)


def _script_pass(samples: int, good: int, k: int) -> float:
    return 1.0 if samples - good < k else pass_at_k(samples, good, k)


_PROBLEM: dict[Definition, Callable[[Judged, int, int], dict[str, float | None]]] = {
    "paper": _by_paper,
    "as-code": _by_code,
}
