"""Signs of life of a long command on standard error."""

import threading
import time
from types import TracebackType
from typing import Self, TextIO

from axonn_jax.terminal import unfailing
from axonn_jax.train.progress import duration


class Ticker:
    """What a command is doing: on a terminal a live line after two seconds, elsewhere a line every ten."""

    def __init__(
        self, what: str, total: int = 0, *, stream: TextIO | None = None, first: float = 0.0, every: float = 0.0
    ):
        self._stream = unfailing() if stream is None else stream
        self._live = self._stream.isatty()
        self._first, self._every = first or (2.0 if self._live else 10.0), every or (0.5 if self._live else 10.0)
        self._over, self._thread = threading.Event(), threading.Thread(target=self._watch, daemon=True)
        self._start, self._shown = time.monotonic(), False
        self.now(what, total)

    def now(self, what: str, total: int = 0) -> None:
        """Begins something else, of `total` tasks if that is known."""
        self._what, self._total, self._done = what, total, 0

    def told(self, done: int) -> None:
        """Takes the number of tasks that are done."""
        self._done = done

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()
        if self._live and self._shown:
            print("\r\x1b[K", end="", file=self._stream, flush=True)

    def _watch(self) -> None:
        wait = self._first
        while not self._over.wait(wait):
            line = f"{self._what}, {duration(time.monotonic() - self._start)}"
            if self._total:
                line += f": {self._done:,} of {self._total:,} tasks"
            ends = {"end": ""} if self._live else {"end": "\n"}
            print(("\r\x1b[K" if self._live else "") + line, **ends, file=self._stream, flush=True)
            wait, self._shown = self._every, True
