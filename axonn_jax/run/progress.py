"""Progress of a run on standard error: a live line on a terminal, plain lines everywhere else."""

import statistics
import sys
import time
from collections import deque
from types import TracebackType
from typing import Self

from axonn_jax.core.errors import without_credentials
from axonn_jax.core.terminal import duration, printable, redraws, say, unfailing

_WARM_UP = 2  # the first steps compile, so they would spoil the estimate of the time left
_RECENT = 25  # steps in the estimate, by their median: the odd step that saved or evaluated does not shift it


class Progress:
    """Display of step, loss, speed and remaining time on standard error.

    On a terminal it is a live line. Elsewhere (a log file, mpirun) it is a plain line at the first and last step, and
    at most one every `interval` seconds in between. Closing the terminal or the pipe does not end the run.

    Args:
        steps: Number of steps of the run.
        shown: False on all ranks but 0, which print nothing.
        interval: Minimum seconds between plain lines.
    """

    def __init__(self, steps: int, *, shown: bool = True, interval: float = 5.0):
        self._steps, self._shown, self._interval = steps, shown, interval
        self._last_line, self._start = -interval, time.monotonic()
        self._shown_once = False
        self._seen, self._recent = 0, deque[float](maxlen=_RECENT)
        self._bar = None
        if shown and redraws(sys.stderr):
            # Imported only for a terminal: batch jobs never need it.
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
            from rich.progress import Progress as Bar

            columns = (
                BarColumn(24),
                MofNCompleteColumn(),
                TextColumn("{task.description}"),
                TimeElapsedColumn(),
            )
            self._bar = Bar(*columns, console=Console(file=unfailing()))
            self._task = self._bar.add_task("compiling the step", total=steps)

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def say(self, text: str) -> None:
        """Print a line apart from the live one."""
        if self._bar is not None:
            # Text may come from a file of someone else: no escape codes, and no markup of rich's.
            shown = printable(without_credentials(text))
            self._bar.console.print(shown, highlight=False, markup=False, soft_wrap=True)
        elif self._shown:
            say(text)

    def update(
        self,
        step: int,
        loss: float,
        tokens_per_s: float,
        step_s: float,
        saved: tuple[int, float] | None = None,
        skipped: int = 0,
    ) -> None:
        """Show a finished step.

        Args:
            step: The step's number.
            loss: Its training loss.
            tokens_per_s: Tokens per second of the whole run.
            step_s: Seconds of the step.
            saved: Step and `time.monotonic` of the last checkpoint, for its age; None without one.
            skipped: Number of steps so far that changed nothing, because of infinite or NaN values.
        """
        self._seen += 1
        if self._seen > _WARM_UP:
            self._recent.append(step_s)
        text = f"loss {loss:.4f}  {tokens_per_s:,.0f} tokens/s"
        if len(self._recent) >= _WARM_UP:
            text += f"  {duration((self._steps - step) * statistics.median(self._recent))} left"
        if skipped:
            text += f"  {skipped} skipped"
        if saved is not None:
            text += f"  checkpoint {saved[0]}, {duration(time.monotonic() - saved[1])} old"
        if self._bar is not None:
            self._bar.update(self._task, completed=step, description=text)
            return
        now = time.monotonic()
        if not self._shown_once or step == self._steps or now - self._last_line >= self._interval:
            self._last_line, self._shown_once = now, True
            self.say(f"step {step}/{self._steps}  {text}")
