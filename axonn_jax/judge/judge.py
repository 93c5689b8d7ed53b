"""Judge of samples: builds them, runs them with every number of threads, and reports like ParEval's drivers."""

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

from axonn_jax.core.documents import open_regular, parse_json, write_atomically
from axonn_jax.core.errors import UserError, refused
from axonn_jax.core.terminal import say
from axonn_jax.judge.build import Builder, hand_over
from axonn_jax.judge.sandbox import Limits
from axonn_jax.judge.sandbox import run as run_under
from axonn_jax.judge.suite import MODELS, Problem

_A_THREAD = 160 << 20
"""Bytes of address space for a thread: its stack and its share of the heap."""
_NEEDED = {"serial": "", "omp": "#pragma omp"}
_SEED = 1
_WRITABLE = "a file that can be written"
_SECONDS = re.compile(r"[0-9]{1,9}\.[0-9]{9}")
"""Format of the driver's times; a sample can write other text to the same descriptor."""


def threads_of(model: str) -> list[int]:
    """Return the numbers of threads to run with: powers of two up to the cores, at most 64; 1 for serial programs."""
    cores = len(os.sched_getaffinity(0))
    return [1] if model == "serial" else [2**power for power in range(7) if 2**power <= cores]


class Judge:
    """Judge that builds and runs the samples of a suite under limits; made by `judging`."""

    def __init__(self, builder: Builder, empty: Path, limits: Limits):
        self._builder, self._empty, self.limits = builder, empty, limits
        self._references: dict[tuple[str, str], float] = {}

    def output(self, problem: Problem, model: str, prompt: str, text: str) -> dict[str, Any]:
        """Build and run a sample, up to its first invalid run, and return an output of ParEval's results.

        Raises:
            UserError: The problem's reference solution does not pass on this machine.
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
        # If even the reference solution fails, the machine is at fault, and samples would be judged wrongly.
        done = self._judged(problem, model, problem.prompt(model), problem.reference(model))
        if not done["are_all_valid"]:
            why = done["build_error"] or done["runs"][-1]["stopped"] or "its result is wrong"
            accepted = f"a machine on which the reference solution of {problem.name} ({model}) passes: {why}"
            raise UserError("--execute", True, accepted)
        self._references[problem.name, model] = done["best_sequential_runtime"]

    def _run(self, program: Path, problem: Problem, threads: int) -> dict[str, object]:
        limits = replace(self.limits, memory=self.limits.memory + threads * _A_THREAD, threads=threads)
        command, environ = [str(program), str(problem.size), str(_SEED)], {"OMP_NUM_THREADS": str(threads)}
        ended = run_under(command, self._empty, limits, filtered=True, environ=environ)
        values = {name: value for name, _, value in (line.partition(": ") for line in ended.results.splitlines())}
        times = [values.get(name, "") for name in ("Time", "BestSequential")]
        did_run = ended.status == 0 and not ended.stopped
        valid = did_run and values.get("Validation") == "PASS" and all(map(_SECONDS.fullmatch, times))
        runtime, sequential = map(float, times) if valid else (None, None)
        return {
            "did_run": did_run,
            "is_valid": valid,
            "runtime": runtime,
            "best_sequential_runtime": sequential,
            "stopped": ended.stopped,
        }


@contextmanager
def judging(suite: str, command: Sequence[str], limits: Limits) -> Iterator[Judge]:
    """Provide a judge with temporary folders, which are removed at the end.

    Args:
        suite: Name of the suite.
        command: Words that start the compiler.
        limits: Limits of a run; every thread adds to the memory.
    """
    with tempfile.TemporaryDirectory(prefix="axonn-jax-") as place:
        folders = [Path(place) / name for name in ("build", "empty")]
        for folder in folders:
            folder.mkdir()
        Path(place).chmod(0o711)  # a temporary directory is closed to nobody, as whom root's programs run
        hand_over(folders[0], as_root=limits.as_root)
        yield Judge(Builder(suite, command, folders[0], as_root=limits.as_root), folders[1], limits)


@contextmanager
def resumable_results(
    path: Path, settings: Sequence[object]
) -> Iterator[tuple[list[dict[str, object]], Callable[[dict[str, object]], None]]]:
    """Provide the results of an interrupted evaluation in order, and a function that appends the next one.

    Args:
        path: File of the evaluation in progress, with a line for the settings and one per result; removed at the end.
        settings: Texts and options of the evaluation; results of other settings are dropped, with a message.

    Raises:
        UserError: The file cannot be written.
    """
    header, raw = sha256(json.dumps(settings).encode()).hexdigest().encode(), b""
    results: list[dict[str, object]] = []
    with refused("--out", path, _WRITABLE):
        with suppress(FileNotFoundError, ValueError), open_regular(path) as stored:
            raw = stored.read()
        first, *lines = raw.split(b"\n")[:-1] or [b""]  # an interruption may have truncated the last line
        with suppress(ValueError):
            results += (parse_json(line) for line in lines if first == header)
        if lines:
            same = first == header
            verdict = "are not judged again" if same else "were of other texts or options: all are judged anew"
            say(f"{path}: {len(results) or len(lines)} programs judged before {verdict}")
        if results:
            write_atomically(path, b"\n".join([header, *lines[: len(results)], b""]))

    def add(result: dict[str, object]) -> None:
        with refused("--out", path, _WRITABLE):
            if not results:  # the file is missing, or of other settings
                write_atomically(path, header + b"\n")
            with path.open("a", encoding="ascii") as file:
                print(json.dumps(result), file=file)
        results.append(result)

    yield results, add
    path.unlink(missing_ok=True)


def judge_all(
    judge: Judge,
    problems: Sequence[Problem],
    entries: Sequence[dict[str, Any]],
    cached: Sequence[dict[str, object]],
    *,
    add: Callable[[dict[str, object]], None],
    progress: Callable[[int, str], None],
    save: Callable[[list[dict[str, object]]], None],
) -> list[dict[str, object]]:
    """Judge all samples of ParEval's generations and return the results.

    Args:
        judge: Judge of the suite.
        problems: Problems of the suite.
        entries: Entries of ParEval's generations, of the suite's execution models.
        cached: Results of the first samples in order, from `resumable_results`.
        add: Appends a result to `cached`.
        progress: Called with the number of judged samples and the name of the next sample's problem.
        save: Called after every entry with the results so far, followed by the entries still to judge.
    """
    by_name = {problem.name: problem for problem in problems}
    results, done = [], 0
    for entry in entries:
        problem, model = by_name[entry["name"]], entry["parallelism_model"]
        assert model in MODELS
        outputs = []
        for text in entry["outputs"]:
            progress(done, problem.name)
            if done == len(cached):
                add(judge.output(problem, model, entry["prompt"], text))
            outputs.append(cached[done])
            done += 1
        results.append(entry | {"outputs": outputs})
        save([*results, *entries[len(results) :]])
    return results
