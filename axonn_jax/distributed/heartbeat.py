"""Heartbeat of a run over MPI: a thread that ends a process waiting in vain, and names the missing one.

Every process tells a few neighbours its state and news, twice a second (`distributed.gossip`). The thread also handles
SIGTERM, with which launchers end the rest of a run, unless the script has its own handler.
"""

import contextlib
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from axonn_jax.distributed.gossip import PATIENT, SIZE, Gossip, RankStatus, Report
from axonn_jax.grid import Grid

if TYPE_CHECKING:
    from mpi4py import MPI

PATIENCE_S, PATIENCE = 1200.0, 10
"""Longest silence while compiling or saving: the larger of these seconds and so many times `stall_timeout`.

One stage's programs or one checkpoint take minutes where stages are large and disks slow; after twenty it is a hang.
"""
_BEAT_S = 0.5
LOST_S = 20.0
"""Silence after which a process ends whose mesh the silent one shares: soon gloo and jax would, and not say who."""
_PAUSE_S = 2.0
"""Time between two beats from which this process was stopped, as by Ctrl-Z, `scontrol suspend` or `docker pause`."""
_ENDING = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2})
"""Signals that end a run or warn of the end: a script's handlers of these may save."""
_TERMINATED = 128 + signal.SIGTERM
_GRACE_S = 0.6
_FAREWELL_S = 5.0
_PEER_FAILED = 255
"""Byte in the wake-up pipe, beside the numbers of signals, for a `peer_failed` answered with yes."""


class Heartbeat:
    """Heartbeat of a process, which ends the run when nothing has moved for `stall_timeout` seconds.

    With several processes collective over `world`, which nothing else uses; reports come from the others. Of a run of
    one mesh, whose steps take what they take, `stall_timeout` is infinite: only silence ends it.
    """

    def __init__(
        self,
        status: RankStatus,
        grid: Grid,
        stall_timeout: float,
        world: "MPI.Comm | None" = None,
    ):
        self._status, self._timeout, self._comm = status, stall_timeout, world
        rank, size, self._per_stage, self._pipe = grid.rank, grid.size, grid.stage_processes, grid.shape.pipe
        local = (socket.gethostname(), os.getpid())
        self._hosts: list[tuple[str, int]] = [local] if world is None else world.allgather(local)
        hostname = self._hosts[rank][0]
        self._rank, self._run_name = rank, "pipeline" if self._pipe > 1 else "run"
        self._same_host = [peer for peer, (host, _) in enumerate(self._hosts) if host == hostname and peer != rank]
        self._gossip = Gossip(rank, size, self._per_stage, time.monotonic(), _BEAT_S)
        self._sending: dict[int, Any] = {}
        self._record = bytearray(SIZE)
        self._wake_read = self._wake_write = -1
        self._previous_fd: int | None = None
        """Previous wake-up descriptor of signals; None where none was taken."""
        self._signalled = 0.0
        """Time of a signal still handled by the script, perhaps."""
        self._resumed = 0.0
        """Time at which this process last went on after it was stopped; its waiting counts from there."""
        self.farewell: Callable[[int], None] = lambda status: None
        """Function that is told the exit status before this process is ended from here, and has a few seconds."""
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="axonn-heartbeat", daemon=True)

    def start(self) -> None:
        """Start the thread; over MPI, from the main thread, also note signals."""
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_write, False)
        self._take_signals()
        self._thread.start()

    def close(self) -> None:
        """End the thread and the attention to signals."""
        if self._wake_read < 0 or self._closed.is_set():
            return
        self._leave_signals()
        self._closed.set()
        self._wake(0)
        self._thread.join(5)
        if self._previous_fd is None and not self._thread.is_alive():
            os.close(self._wake_read)
            os.close(self._wake_write)

    def peer_failed(self) -> bool:
        """Return True if a peer is known to have gone or is silent; then this process ends, saying which."""
        failed = self._gossip.peer_failed(time.monotonic()) or bool(self._ended_peers())
        if failed:
            self._wake(_PEER_FAILED)
        return failed

    def _wake(self, byte: int) -> None:
        with contextlib.suppress(OSError):
            os.write(self._wake_write, bytes([byte]))

    def _run(self) -> None:
        wake = select.poll()
        wake.register(self._wake_read, select.POLLIN)
        last_beat = time.monotonic()
        while not self._closed.is_set():
            ready = wake.poll(_BEAT_S * 1e3)
            if self._closed.is_set():
                return
            now = time.monotonic()
            if now - last_beat > _PAUSE_S:
                self._resumed = now
                self._gossip.resumed(now)
            last_beat = now
            signals = os.read(self._wake_read, 64) if ready else b""
            try:
                self._beat()
                self._take_in(signals)
                self._check(now)
            except Exception as error:  # a heartbeat that fails must not take a healthy run with it
                _say(f"warning: the {self._run_name}'s heartbeat: {type(error).__name__}: {error}")

    def _check(self, now: float) -> None:
        """End a process that has waited too long at the time of a beat: in a step since the last progress anywhere,
        else since its own progress."""
        # Rank 0 last, as with its coordinator jax would end the others, and not say for whom either.
        if self._per_stage > 1 and self._gossip.longest_silence(now) > LOST_S + 2 * _BEAT_S * (self._rank == 0):
            _end(
                f"error: {self._run_name} ended: {self._silent()}; {self._story(now - self._status.since)}",
                1,
                self.farewell,
            )
        if self._patient():
            quiet = now - max(self._status.since, self._signalled, self._resumed)
            allowed, setting = max(PATIENCE_S, PATIENCE * self._timeout), "the longest time without a sign"
        elif self._status.phase == "in a step":
            quiet = now - max(self._status.since, self._gossip.moved, self._resumed)
            allowed, setting = self._timeout, "pipeline.stall_timeout"
        else:
            return
        if quiet > allowed:
            story = "; ".join(filter(None, (self._story(now - self._status.since), self._silent())))
            _end(f"error: pipeline stalled: {story} ({setting} = {allowed:g})", 1, self.farewell)

    def _patient(self) -> bool:
        """Return True if this process does something slow: a handler of signals, too, may save."""
        return self._status.phase in PATIENT or self._signalled > self._status.since

    def _take_signals(self) -> None:
        if self._comm is not None and threading.current_thread() is threading.main_thread():
            # A handler runs only when the main thread is in Python; the wake-up descriptor is written at once.
            self._previous_fd = signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
            if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
                signal.signal(signal.SIGTERM, self._terminate)

    def _leave_signals(self) -> None:
        """Restore the signal handling, except for handlers set meanwhile."""
        if self._previous_fd is not None and threading.current_thread() is threading.main_thread():
            descriptor = signal.set_wakeup_fd(self._previous_fd)
            if descriptor != self._wake_write:
                signal.set_wakeup_fd(descriptor)
            if signal.getsignal(signal.SIGTERM) == self._terminate:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
            self._previous_fd = None

    def _terminate(self, number: int, _: object) -> None:
        """Handle SIGTERM: wake the thread, which names the missing process before it ends this one."""
        self._wake(number)

    def _take_in(self, signals: bytes) -> None:
        """End this process where a peer has gone or nobody else handles SIGTERM; a handler has its time."""
        numbers = signals.replace(bytes([_PEER_FAILED]), b"")
        if numbers and self._previous_fd not in (None, -1):
            with contextlib.suppress(OSError):
                os.write(self._previous_fd, numbers)
        unhandled = signal.SIGTERM in signals and signal.getsignal(signal.SIGTERM) == self._terminate
        if not _ENDING.isdisjoint(signals):
            self._signalled = time.monotonic()
        handling = self._signalled > self._status.since
        if _PEER_FAILED in signals or unhandled or (handling and self._ended_peers()):
            self._terminated()

    def _beat(self) -> None:
        """Read the neighbours' reports and send this rank's own."""
        if self._comm is None:
            return
        now = time.monotonic()
        while (message := self._comm.Improbe()) is not None:
            message.Recv(self._record)
            self._gossip.hear(self._record, now)
        status = self._status
        report = Report(status.phase, status.step, status.finished, status.describe())
        record = self._gossip.tell(report, now if self._patient() else status.since, now)
        for neighbour in self._gossip.neighbours:
            pending = self._sending.get(neighbour)
            if pending is None or pending.Test():  # one that does not listen gets no second message
                self._sending[neighbour] = self._comm.Isend(record, neighbour)

    def _terminated(self) -> None:
        """Print the survivors' account of a death: on this host the dead process, elsewhere the silent one."""
        dead = self._ended_peers()
        waited = time.monotonic() - self._status.since
        cause = "; ".join(f"{self._name(rank)} is gone{self._last('; it', rank)}" for rank in dead)
        cause = cause or self._silent() or "told to end (SIGTERM)"
        if dead or self._rank == 0:
            _say(f"error: {self._run_name} ended: {cause}; {self._story(waited)}")
        time.sleep(_GRACE_S)  # the others look for the dead too, and must not find this process among them
        _end("", _TERMINATED, self.farewell)

    def _ended_peers(self) -> list[int]:
        """Return the ended processes of this host."""
        return [rank for rank in self._same_host if _has_ended(self._hosts[rank][1])]

    def _silent(self) -> str:
        return "; ".join(
            f"nothing heard of {self._name(rank)} for {seconds:.0f} s{self._last(': it', rank)}"
            for rank, seconds in self._gossip.silent(time.monotonic()).items()
        )

    def _last(self, lead: str, rank: int) -> str:
        """Return a phrase about a process's last report, if the process reports to this one."""
        heard = self._gossip.report(rank)
        return f"{lead} had finished {heard[0].finished} in step {heard[0].step} and {heard[0].does}" if heard else ""

    def _story(self, waited: float) -> str:
        status, who = self._status, "this process"
        if self._comm is not None:
            who = f"rank {self._rank}{f' ({place})' if (place := self._place(self._rank)) else ''}"
        whom = ""
        if status.waiting is not None and not status.running:
            rank = status.waiting.pp_rank * self._per_stage + self._rank % self._per_stage
            if heard := self._gossip.report(rank):
                ago = time.monotonic() - heard[1]
                whom = f" ({self._name(rank)}: finished {heard[0].finished}, {heard[0].does}, heard {ago:.1f} s ago)"
        does = f"{status.describe()}{whom}, for {waited:.1f} s"
        return f"step {status.step}: {who} has finished {status.finished} and {does}"

    def _name(self, rank: int) -> str:
        place = self._place(rank)
        return f"rank {rank} ({f'{place}, ' if place else ''}host {self._hosts[rank][0]})"

    def _place(self, rank: int) -> str:
        return f"place {rank // self._per_stage} of the pipe" if self._pipe > 1 else ""


def _has_ended(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] in "ZX"
    except FileNotFoundError:
        return os.path.exists("/proc/self/stat")
    except OSError:
        return False


def _say(line: str) -> None:
    with contextlib.suppress(OSError):
        os.write(sys.stderr.fileno(), (line + "\n").encode(errors="replace"))


def _end(line: str, status: int, farewell: Callable[[int], None]) -> None:
    """Leave at once: an orderly exit would wait in MPI or jax for the missing process, as the main thread does."""
    if line:
        _say(line)
    last_words = threading.Thread(target=farewell, args=(status,), daemon=True)  # it may wait for a service
    last_words.start()
    last_words.join(_FAREWELL_S)
    os._exit(status)
