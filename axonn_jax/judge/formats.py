"""ParEval's files of prompts, generations and results: JSON lists of an object per problem and execution model."""

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from axonn_jax.core.documents import read_json, write_atomically
from axonn_jax.core.errors import UNSET, UserError, refused
from axonn_jax.core.terminal import say
from axonn_jax.judge.metrics import Judged, Sample, TimedRun

_MOST_BYTES = 1 << 30
_TEXTS = ("name", "problem_type", "parallelism_model", "prompt")
Entry = dict[str, Any]


def read_prompts(path: Path, field: str) -> list[Entry]:
    """Read prompts, which files of generations and results contain too.

    Args:
        path: The file.
        field: Name of the flag in errors.

    Returns:
        The entries, without outputs.

    Raises:
        UserError: The file is not readable or has another format.
    """
    entries, excluded = _File(path, field, "ParEval's prompts").entries(), ("outputs", "raw_outputs")
    return [{key: value for key, value in entry.items() if key not in excluded} for entry in entries]


def read_generations(path: Path, field: str) -> list[Entry]:
    """Read generations, or the generated texts of a file of results, as entries whose outputs are texts.

    Raises:
        UserError: As `read_prompts`.
    """
    file = _File(path, field, "ParEval's generations")
    entries = file.entries()
    for at, entry in enumerate(entries):
        outputs = entry.get("outputs")
        if not isinstance(outputs, list) or not outputs:
            raise file.fault(f"[{at}].outputs", outputs, "a list of at least one text")
        texts = [output.get("generated_output") if isinstance(output, dict) else output for output in outputs]
        for number, text in enumerate(texts):
            if not isinstance(text, str):
                raise file.fault(f"[{at}].outputs[{number}]", text, "a text")
        entry["outputs"] = texts
    return entries


def read_results(path: Path, field: str) -> list[Judged]:
    """Read the results of samples that were built and run, here or by ParEval's drivers.

    Several entries of a problem are merged, and problems that were not judged are skipped, as in ParEval's script.

    Raises:
        UserError: As `read_prompts`, or the file has no results, or those of some samples of a problem only.
    """
    file = _File(path, field, "ParEval's results")
    entries = file.entries()
    texts: dict[tuple[str, ...], int] = {}
    objects: dict[int, Entry] = {}
    for at, entry in enumerate(entries):
        outputs = entry.get("outputs")
        for output in outputs if isinstance(outputs, list) else ():
            if isinstance(output, dict):
                objects[at] = entry
            else:
                texts[_problem(entry)] = at
    problems = {_problem(entry) for entry in objects.values()}
    if not problems:
        raise UserError(
            field, str(path), f"{file.kind}: outputs that are objects with did_build and runs; none is here"
        )
    for problem in sorted(problems & set(texts)):
        accepted = f"objects, as other outputs of {problem[0]} ({problem[2]}) are: it is judged in part"
        raise UserError(field, f"{path}[{texts[problem]}].outputs", accepted)
    if texts:
        say(f"{path}: not judged, and left out: {len(texts)} of {len(problems) + len(texts)} problems")
    return file.problems(objects)


def judged(entries: Sequence[Mapping[str, object]]) -> list[Judged]:
    """Return the problems of results that this package has written."""
    return _File(Path("results"), "results", "results").problems(dict(enumerate(entries)))


def samples_of(entries: Sequence[Entry]) -> Counter[tuple[str, str, str]]:
    """Return the number of outputs of each problem, over all its entries."""
    return Counter(_problem(entry) for entry in entries for _ in entry["outputs"])


def write(path: Path, entries: Sequence[Entry], field: str) -> None:
    """Write a ParEval file atomically; raise ``UserError`` if it cannot be written."""
    raw = json.dumps(entries, indent=4).encode("utf-8", "backslashreplace")
    with refused(field, path, "a file that can be written"):
        write_atomically(path, raw)


def _problem(entry: Mapping[str, Any]) -> tuple[str, str, str]:
    # ParEval has no identifier of a problem: entries with equal name, type and execution model are of the same one.
    return entry["name"], entry["problem_type"], entry["parallelism_model"]


class _File(NamedTuple):
    """ParEval file, with the names for its error messages."""

    path: Path
    field: str
    kind: str

    def entries(self) -> list[Entry]:
        """Read the objects of the file; raise ``UserError`` if it is not readable or has another format."""
        with refused(self.field, self.path, f"a file of {self.kind}, JSON"):
            value = read_json(self.path, _MOST_BYTES)
        if not isinstance(value, list) or not value:
            raise UserError(self.field, str(self.path), f"{self.kind}: a list with an object for each problem")
        for at, entry in enumerate(value):
            if not isinstance(entry, dict):
                raise self.fault(f"[{at}]", entry, "an object")
            for key in _TEXTS:
                if not isinstance(entry.get(key), str):
                    raise self.fault(f"[{at}].{key}", entry.get(key, UNSET), "a text")
        return value

    def fault(self, where: str, value: object, accepted: str) -> UserError:
        """Return the error for a value at a position of the file."""
        shown = " ".join(str(value).split())[:60]
        return UserError(self.field, f"{self.path}{where}", f"{accepted}, as in {self.kind}; here {shown}")

    def problems(self, entries: Mapping[int, Mapping[str, Any]]) -> list[Judged]:
        """Return the problems of entries, which are numbered by their position in the file."""
        samples: dict[tuple[str, str, str], list[Sample]] = {}
        for at, entry in entries.items():
            parsed = samples.setdefault(_problem(entry), [])
            for place, output in enumerate(entry["outputs"]):
                parsed.append(self._sample(f"[{at}].outputs[{place}]", place, output))
        return [Judged(*problem, tuple(parsed)) for problem, parsed in samples.items()]

    def _sample(self, where: str, place: int, output: Mapping[str, Any]) -> Sample:
        for key in ("did_build", "is_source_valid"):
            if not isinstance(output.get(key), bool):
                raise self.fault(f"{where}.{key}", output.get(key, UNSET), "true or false")
        runs = output.get("runs", UNSET)
        good = isinstance(runs, list) and bool(runs) and all(isinstance(run, dict) for run in runs)
        if runs is not None and not good:
            raise self.fault(f"{where}.runs", runs, "a list of at least one object, or null")
        sequential = self._seconds(where, output, "best_sequential_runtime")
        read = tuple(self._run(f"{where}.runs[{at}]", run) for at, run in enumerate(runs or ()))
        if sequential is None and any(run.valid for run in read):
            raise self.fault(f"{where}.best_sequential_runtime", None, "a number of seconds beside a valid run")
        return Sample(output["did_build"], read, sequential, output["is_source_valid"], place)

    def _run(self, where: str, run: Mapping[str, object]) -> TimedRun:
        if not isinstance(valid := run.get("is_valid", UNSET), bool | None):
            raise self.fault(f"{where}.is_valid", valid, "true, false or null")
        seconds = self._seconds(where, run, "runtime")
        if valid and seconds is None:
            raise self.fault(f"{where}.runtime", None, "a number of seconds for a valid run")
        return TimedRun(
            bool(valid), seconds, self._count(where, run, "num_procs"), self._count(where, run, "num_threads")
        )

    def _seconds(self, where: str, values: Mapping[str, Any], key: str) -> float | None:
        value = values.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not (0 <= value < math.inf):
            raise self.fault(f"{where}.{key}", value, "a number of seconds, or null")
        return float(value)

    def _count(self, where: str, values: Mapping[str, object], key: str) -> int | None:
        value = values.get(key)
        # bool is a subclass of int, so true would pass as 1.
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 2**31):
            raise self.fault(f"{where}.{key}", value, "an integer of at least 1")
        return value
