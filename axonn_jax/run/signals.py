"""Signals that end a run: the first one after a save, a second one immediately."""

import contextlib
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from axonn_jax.core.distributed.host_sync import HostSync

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
"""Signals that stop a run: SIGUSR1, the warning passed on by Slurm and mpirun; SIGHUP, a closed terminal."""
_SAME_S = 0.5  # seconds in which a repeated signal counts as the same: launchers send and forward it


def handled() -> list[signal.Signals]:
    """Return the signals to handle: all of `SIGNALS`, except SIGHUP if the process ignores it, as under ``nohup``."""
    return [n for n in SIGNALS if n != signal.SIGHUP or signal.getsignal(n) != signal.SIG_IGN]


class StopSignals:
    """Context in which signals stop a run; a thread notes them, so a second one works during a wait for devices.

    Args:
        sync: Host exchange between the processes.
        peer_failed: Called at SIGTERM, with which launchers end the surviving processes of a broken run. If it returns
            True, the processes cannot save together any more, and the signal is ignored here.
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
        # Python allows signal handlers to be set from the main thread only.
        if threading.current_thread() is threading.main_thread():
            # The handlers do nothing: Python runs them only between bytecodes of the main thread, which may be waiting
            # for devices. The wake-up descriptor is written immediately, and the thread reads it.
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
        """Return True if the run must end after this step; collective, called by all processes after each step.

        With several processes the answer is that of the previous step (`HostSync.any_flag_last_call`), so the run ends
        a step later, for which all processes must have a batch.

        Args:
            fault: Fault of this process's data, which ends the run too; empty without one.
        """
        return self._sync.any_flag_last_call(bool(self._number or fault))

    def number(self) -> int:
        """Return the signal that ended the run, the same on all processes, even on those that did not receive it."""
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
        # A shell repeats the SIGHUP that the kernel has sent, at any later time.
        elif number != signal.SIGHUP and now - self._at > _SAME_S:
            self._say(f"{signal.Signals(number).name} once more: ended without saving")
            os._exit(128 + number)  # an orderly exit would wait for devices and peers

    def _say(self, line: str) -> None:
        if self._sync.rank == 0:
            with contextlib.suppress(OSError):
                os.write(sys.stderr.fileno(), (line + "\n").encode())
