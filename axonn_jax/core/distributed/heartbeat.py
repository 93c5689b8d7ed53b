"""Heartbeat of a run over MPI: a thread that ends a process that waits in vain, and names the missing one.

Twice a second every process sends its state and news to a few neighbours (`distributed.gossip`). The thread also
handles SIGTERM, with which launchers end the surviving processes of a run, unless the script has a handler for it.
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
from typing import TYPE_CHECKING

from axonn_jax.core.distributed.gossip import PATIENT, SIZE, Gossip, RankStatus, Report
from axonn_jax.core.grid import Grid

if TYPE_CHECKING:
    from mpi4py import MPI

PATIENCE_S, PATIENCE = 1200.0, 10
"""Longest time in a compilation or a save: the larger of these seconds and this multiple of `stall_timeout`.

The programs of a large stage, or a checkpoint on a slow disk, take minutes; after twenty minutes it is a hang.
"""
_BEAT_S = 0.5
LOST_S = 20.0
"""Silence in seconds after which processes on the same mesh end; soon after, gloo and jax would, without naming it."""
_PAUSE_S = 2.0
"""Seconds between two beats that mean this process was stopped, by Ctrl-Z, `scontrol suspend` or `docker pause`."""
_ENDING = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2})
"""Signals that end a run or announce its end; a script's handlers for them may save."""
_TERMINATED = 128 + signal.SIGTERM
_GRACE_S = 0.6  # more than a beat, so that every process looks for the dead one before this one is gone, too
_FAREWELL_S = 5.0
_PEER_FAILED = 255
"""Byte in the wake-up pipe for a `peer_failed` that returned True; smaller ones are the numbers of signals."""


class Heartbeat:
    """Heartbeat of a process, which ends the run if nothing makes progress for `stall_timeout` seconds.

    Args:
        status: Progress of this process, which the training thread updates.
        grid: The grid of the run.
        stall_timeout: Seconds; infinite for a run on one mesh, whose steps may take any time: only silence ends it.
        world: Communicator of all processes that nothing else uses; None for one process. Collective over it.
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
        self._sending: dict[int, MPI.Request] = {}
        self._record = bytearray(SIZE)
        self._wake_read = self._wake_write = -1
        self._previous_fd: int | None = None
        """Previous wake-up descriptor of signals; None if the heartbeat has not replaced it."""
        self._signalled = 0.0
        """Time of the last signal, which a handler of the script may still be working on."""
        self._resumed = 0.0
        """Time at which this process last continued after it was stopped; waiting times count from there."""
        self.farewell: Callable[[int], None] = lambda status: None
        """Called with the exit status before the heartbeat ends this process, for a few seconds at most."""
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="axonn-heartbeat", daemon=True)

    def start(self) -> None:
        """Start the thread; over MPI, if called from the main thread, also watch signals."""
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_write, False)
        self._take_signals()
        self._thread.start()

    def close(self) -> None:
        """Stop the thread and restore the handling of signals."""
        if self._wake_read < 0 or self._closed.is_set():
            return
        unused = self._leave_signals()
        self._closed.set()
        self._wake(0)
        self._thread.join(5)
        # Leave the pipe open if a signal or a stuck thread could still use it: its number may belong to a file later.
        if unused and not self._thread.is_alive():
            os.close(self._wake_read)
            os.close(self._wake_write)

    def peer_failed(self) -> bool:
        """Return True if a peer has ended or is silent; the heartbeat then ends this process with a line about it."""
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
            except Exception as error:  # a fault in the heartbeat must not end a healthy run
                _say(f"warning: the {self._run_name}'s heartbeat: {type(error).__name__}: {error}")

    def _check(self, now: float) -> None:
        """End this process if it has waited too long: since the last progress of any rank in a step, otherwise since
        its own."""
        # Rank 0 ends a beat later: it hosts jax's coordinator, without which jax would end the others with no reason.
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
        """Return True while this process may be slow: compiling, saving, or in a script's signal handler."""
        return self._status.phase in PATIENT or self._signalled > self._status.since

    def _take_signals(self) -> None:
        if self._comm is not None and threading.current_thread() is threading.main_thread():
            # Python runs a handler only when the main thread is back in Python; the wake-up descriptor is written
            # immediately, even if that thread waits in MPI or jax.
            self._previous_fd = signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
            if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
                signal.signal(signal.SIGTERM, self._terminate)

    def _leave_signals(self) -> bool:
        """Restore what was there; return True if nothing writes to this heartbeat's pipe any more."""
        if self._previous_fd is None:
            return True
        if threading.current_thread() is not threading.main_thread():
            return False
        # Somebody may have installed another descriptor or handler in the meantime; theirs stay. A heartbeat that began
        # later passes signals on to this one's descriptor, and restores it when it is closed.
        descriptor = signal.set_wakeup_fd(self._previous_fd)
        latest = descriptor == self._wake_write
        if not latest:
            signal.set_wakeup_fd(descriptor)
        if signal.getsignal(signal.SIGTERM) == self._terminate:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self._previous_fd = None
        return latest

    def _terminate(self, number: int, _: object) -> None:
        """Wake the thread on SIGTERM; it names the missing process before it ends this one."""
        self._wake(number)

    def _take_in(self, signals: bytes) -> None:
        """End this process if a peer has ended or SIGTERM has no other handler; forward signals to their handlers."""
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
        """Read the neighbours' reports and send this rank's."""
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
            # A neighbour that has not taken the last report gets no further one, so that messages do not pile up.
            if pending is None or pending.Test():
                self._sending[neighbour] = self._comm.Isend(record, neighbour)

    def _terminated(self) -> None:
        """Report who is missing, a dead process on this host or a silent one elsewhere, and end this process."""
        dead = self._ended_peers()
        waited = time.monotonic() - self._status.since
        cause = "; ".join(f"{self._name(rank)} is gone{self._last('; it', rank)}" for rank in dead)
        cause = cause or self._silent() or "told to end (SIGTERM)"
        # One line is enough: from the hosts that know the dead process, or else from rank 0.
        if dead or self._rank == 0:
            _say(f"error: {self._run_name} ended: {cause}; {self._story(waited)}")
        time.sleep(_GRACE_S)  # the others look for dead processes too, and must not find this one among them
        _end("", _TERMINATED, self.farewell)

    def _ended_peers(self) -> list[int]:
        """Return the ranks of processes on this host that have ended."""
        return [rank for rank in self._same_host if _has_ended(self._hosts[rank][1])]

    def _silent(self) -> str:
        return "; ".join(
            f"nothing heard of {self._name(rank)} for {seconds:.0f} s{self._last(': it', rank)}"
            for rank, seconds in self._gossip.silent(time.monotonic()).items()
        )

    def _last(self, lead: str, rank: int) -> str:
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
            # The state follows the process's name, which is in parentheses and may contain some itself.
            return stat.read().rsplit(")", 1)[1].split()[0] in "ZX"
    except FileNotFoundError:
        return os.path.exists("/proc/self/stat")  # without /proc nothing is known about any process
    except OSError:
        return False


def _say(line: str) -> None:
    with contextlib.suppress(OSError):
        os.write(sys.stderr.fileno(), (line + "\n").encode(errors="replace"))


def _end(line: str, status: int, farewell: Callable[[int], None]) -> None:
    if line:
        _say(line)
    # In a thread with a limit, since the farewell may wait for a service.
    last_words = threading.Thread(target=farewell, args=(status,), daemon=True)
    last_words.start()
    last_words.join(_FAREWELL_S)
    # An orderly exit would wait in MPI or jax for the missing process, as the main thread does.
    os._exit(status)
