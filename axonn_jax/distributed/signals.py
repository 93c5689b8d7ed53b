"""Signals that end a run: the first after a save, a second at once."""

import contextlib
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from axonn_jax.distributed.host_sync import HostSync

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
"""Signals that stop a run: SIGUSR1, the warning passed on by Slurm and mpirun; SIGHUP, a closed terminal."""
_SAME_S = 0.5  # launchers repeat a signal that they have also passed on


def handled() -> list[signal.Signals]:
    """Signals of `SIGNALS` to act upon: not SIGHUP where the process was started to ignore it, as by ``nohup``."""
    return [n for n in SIGNALS if n != signal.SIGHUP or signal.getsignal(n) != signal.SIG_IGN]


class StopSignals:
    """Signals that stop a run, noted from a thread, so a second one works during a wait for devices.

    `peer_failed` is asked at SIGTERM, with which launchers end the rest of a broken run: if True there is nothing to
    save together, and this class does nothing.
    """

    def __init__(self, sync: HostSync, peer_failed: Callable[[], bool]):
        self._sync, self._peer_failed = sync, peer_failed
        self._number, self._at = 0, 0.0
        self._handlers: dict[int, Any] = {}
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="axonn-stop", daemon=True)

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is threading.main_thread():  # only there can signals be taken
            for number in handled():
                self._handlers[number] = signal.signal(number, lambda *_: None)
            self._previous_fd = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._handlers:
            signal.set_wakeup_fd(self._previous_fd)
            for number, handler in self._handlers.items():
                signal.signal(number, handler)
            self._closed.set()
            with contextlib.suppress(OSError):
                os.write(self._write, b"\0")
            self._thread.join(5)

    def requested(self, fault: str) -> bool:
        """True if the run shall end after this step; the same on every process, and asked by all after each step.

        A fault here ends it too, on several processes a step later, for which all must have a batch.
        """
        return self._sync.any_before(bool(self._number or fault))

    def number(self) -> int:
        """Return the signal that ended the run, agreed by all processes, even by those without the signal."""
        return int(max(self._sync.gather_number(self._number)))

    def _listen(self) -> None:
        while not self._closed.is_set():
            select.select([self._read], [], [])
            for number in os.read(self._read, 64):
                if number in SIGNALS and not self._closed.is_set():
                    self._note(number)

    def _note(self, number: int) -> None:
        now = time.monotonic()
        if not self._number:
            if number == signal.SIGTERM and self._peer_failed():
                return
            self._number, self._at = number, now
            self._say(f"{signal.Signals(number).name}: saving after this step, then ending; a second one ends at once")
        elif number != signal.SIGHUP and now - self._at > _SAME_S:  # a shell repeats the kernel's SIGHUP
            self._say(f"{signal.Signals(number).name} once more: ended without saving")
            os._exit(128 + number)

    def _say(self, line: str) -> None:
        if self._sync.rank == 0:
            with contextlib.suppress(OSError):
                os.write(sys.stderr.fileno(), (line + "\n").encode())
