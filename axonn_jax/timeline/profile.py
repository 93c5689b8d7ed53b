"""Profile of some steps of a run: traces of jax.profiler, and where the devices' time goes by them."""

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
from typing import Any, Self

import jax

from axonn_jax.timeline.spans import covered

FOLDER = "profile"
"""Folder of the traces in a run's directory; each process has its own in it."""
TRACE = "perfetto_trace.json.gz"
_LONGEST = 10  # operations shown
Interval = tuple[float, float]


class Profile:
    """Trace of the steps of `log.profile` by jax.profiler, in `profile/rank_N` of the run's directory.

    What is traced begins when all earlier steps have ended, and ends with the last step. A run that ends in between
    keeps what is there; one without a trace that goes on `behind` a step traces what is left of the steps.
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

    def before(self, step: int, last: Any) -> None:
        """Begin in front of the first of the steps, once the results `last` of the step before are there."""
        if self._steps and step == self._steps[0]:
            jax.block_until_ready(last)
            shutil.rmtree(self._folder, ignore_errors=True)
            options = jax.profiler.ProfileOptions()
            options.python_tracer_level = 0  # calls, as of a compilation, would leave operations no room
            with self._failures_reported():
                jax.profiler.start_trace(self._folder, create_perfetto_trace=True, profiler_options=options)
                self._running = True

    def after(self, step: int, results: Any) -> None:
        """End behind the last of the steps, once its `results` are there, and tell what the trace shows."""
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
        """Turn a failure of the profiler into a line: the run goes on without a profile."""
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
    """Return lines on a trace of so many steps: the share of time in which a device works, and the longest operations.

    A device works while an operation of XLA runs on it; an operation's time is that on all devices of the process.

    Raises:
        OSError: there is no trace that can be read.
    """
    files = sorted(glob.glob(f"{glob.escape(str(directory))}/**/{TRACE}", recursive=True), key=os.path.getmtime)
    if not files:
        raise OSError("jax.profiler left no trace")
    busy, ends = defaultdict[Any, list[Interval]](list), list[float]()
    spent = defaultdict[tuple[Any, Any], float](float)
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
