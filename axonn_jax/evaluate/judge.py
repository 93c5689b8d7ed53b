"""Samples judged: built, run with each number of threads, and written down as ParEval's drivers do."""

import json
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from axonn_jax.documents import open_regular, parse_json, replace_whole
from axonn_jax.errors import UserError, refused
from axonn_jax.evaluate.build import Builder, hand_over
from axonn_jax.evaluate.sandbox import Limits
from axonn_jax.evaluate.sandbox import run as run_under
from axonn_jax.evaluate.suite import MODELS, Problem
from axonn_jax.terminal import say

_A_THREAD = 160 << 20
"""Address space of a thread: its stack and its part of the heap."""
_NEEDED = {"serial": "", "omp": "#pragma omp"}
_SEED = 1
_WRITABLE = "a file that can be written"
_SECONDS = re.compile(r"[0-9]{1,9}\.[0-9]{9}")
"""A time as the driver writes it: a sample may write others to the same descriptor."""


def threads_of(model: str) -> list[int]:
    """Return the numbers of threads to run with: powers of two up to the cores, 64 at most."""
    cores = len(os.sched_getaffinity(0))
    return [1] if model == "serial" else [2**power for power in range(7) if 2**power <= cores]


class Judge:
    """Builds and runs the samples of a suite under limits; closed by the end of its `with`."""

    def __init__(self, builder: Builder, empty: Path, limits: Limits):
        self._builder, self._empty, self.limits = builder, empty, limits
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
        limits = replace(self.limits, memory=self.limits.memory + threads * _A_THREAD, threads=threads)
        command, environ = [str(program), str(problem.size), str(_SEED)], {"OMP_NUM_THREADS": str(threads)}
        ended = run_under(command, self._empty, limits, filtered=True, environ=environ)
        values = {name: value for name, _, value in (line.partition(": ") for line in ended.results.splitlines())}
        times = [values.get(name, "") for name in ("Time", "BestSequential")]
        did_run = ended.status == 0 and not ended.stopped
        valid = did_run and values.get("Validation") == "PASS" and all(map(_SECONDS.fullmatch, times))
        own, sequential = map(float, times) if valid else (None, None)
        return {
            "did_run": did_run,
            "is_valid": valid,
            "runtime": own,
            "best_sequential_runtime": sequential,
            "stopped": ended.stopped,
        }


@contextmanager
def judging(suite: str, command: Sequence[str], limits: Limits) -> Iterator[Judge]:
    """Give a judge with folders of its own, removed at the end.

    Args:
        suite: Name of the suite.
        command: Words that start the compiler.
        limits: Most that a run may take, of memory beyond that of its threads.
    """
    with tempfile.TemporaryDirectory(prefix="axonn-jax-") as place:
        folders = [Path(place) / name for name in ("build", "empty")]
        for folder in folders:
            folder.mkdir()
        Path(place).chmod(0o711)
        hand_over(folders[0], as_root=limits.as_root)
        yield Judge(Builder(suite, command, folders[0], as_root=limits.as_root), folders[1], limits)


@contextmanager
def resumable_results(
    path: Path, settings: Sequence[object]
) -> Iterator[tuple[list[dict[str, Any]], Callable[[dict[str, Any]], None]]]:
    """Give the results of a stopped evaluation in order, and a function that adds the next one.

    Args:
        path: File of an evaluation under way: a line for the settings and one for each result; removed at the end.
        settings: Texts and options of the evaluation; results under other ones are dropped, which a line says.

    Raises:
        UserError: the file cannot be written.
    """
    head, raw = sha256(json.dumps(settings).encode()).hexdigest().encode(), b""
    results: list[dict[str, Any]] = []
    with refused("--out", path, _WRITABLE):
        with suppress(FileNotFoundError, ValueError), open_regular(path) as made:
            raw = made.read()
        first, *lines = raw.split(b"\n")[:-1] or [b""]  # a stop may have cut the last line
        with suppress(ValueError):
            results += (parse_json(line) for line in lines if first == head)
        if lines:
            rest = "are not judged again" if first == head else "were of other texts or options: all are judged anew"
            say(f"{path}: {len(results) or len(lines)} programs judged before {rest}")
        if results:
            replace_whole(path, b"\n".join([head, *lines[: len(results)], b""]))

    def add(result: dict[str, Any]) -> None:
        with refused("--out", path, _WRITABLE):
            if not results:
                replace_whole(path, head + b"\n")
            with path.open("a", encoding="ascii") as file:
                print(json.dumps(result), file=file)
        results.append(result)

    yield results, add
    path.unlink(missing_ok=True)


def judge_all(
    judge: Judge,
    known: Sequence[Problem],
    entries: Sequence[dict[str, Any]],
    judged: Sequence[dict[str, Any]],
    *,
    add: Callable[[dict[str, Any]], None],
    progress: Callable[[int, str], None],
    keep: Callable[[list[dict[str, Any]]], None],
) -> list[dict[str, Any]]:
    """Return the results of all entries of a file of generations.

    Args:
        judge: Builds and runs.
        known: Problems of the suite.
        entries: Entries of ParEval's generations, of execution models of the suite.
        judged: Results of the first samples, in order, as from `judged_before`.
        add: Adds a result to them.
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
            if done == len(judged):
                add(judge.output(problem, model, entry["prompt"], text))
            outputs.append(judged[done])
            done += 1
        results.append(entry | {"outputs": outputs})
        keep([*results, *entries[len(results) :]])
    return results
