"""Watches a pipelined run from a thread of its own: ends a process that waits in vain, and says for whom.

Every process sends its neighbours a few lines about itself and about whom it has heard of, twice a second; so each
knows what every other last did. The thread also learns of SIGTERM, with which launchers end what is left of a run.
"""

import contextlib
import json
import os
import select
import signal
import socket
import sys
import threading
import time
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from axonn_jax.grid import Grid
from axonn_jax.pipeline.status import PATIENT, Status, sender
from axonn_jax.schedule.tasks import Layout

if TYPE_CHECKING:
    from mpi4py import MPI

_BEAT_S = 0.5
_SILENT_S = 4.0
"""A living process is heard of every half second per neighbour on the way; this long without a word is suspicious."""
_TERMINATED = 128 + signal.SIGTERM
_GRACE_S = 0.6


class Watch:
    """The watch of a run of one process: it ends the run when nothing has moved for `stall_timeout` seconds."""

    def __init__(self, status: Status, layout: Layout, stall_timeout: float):
        self._status, self._layout, self._timeout = status, layout, stall_timeout
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_write, False)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="axonn-watch", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def close(self) -> None:
        """Ends the thread and the attention to signals."""
        if not self._closed.is_set():
            self._closed.set()
            with contextlib.suppress(OSError):
                os.write(self._wake_write, b"\0")
            self._thread.join(5)

    def lost(self) -> bool:
        """Whether a peer is known to have gone or is silent; then this process ends, saying which."""
        return False

    def _run(self) -> None:
        while not self._closed.is_set():
            ready, _, _ = select.select([self._wake_read], [], [], _BEAT_S)
            if self._closed.is_set():
                return
            signals = os.read(self._wake_read, 64) if ready else b""
            try:
                self._beat()
                if signal.SIGTERM in signals:
                    self._terminated()
                self._check()
            except Exception as error:  # a watch that fails must not take a healthy run with it
                _say(f"warning: the pipeline's watch: {type(error).__name__}: {error}")

    def _check(self) -> None:
        waited = time.monotonic() - self._status.since
        if self._status.phase == "in a step" and waited > self._timeout and not self._patience():
            _end(f"error: pipeline stalled: {self._story(waited)} (pipeline.stall_timeout = {self._timeout:g})", 1)

    def _beat(self) -> None:
        pass

    def _patience(self) -> bool:
        """Whether somebody is known to be at something that may take long."""
        return False

    def _terminated(self) -> None:
        pass

    def _story(self, waited: float) -> str:
        status = self._status
        return (
            f"step {status.step}: this process has finished {status.finished} and {status.describe(self._layout)}, "
            f"for {waited:.1f} s"
        )


@dataclass
class _Heard:
    """What is known of a process."""

    beat: int = 0
    finished: str = "nothing yet"
    phase: str = "compiling"
    does: str = "has not been heard of"
    step: int = 0
    age: float = 0.0
    """Seconds it has been doing that, by its own clock, when it said so."""
    at: float = field(default_factory=time.monotonic)
    """When the last news of it came, by this process's clock."""


class WatchOverMpi(Watch):
    """The watch of one of several processes; collective over `world`, which it alone uses."""

    def __init__(self, status: Status, layout: Layout, stall_timeout: float, world: "MPI.Intracomm", grid: Grid):
        super().__init__(status, layout, stall_timeout)
        self._comm, self._rank, self._per_stage = world, grid.rank, grid.stage_processes
        self._hosts = world.allgather((socket.gethostname(), os.getpid()))
        self._heard = {rank: _Heard() for rank in range(grid.size) if rank != self._rank}
        place, within = divmod(self._rank, self._per_stage)
        ring = [place * self._per_stage + (within + d) % self._per_stage for d in (-1, 1)]
        line = [(place + d) * self._per_stage + within for d in (-1, 1) if 0 <= place + d < layout.pipe]
        self._neighbours = sorted({*ring, *line} - {self._rank})
        self._sending: dict[int, Any] = {}
        self._beats = 0
        self._before: Any = None

    def start(self) -> None:
        """Starts the thread; from the main thread it also takes note of SIGTERM."""
        if threading.current_thread() is threading.main_thread():
            # A handler runs only when the main thread is in Python; the wake-up descriptor is written at once.
            self._before = signal.signal(signal.SIGTERM, lambda *_: None)
            signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        super().start()

    def close(self) -> None:
        """Ends the thread and the attention to signals."""
        if self._before is not None and threading.current_thread() is threading.main_thread():
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGTERM, self._before)
            self._before = None
        super().close()

    def lost(self) -> bool:  # noqa: D102
        now = time.monotonic()
        silent = any(h.phase not in PATIENT and now - h.at > _SILENT_S for h in self._heard.values())
        gone = silent or any(self._is_gone(rank) for rank in self._heard)
        if gone:
            with contextlib.suppress(OSError):
                os.write(self._wake_write, bytes([signal.SIGTERM]))
        return gone

    def _beat(self) -> None:
        self._beats += 1
        status, now = self._status, time.monotonic()
        own = _Heard(
            self._beats, status.finished, status.phase, status.describe(self._layout), status.step, now - status.since
        )
        news = {self._rank: own, **{r: replace(h, age=h.age + now - h.at) for r, h in self._heard.items() if h.beat}}
        payload = json.dumps({rank: {k: v for k, v in asdict(h).items() if k != "at"} for rank, h in news.items()})
        for neighbour in self._neighbours:
            pending = self._sending.get(neighbour)
            if pending is None or pending.Test():  # one that does not listen gets no second message
                self._sending[neighbour] = self._comm.isend(payload, neighbour)
        while (message := self._comm.improbe()) is not None:
            for name, fields in json.loads(message.recv()).items():
                rank = int(name)
                if rank != self._rank and fields["beat"] > self._heard[rank].beat:
                    self._heard[rank] = _Heard(**fields)

    def _patience(self) -> bool:
        now = time.monotonic()
        return any(h.phase in PATIENT and now - h.at < _SILENT_S for h in self._heard.values())

    def _terminated(self) -> None:
        """Tells the survivors' side of a death. On this host it is known who is dead; elsewhere, who is silent."""
        dead = [rank for rank in self._heard if self._is_gone(rank)]
        waited = time.monotonic() - self._status.since
        cause = "; ".join(self._gone(rank) for rank in dead) or self._silent() or "told to end (SIGTERM)"
        if dead or self._rank == 0:
            _say(f"error: pipeline ended: {cause}; {self._story(waited)}")
        time.sleep(_GRACE_S)  # the others look for the dead too, and must not find this process among them
        _end("", _TERMINATED)

    def _is_gone(self, rank: int) -> bool:
        host, pid = self._hosts[rank]
        if host != self._hosts[self._rank][0]:
            return False
        try:
            with open(f"/proc/{pid}/stat") as stat:
                return stat.read().rsplit(")", 1)[1].split()[0] in "ZX"
        except FileNotFoundError:
            return os.path.exists("/proc/self/stat")
        except OSError:
            return False

    def _gone(self, rank: int) -> str:
        heard = self._heard[rank]
        return f"{self._name(rank)} is gone; it had finished {heard.finished} in step {heard.step} and {heard.does}"

    def _silent(self) -> str:
        now = time.monotonic()
        silent = {rank: now - heard.at for rank, heard in self._heard.items() if now - heard.at > _SILENT_S}
        # Beyond a silent process everybody may be silent; the one nearest to this process is the one to name.
        told = sorted(silent, key=lambda rank: abs(rank - self._rank))[:2]
        return "; ".join(
            f"nothing heard of {self._name(rank)} for {silent[rank]:.0f} s: it had finished "
            f"{self._heard[rank].finished} in step {self._heard[rank].step} and {self._heard[rank].does}"
            for rank in told
        )

    def _story(self, waited: float) -> str:
        status, place = self._status, self._rank // self._per_stage
        whom = ""
        if status.waiting and not status.running:
            rank = sender(status.waiting[0], self._layout) * self._per_stage + self._rank % self._per_stage
            heard = self._heard.get(rank)
            if heard is not None:
                ago = time.monotonic() - heard.at
                whom = f" ({self._name(rank)}: finished {heard.finished}, {heard.does}, heard {ago:.1f} s ago)"
        silent = self._silent()
        return (
            f"step {status.step}: rank {self._rank} (place {place} of the pipe) has finished {status.finished} and "
            f"{status.describe(self._layout)}{whom}, for {waited:.1f} s" + (f"; {silent}" if silent else "")
        )

    def _name(self, rank: int) -> str:
        return f"rank {rank} (place {rank // self._per_stage} of the pipe, host {self._hosts[rank][0]})"


def _say(line: str) -> None:
    with contextlib.suppress(OSError):
        os.write(sys.stderr.fileno(), (line + "\n").encode(errors="replace"))


def _end(line: str, status: int) -> None:
    """Leaves at once: an orderly exit would wait in MPI or jax for the very process that is missing."""
    if line:
        _say(line)
    os._exit(status)
