"""Profile of some steps of a run: traces of jax.profiler, and a summary of the devices' time."""

import contextlib
import glob
import gzip
import json
import os
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

import jax

from axonn_jax.pipe.timeline.spans import covered

FOLDER = "profile"
"""Folder of the traces in a run's directory, with a folder for each process."""
TRACE = "perfetto_trace.json.gz"
_LONGEST = 10  # operations in the summary
Interval = tuple[float, float]


class Profile:
    """Trace of the steps of `log.profile` by jax.profiler, in `profile/rank_N` of the run's directory.

    The trace starts when all earlier steps have finished, and ends with the last step. If the run ends in between, the
    partial trace is kept.

    Args:
        steps: The steps to trace.
        directory: The run directory.
        rank: Rank of this process.
        say: Printer of a line for people.
        behind: Step after which the run resumes; without an earlier trace, the remaining steps are traced.
    """

    def __init__(self, steps: range, directory: Path, rank: int, say: Callable[[str], None], *, behind: int = 0):
        self._say, self._running = say, False
        self._root, self._folder = directory / FOLDER, directory / FOLDER / f"rank_{rank}"
        self._steps = steps if self._folder.exists() else range(max(steps.start, behind + 1), steps.stop)
        if steps and not self._steps:
            say(f"log.profile: step {steps[-1]} is done already: nothing is traced")
        self._traced = 0

    def __enter__(self) -> Self:
        return self

    def step_starts(self, step: int, last: object) -> None:
        """Start the trace before its first step, once the results `last` of the previous step are ready."""
        if self._steps and step == self._steps[0]:
            jax.block_until_ready(last)
            shutil.rmtree(self._folder, ignore_errors=True)
            options = jax.profiler.ProfileOptions()
            # The trace has a limited size, and Python calls, such as those of a compilation, would fill it.
            options.python_tracer_level = 0
            with self._failures_reported():
                jax.profiler.start_trace(self._folder, create_perfetto_trace=True, profiler_options=options)
                self._running = True

    def step_ended(self, step: int, results: object) -> None:
        """End the trace after its last step, once its `results` are ready, and print the summary."""
        self._traced += self._running
        if self._running and step == self._steps[-1]:
            jax.block_until_ready(results)
            self._end()

    def _end(self) -> None:
        self._running = False
        with self._failures_reported():
            jax.profiler.stop_trace()
            lines = summary(self._folder, max(self._traced, 1))
            first = self._steps[0]
            self._say(
                f"profile of steps {first} to {first + self._traced - 1} in {self._root}: open a {TRACE} "
                f"at https://ui.perfetto.dev, or all with `pip install xprof` and `xprof {self._root}`"
            )
            for line in lines:
                self._say(line)

    @contextlib.contextmanager
    def _failures_reported(self) -> Iterator[None]:
        """Turn a failure of the profiler into a warning, so that the run continues without a profile."""
        try:
            yield
        except (OSError, RuntimeError, ValueError) as error:
            self._say(f"warning: no profile could be written: {getattr(error, 'strerror', None) or error}")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._running:
            self._end()


def summary(directory: Path, steps: int) -> list[str]:
    """Summarize a trace: the share of time in which the devices are busy, and the longest operations.

    A device is busy while an XLA operation runs on it; an operation's time is the sum over the process's devices.

    Args:
        directory: Folder of the trace.
        steps: Number of traced steps.

    Returns:
        Lines for people.

    Raises:
        OSError: There is no readable trace.
    """
    # The profiler adds a folder per trace, so take the newest; the run directory's name may contain wildcards.
    files = sorted(glob.glob(f"{glob.escape(str(directory))}/**/{TRACE}", recursive=True), key=os.path.getmtime)
    if not files:
        raise OSError("jax.profiler left no trace")
    busy, ends = defaultdict[object, list[Interval]](list), list[float]()
    spent = defaultdict[tuple[object, object], float](float)
    with gzip.open(files[-1]) as file:
        events = json.load(file)["traceEvents"]
    for event in events:
        facts = event.get("args", {})
        if "hlo_op" in facts and event.get("dur", 0) > 0:
            interval = (event["ts"], event["ts"] + event["dur"])  # microseconds
            busy[event["pid"], facts.get("device_ordinal")].append(interval)
            spent[facts.get("hlo_module"), facts["hlo_op"]] += event["dur"]
            ends += interval
    if not ends:
        return ["profile: no operations of XLA are in the trace"]
    window, milliseconds = max(ends) - min(ends), 1e3 * steps
    share = sum(covered(intervals) for intervals in busy.values()) / (len(busy) * window)
    longest = sorted(spent.items(), key=lambda item: -item[1])[:_LONGEST]
    words = [f"{name} {time / milliseconds:.3g}" for (_, name), time in longest]
    number = f"{len(busy)} device{'s' * (len(busy) > 1)}"
    return [f"profile: {number} busy {share:.0%}; longest operations, ms a step over all of them: {', '.join(words)}"]
