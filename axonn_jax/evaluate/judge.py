"""Samples judged: built, run with each number of threads, and written down as ParEval's drivers do."""

import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from axonn_jax.errors import UserError
from axonn_jax.evaluate.build import Builder, hand_over
from axonn_jax.evaluate.sandbox import Ended, Limits
from axonn_jax.evaluate.sandbox import run as run_under
from axonn_jax.evaluate.suite import MODELS, Problem

_A_THREAD = 160 << 20
"""Address space of a thread: its stack and its part of the heap."""
_NEEDED = {"serial": "", "omp": "#pragma omp"}
_SEED = 1


def threads_of(model: str) -> list[int]:
    """Return the numbers of threads to run with: powers of two up to the cores, 64 at most."""
    cores = len(os.sched_getaffinity(0))
    return [1] if model == "serial" else [2**power for power in range(7) if 2**power <= cores]


class Judge:
    """Builds and runs the samples of a suite; closed by the end of its `with`."""

    def __init__(self, builder: Builder, empty: Path, *, seconds: float, memory: int, as_root: bool):
        self._builder, self._empty = builder, empty
        self._seconds, self._memory, self._as_root = seconds, memory, as_root
        self._references: dict[tuple[str, str], float] = {}

    def output(self, problem: Problem, model: str, prompt: str, text: str) -> dict[str, Any]:
        """Build and run a sample: an entry of ParEval's results; runs end at the first invalid one.

        Raises:
            UserError: the reference solution does not pass here.
        """
        if (problem.name, model) not in self._references:
            self._reference(problem, model)
        return self._judged(problem, model, prompt, text)

    def _judged(self, problem: Problem, model: str, prompt: str, text: str) -> dict[str, Any]:
        built = self._builder.build(problem, model, f"{prompt}\n{text}")
        runs: list[dict[str, Any]] = []
        for threads in threads_of(model) if built.path else []:
            assert built.path is not None
            runs.append(
                self._run(built.path, problem, threads) | ({} if model == "serial" else {"num_threads": threads})
            )
            if not runs[-1]["is_valid"]:
                break
        times = [run["best_sequential_runtime"] for run in runs if run["best_sequential_runtime"] is not None]
        return {
            "generated_output": text,
            "source_write_success": True,
            "did_build": built.path is not None,
            "is_source_valid": _NEEDED[model] in text,
            "did_any_run": any(run["did_run"] for run in runs),
            "did_all_run": bool(runs) and all(run["did_run"] for run in runs),
            "are_any_valid": any(run["is_valid"] for run in runs),
            "are_all_valid": bool(runs) and all(run["is_valid"] for run in runs),
            "best_sequential_runtime": min(times, default=None),
            "runs": runs if built.path else None,
            "build_error": built.error,
        }

    def _reference(self, problem: Problem, model: str) -> None:
        """Check that the reference solution passes: else the machine is at fault, not a sample."""
        done = self._judged(problem, model, problem.prompt(model), problem.reference(model))
        if not done["are_all_valid"]:
            why = done["build_error"] or done["runs"][-1]["stopped"] or "its result is wrong"
            accepted = f"a machine on which the reference solution of {problem.name} ({model}) passes: {why}"
            raise UserError("--execute", True, accepted)
        self._references[problem.name, model] = done["best_sequential_runtime"]

    def _run(self, program: Path, problem: Problem, threads: int) -> dict[str, Any]:
        limits = Limits(self._seconds, self._memory + threads * _A_THREAD, threads)
        command, environ = [str(program), str(problem.size), str(_SEED)], {"OMP_NUM_THREADS": str(threads)}
        ended = run_under(command, self._empty, limits, filtered=True, as_root=self._as_root, environ=environ)
        values = _values(ended)
        valid = ended.status == 0 and not ended.stopped and values.get("Validation") == "PASS"
        return {
            "did_run": ended.status == 0 and not ended.stopped,
            "is_valid": valid,
            "runtime": float(values["Time"]) if valid else None,
            "best_sequential_runtime": float(values["BestSequential"]) if valid else None,
            "stopped": ended.stopped,
        }


def _values(ended: Ended) -> dict[str, str]:
    pairs = (line.partition(": ") for line in ended.results.splitlines())
    return {name: value for name, _, value in pairs}


@contextmanager
def judging(suite: str, command: Sequence[str], *, seconds: float, memory: int, as_root: bool) -> Iterator[Judge]:
    """Give a judge with folders of its own, removed at the end.

    Args:
        suite: Name of the suite.
        command: Words that start the compiler.
        seconds: Most wall-clock time of a run.
        memory: Most bytes of a run, beyond those of its threads.
        as_root: True to let programs run as root.
    """
    with tempfile.TemporaryDirectory(prefix="axonn-jax-") as place:
        folders = [Path(place) / name for name in ("build", "empty")]
        for folder in folders:
            folder.mkdir()
        Path(place).chmod(0o711)
        hand_over(folders[0], as_root=as_root)
        builder = Builder(suite, command, folders[0], as_root=as_root)
        yield Judge(builder, folders[1], seconds=seconds, memory=memory, as_root=as_root)


def judge_all(
    judge: Judge,
    known: Sequence[Problem],
    entries: Sequence[dict[str, Any]],
    *,
    progress: Callable[[int, str], None],
    keep: Callable[[list[dict[str, Any]]], None],
) -> list[dict[str, Any]]:
    """Return the results of all entries of a file of generations.

    Args:
        judge: Builds and runs.
        known: Problems of the suite.
        entries: Entries of ParEval's generations, of execution models of the suite.
        progress: Takes the number of samples done and the name of the next one's problem.
        keep: Takes the results so far, with the entries that are still to judge.
    """
    by_name = {problem.name: problem for problem in known}
    results, done = [], 0
    for entry in entries:
        problem, model = by_name[entry["name"]], entry["parallelism_model"]
        assert model in MODELS
        outputs = []
        for text in entry["outputs"]:
            progress(done, problem.name)
            outputs.append(judge.output(problem, model, entry["prompt"], text))
            done += 1
        results.append(entry | {"outputs": outputs})
        keep([*results, *entries[len(results) :]])
    return results
