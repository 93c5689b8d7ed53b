"""News of the processes of a pipeline: a report of fixed size to a few neighbours at every beat.

Neighbours exchange activations with the process, or are next to it in a tree over all ranks. News for all travels along
the tree: the time of the last progress anywhere, and silent ranks. No clock and no MPI in here.
"""

import struct
import time
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, get_args

Phase = Literal["compiling", "between steps", "in a step", "saving"]

PHASES: tuple[Phase, ...] = get_args(Phase)
PATIENT: frozenset[Phase] = frozenset({"compiling", "saving"})
"""Phases allowed to take longer than the stall timeout, though not for ever (`heartbeat.PATIENCE`)."""

SILENT_S = 4.0
"""A living neighbour is heard of every half second; this long without a word is suspicious."""
_CHILDREN = 8
_ACCUSED_SLOTS = 2
"""Most silent ranks in a report and in an error line."""
_NOBODY = -1
_FIXED = struct.Struct("<qqqB24s120s")
_ACCUSED = struct.Struct("<qqd")
SIZE = _FIXED.size + _ACCUSED_SLOTS * _ACCUSED.size
"""Bytes of a report."""


class Awaited(NamedTuple):
    """A message without which a rank can start nothing."""

    name: str
    """Phrase for people: the message and its sender."""
    pp_rank: int
    """Rank of the pipe that sends it."""


@dataclass
class RankStatus:
    """Progress of a rank: the last finished task, and the next one."""

    phase: Phase = "compiling"
    step: int = 0
    finished: str = "nothing yet"
    """Last task that ran to its end."""
    running: str = ""
    """Task on the device, or another awaited thing."""
    waiting: Awaited | None = None
    """Message without which nothing can be started."""
    since: float = field(default_factory=time.monotonic)
    """Time of the last change, on the monotonic clock."""

    def now(self, phase: Phase | None = None, *, running: str = "", waiting: Awaited | None = None) -> None:
        """Something happened."""
        self.running, self.waiting = running, waiting
        if phase is not None:
            self.phase = phase
        self.since = time.monotonic()

    def describe(self) -> str:
        """Return a phrase for people: the rank's work, or the awaited message and its sender."""
        if self.phase != "in a step":
            return f"is {self.phase}"
        if self.running:
            return f"is at {self.running}"
        if self.waiting is not None:
            return f"waits for {self.waiting.name}"
        return "is between two tasks"


class Report(NamedTuple):
    """Report of a process on itself."""

    phase: Phase = "compiling"
    step: int = 0
    finished: str = "nothing yet"
    does: str = "has sent no heartbeat"


class _Accused(NamedTuple):
    times: int
    """Number of the neighbours' accusing reports."""
    since: float
    """Time at which the silent rank was last heard of."""
    confirmed: float
    """Time of the neighbours' last known report of silence."""


class Gossip:
    """Gossip of one process; times are seconds on the process's own clock.

    Clocks differ between hosts, and reports wait to be read. So news carries no time but a count, which grows only
    while the news is true: a higher count was confirmed at most a beat per hop ago.
    """

    def __init__(self, rank: int, size: int, per_stage: int, now: float, beat: float):
        self._rank = rank
        self.neighbours = _neighbours(rank, size, per_stage)
        """The ranks to send every report to."""
        self.moved = now
        """Time of the last known progress anywhere."""
        self._moves = 0
        self._heard = dict.fromkeys(self.neighbours, (Report(), now))
        self._accused: dict[int, _Accused] = {}
        depth, reach = 1, 1 + _CHILDREN
        while reach < size:
            depth, reach = depth + 1, reach * _CHILDREN + 1
        self._fresh_s = SILENT_S + 2 * depth * beat

    def tell(self, report: Report, moved: float, now: float) -> bytes:
        """Return the report to send at this beat; `moved` is when this process last did."""
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
        """Take in a neighbour's report."""
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
        """Wait for all neighbours anew: this process was stopped, and may not have been the only one."""
        self._heard = {rank: (report, now) for rank, (report, _) in self._heard.items()}
        self._accused.clear()

    def report(self, rank: int) -> tuple[Report, float] | None:
        """Return the last report of a neighbour and its time; None for other ranks."""
        return self._heard.get(rank)

    def silent(self, now: float) -> dict[int, float]:
        """Seconds since overdue ranks were last heard of: one's own neighbours first, then the nearest."""
        silent = {rank: now - at for rank, (_, at) in self._heard.items() if now - at > SILENT_S}
        for rank, news in sorted(self._news(now), key=lambda item: abs(item[0] - self._rank)):
            silent.setdefault(rank, now - news.since)
        return dict(list(silent.items())[:_ACCUSED_SLOTS])

    def peer_failed(self, now: float) -> bool:
        """True if a process is silent without a reason (while one compiles, its threads may stand still)."""
        return bool(self._deaf(now) or self._news(now))

    def longest_silence(self, now: float) -> float:
        """Return the seconds since the process that is silent longest, without a reason, was last heard of; 0.0: all
        are heard of."""
        heard = [*(at for _, at in self._deaf(now)), *(news.since for _, news in self._news(now))]
        return now - min(heard, default=now)

    def _deaf(self, now: float) -> list[tuple[int, float]]:
        """Return the silent neighbours with the times of their last report, except for neighbours at long work."""
        return [
            (rank, at)
            for rank, (report, at) in self._heard.items()
            if now - at > SILENT_S and report.phase not in PATIENT
        ]

    def _news(self, now: float) -> list[tuple[int, _Accused]]:
        """Return valid accusations, newest first; each rank judges its own neighbours."""
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
    """Return its neighbours on the pipe (a ring where ranks hold several stages), parent and children in the tree."""
    pipe_neighbours = {(rank - per_stage) % size, (rank + per_stage) % size}
    children = range(_CHILDREN * rank + 1, min(_CHILDREN * rank + _CHILDREN + 1, size))
    parent = {(rank - 1) // _CHILDREN} if rank else set()
    return tuple(sorted((pipe_neighbours | parent | set(children)) - {rank}))


def _text(field: bytes) -> str:
    return field.rstrip(b"\0").decode(errors="ignore")
