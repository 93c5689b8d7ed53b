"""Gossip protocol of the heartbeat: a report of fixed size to a few neighbours at every beat.

Neighbours exchange activations with the process, or are adjacent to it in a tree over all ranks. News for everyone
travels along the tree: the time of the last progress anywhere, and the silent ranks. This module uses neither MPI nor
the clock; callers pass the time in.
"""

import struct
import time
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, get_args

Phase = Literal["compiling", "between steps", "in a step", "saving"]

PHASES: tuple[Phase, ...] = get_args(Phase)
PATIENT: frozenset[Phase] = frozenset({"compiling", "saving"})
"""Phases that may take longer than the stall timeout, though not forever (`heartbeat.PATIENCE`)."""

SILENT_S = 4.0
"""Seconds without a report after which a neighbour is suspicious; a living one reports every half second."""
_CHILDREN = 8  # of a rank in the tree
_ACCUSED_SLOTS = 2
"""Number of silent ranks in a report, and the most in an error line."""
_NOBODY = -1
_FIXED = struct.Struct("<qqqB24s120s")
_ACCUSED = struct.Struct("<qqd")
SIZE = _FIXED.size + _ACCUSED_SLOTS * _ACCUSED.size
"""Size of a report in bytes."""


class Awaited(NamedTuple):
    """A message that a rank needs before it can start any task."""

    name: str
    """Phrase for people: the message and its sender."""
    pp_rank: int
    """Pipe rank that sends it."""


@dataclass
class RankStatus:
    """Progress of a rank: the last finished task, and the current or awaited one."""

    phase: Phase = "compiling"
    step: int = 0
    finished: str = "nothing yet"
    """Last finished task."""
    running: str = ""
    """Task on the device, or whatever else the rank is waiting for."""
    waiting: Awaited | None = None
    """Message that every remaining task needs."""
    since: float = field(default_factory=time.monotonic)
    """Time of the last change, on the monotonic clock."""

    def now(self, phase: Phase | None = None, *, running: str = "", waiting: Awaited | None = None) -> None:
        """Record progress: the next phase, if it changes, and the running task or the awaited message."""
        self.running, self.waiting = running, waiting
        if phase is not None:
            self.phase = phase
        self.since = time.monotonic()

    def describe(self) -> str:
        """Return a phrase for people about the rank's work, or the message that it waits for."""
        if self.phase != "in a step":
            return f"is {self.phase}"
        if self.running:
            return f"is at {self.running}"
        if self.waiting is not None:
            return f"waits for {self.waiting.name}"
        return "is between two tasks"


class Report(NamedTuple):
    """Report of a process about itself."""

    phase: Phase = "compiling"
    step: int = 0
    finished: str = "nothing yet"
    does: str = "has sent no heartbeat"


class _Accused(NamedTuple):
    times: int
    """Number of reports in which a neighbour has accused the rank."""
    since: float
    """Time of the silent rank's last report."""
    confirmed: float
    """Time at which the accusation was last confirmed."""


class Gossip:
    """Gossip of one process; all times are seconds of this process's clock.

    Args:
        rank: This process's rank.
        size: Number of processes.
        per_stage: Processes of a pipeline stage.
        now: The current time.
        beat: Seconds between two reports.
    """

    # Clocks differ between hosts, and reports wait to be read. News therefore carries a count instead of a time. The
    # count grows only while the news is true, so a higher count was confirmed at most one beat per hop ago.

    def __init__(self, rank: int, size: int, per_stage: int, now: float, beat: float):
        self._rank = rank
        self.neighbours = _neighbours(rank, size, per_stage)
        """Ranks that get every report."""
        self.moved = now
        """Time of the last known progress on any rank."""
        self._moves = 0
        self._heard = dict.fromkeys(self.neighbours, (Report(), now))
        self._accused: dict[int, _Accused] = {}
        depth, reach = 1, 1 + _CHILDREN
        while reach < size:
            depth, reach = depth + 1, reach * _CHILDREN + 1
        # Two ranks are at most 2 * depth hops apart, and a hop takes up to a beat: later than this, news is void.
        self._fresh_s = SILENT_S + 2 * depth * beat

    def tell(self, report: Report, moved: float, now: float) -> bytes:
        """Return the bytes to send to the neighbours at this beat.

        Args:
            report: This process's report.
            moved: Time of this process's last progress.
            now: The current time.
        """
        if moved > self.moved:
            self.moved, self._moves = moved, self._moves + 1
        for rank, at in self._deaf(now):
            accusation = self._accused.get(rank)
            self._accused[rank] = _Accused(accusation.times + 1 if accusation else 1, at, now)
        texts = (report.finished.encode(), report.does.encode())
        record = _FIXED.pack(self._rank, report.step, self._moves, PHASES.index(report.phase), *texts)
        accused = [(rank, news.times, now - news.since) for rank, news in self._news(now)]
        for news in [*accused, *[(_NOBODY, 0, 0.0)] * _ACCUSED_SLOTS][:_ACCUSED_SLOTS]:
            record += _ACCUSED.pack(*news)
        return record

    def hear(self, record: bytes | bytearray, now: float) -> None:
        """Process the bytes that a neighbour has sent."""
        sender, step, moves, phase, finished, does = _FIXED.unpack_from(record)
        self._heard[sender] = Report(PHASES[phase], step, _text(finished), _text(does)), now
        if moves > self._moves:
            self.moved, self._moves = now, moves
        for index in range(_ACCUSED_SLOTS):
            rank, times, silent = _ACCUSED.unpack_from(record, _FIXED.size + index * _ACCUSED.size)
            previous = self._accused.get(rank)
            if rank != _NOBODY and (previous is None or times > previous.times):
                self._accused[rank] = _Accused(times, now - silent, now)

    def resumed(self, now: float) -> None:
        """Forget all silence, after this process was stopped and continued."""
        # The neighbours may have been stopped as well, as by a scheduler that suspends a job.
        self._heard = {rank: (report, now) for rank, (report, _) in self._heard.items()}
        self._accused.clear()

    def report(self, rank: int) -> tuple[Report, float] | None:
        """Return a neighbour's last report and its time; None for a rank that is not a neighbour."""
        return self._heard.get(rank)

    def silent(self, now: float) -> dict[int, float]:
        """Return the seconds since the last report of overdue ranks: neighbours first, then the nearest ranks."""
        silent = {rank: now - at for rank, (_, at) in self._heard.items() if now - at > SILENT_S}
        for rank, news in sorted(self._news(now), key=lambda item: abs(item[0] - self._rank)):
            silent.setdefault(rank, now - news.since)
        return dict(list(silent.items())[:_ACCUSED_SLOTS])

    def peer_failed(self, now: float) -> bool:
        """Return True if a process is silent for no known reason; compiling may block all of a process's threads."""
        return bool(self._deaf(now) or self._news(now))

    def longest_silence(self, now: float) -> float:
        """Return the longest silence of a process in seconds, for no known reason; 0.0 if all are heard of."""
        heard = [*(at for _, at in self._deaf(now)), *(news.since for _, news in self._news(now))]
        return now - min(heard, default=now)

    def _deaf(self, now: float) -> list[tuple[int, float]]:
        """Return the silent neighbours and the times of their last reports, except those in a patient phase."""
        return [
            (rank, at)
            for rank, (report, at) in self._heard.items()
            if now - at > SILENT_S and report.phase not in PATIENT
        ]

    def _news(self, now: float) -> list[tuple[int, _Accused]]:
        """Return valid accusations, newest first."""
        # A rank judges its neighbours by itself: what others say about them may be older than their last report.
        silent_neighbours = {rank for rank, _ in self._deaf(now)}
        holds = [
            (rank, news)
            for rank, news in self._accused.items()
            if now - news.confirmed < self._fresh_s
            and (rank in silent_neighbours or rank not in self._heard)
            and rank != self._rank
        ]
        return sorted(holds, key=lambda item: -item[1].confirmed)


def _neighbours(rank: int, size: int, per_stage: int) -> tuple[int, ...]:
    """Return a rank's neighbours on the pipe, and its parent and children in the tree."""
    # The pipe is a ring if ranks have several stages; for simplicity its ends are always neighbours.
    pipe_neighbours = {(rank - per_stage) % size, (rank + per_stage) % size}
    children = range(_CHILDREN * rank + 1, min(_CHILDREN * rank + _CHILDREN + 1, size))
    parent = {(rank - 1) // _CHILDREN} if rank else set()
    return tuple(sorted((pipe_neighbours | parent | set(children)) - {rank}))


def _text(field: bytes) -> str:
    return field.rstrip(b"\0").decode(errors="ignore")
