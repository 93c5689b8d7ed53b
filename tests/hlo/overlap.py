"""Overlap in a scheduled program: matmuls between a collective's start and done, and modelled time.

The time model: a device runs the instructions of a computation in the order of the schedule, each for its roofline
time, and stops at a collective's done until the collective has ended. The links inside a node and those between nodes
serve the collectives that use them one at a time, in the order they start, each for its ring time. So windows
that overlap share the compute between them: no second of it hides two collectives of the same links. A collective is
hidden for as long as the device computes while it is served. Not modelled: launches, and the memory bandwidth and the
cores that collectives take away from kernels.
"""

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from hlo.collectives import Collective, collectives
from hlo.program import Computation, Instruction, Module, parse, trip_count
from hlo.roofline import Costs, link, ring_seconds

from axonn_jax.core.hardware import Accelerator, Link

Class = Literal[
    "z gathers", "dW reduce-scatters", "dX all-reduces", "forward all-reduces", "other", "data reductions", "small"
]
CLASSES: tuple[Class, ...] = get_args(Class)
MAIN: tuple[Class, ...] = CLASSES[:4]
"""What the algorithm communicates in every layer."""
_SMALL_BYTES = 1 << 18
"""Below it a collective is a matter of latency: a norm's sums, the loss."""


@dataclass(frozen=True)
class CollectiveWindow:
    """One collective instruction, and what stands between its start and its done."""

    kind: Class
    """What the algorithm has it for."""
    name: str
    """The instruction's name."""
    axes: str
    """Mesh axes it runs over, joined by `*`."""
    link: Link
    """The links it is served by."""
    times: int
    """Runs in one run of the program."""
    bytes: float
    """What a device sends for it on a ring, in one run of the program."""
    seconds: float
    """Ring time of all runs."""
    matmuls: int
    """Matmuls between start and done."""
    work_s: float
    """Roofline time of what stands between start and done, in all runs."""
    hidden_s: float
    """Of `seconds`, those during which the device computes."""


@dataclass(frozen=True)
class OverlapReport:
    """A program's windows and modelled times."""

    windows: tuple[CollectiveWindow, ...]
    compute_s: float
    """Roofline time of everything but collectives."""
    step_s: float
    """Compute and the waits for collectives."""


@dataclass(frozen=True)
class Share:
    """Sums over windows."""

    bytes: float = 0.0
    beside_matmul: float = 0.0
    """Bytes of collectives with at least one matmul between start and done."""
    seconds: float = 0.0
    hidden_s: float = 0.0
    count: int = 0
    """Collective instructions in the program's text."""

    @property
    def of_bytes(self) -> float | None:
        """Share of bytes with a matmul between start and done; None where there are none."""
        return self.beside_matmul / self.bytes if self.bytes else None

    @property
    def of_time(self) -> float | None:
        """Share of modelled time that is hidden; None where there is none."""
        return self.hidden_s / self.seconds if self.seconds else None


def share(windows: Iterable[CollectiveWindow]) -> Share:
    """The sums over some windows."""
    some = list(windows)
    return Share(
        sum(one.bytes for one in some),
        sum(one.bytes for one in some if one.matmuls),
        sum(one.seconds for one in some),
        sum(one.hidden_s for one in some),
        len(some),
    )


def shares(windows: Sequence[CollectiveWindow]) -> dict[Class, Share]:
    """The sums by class, for the classes that occur."""
    sums = {kind: share(one for one in windows if one.kind == kind) for kind in CLASSES}
    return {kind: one for kind, one in sums.items() if one.count}


def measure(program: str | Module, axes: Mapping[str, int], machine: Accelerator) -> OverlapReport:
    """Every collective's window in a scheduled program's text; `axes` has the mesh's sizes, slowest first.

    A loop that runs as often as data says, as that over the tiles of an expert's tokens, counts once: what it computes,
    and so what is hidden, is more. Raises ``ValueError`` for text that is no scheduled HLO module, and for a collective
    in such a loop.
    """
    module = parse(program) if isinstance(program, str) else program
    if not module.scheduled:
        raise ValueError("the module is not scheduled: its instructions are in no order of execution")
    # A compiled program has a computation of its own for every loop and call, so each is reached along one way.
    found: dict[str, dict[int, list[Collective]]] = {}
    for one in collectives(module, axes):
        if one.times is None:
            raise ValueError(f"{one.name} is in a loop whose trip count cannot be read")
        found.setdefault(one.computation, {}).setdefault(one.start, []).append(one)
    return _Clock(module, machine, found).run()


def classify(kind: str, over: str, op_name: str, whole: int) -> Class:
    """What a collective is for, by kind, axes, the traced operation it comes from, and bytes of the whole buffer."""
    if "data" in over.split("*"):
        return "data reductions"
    if whole < _SMALL_BYTES:
        return "small"
    if "z" in over.split("*") and kind == "all-gather":  # automatic partitioning gathers over further axes at once
        return "z gathers"
    if over == "z" and kind == "reduce-scatter":
        return "dW reduce-scatters"
    if over in ("x", "y") and kind == "all-reduce":
        # What is recomputed is forward computation. Differentiating a recomputed block leaves no mark of its own.
        forward = "rematted_computation" in op_name or ("jvp(" in op_name and "transpose(" not in op_name)
        return "forward all-reduces" if forward else "dX all-reduces"
    return "other"


@dataclass
class _Timeline:
    """A computation in modelled time: at `ends[i]` the device has computed for `computed[i]`."""

    ends: list[float] = field(default_factory=lambda: [0.0])
    computed: list[float] = field(default_factory=lambda: [0.0])

    @property
    def now(self) -> float:
        return self.ends[-1]

    def advance(self, seconds: float, compute: float) -> None:
        if seconds > 0.0:
            self.ends.append(self.ends[-1] + seconds)
            self.computed.append(self.computed[-1] + compute)

    def computed_by(self, time: float) -> float:
        """Seconds of compute until a time, evenly spread between known ones."""
        at = bisect_right(self.ends, time)
        if at == len(self.ends):
            return self.computed[-1]
        begin, end = self.ends[at - 1], self.ends[at]
        return self.computed[at - 1] + (self.computed[at] - self.computed[at - 1]) * (time - begin) / (end - begin)


@dataclass
class _Flight:
    """A collective under way: when the links serve it, and what had been issued when it started."""

    begin: float
    end: float
    matmuls: int
    work_s: float


class _Clock:
    """Runs a module in modelled time."""

    def __init__(self, module: Module, machine: Accelerator, found: Mapping[str, Mapping[int, list[Collective]]]):
        self.module, self.machine, self.found = module, machine, found
        self.costs = Costs(module)
        self.windows: list[CollectiveWindow] = []

    def run(self) -> OverlapReport:
        """All windows, of loop bodies too."""
        line = self._timeline(self.module.entry)
        return OverlapReport(tuple(self.windows), line.computed[-1], line.now)

    def _timeline(self, computation: Computation) -> _Timeline:
        here = self.found.get(computation.name, {})
        starts = {members[0].done: start for start, members in here.items()}
        line, flights, free = _Timeline(), dict[int, _Flight](), dict[Link, float]()
        matmuls, work_s = 0, 0.0
        for at, one in enumerate(computation.instructions):
            if members := here.get(at):
                served = link(self.machine, members[0].groups)
                begin = max(line.now, free.get(served, 0.0))
                free[served] = begin + ring_seconds(self.machine, members)
                flights[at] = _Flight(begin, free[served], matmuls, work_s)
            if at in starts:
                line.advance(flights[starts[at]].end - line.now, 0.0)
                members, flight = here[starts[at]], flights[starts[at]]
                inside = (matmuls - flight.matmuls, work_s - flight.work_s)
                hidden = line.computed_by(flight.end) - line.computed_by(flight.begin)
                self.windows.append(self._window(members, flight, inside, hidden))
            if not members:
                count, seconds, compute = self._cost(computation, one)
                line.advance(seconds, compute)
                matmuls += count
                work_s += compute
        return line

    def _cost(self, inside: Computation, one: Instruction) -> tuple[int, float, float]:
        """Matmuls of an instruction, how long it takes, and how much of that the device computes."""
        if one.opcode == "while":
            trips = trip_count(self.module, inside, one)
            trips = 1 if trips is None else trips
            count, seconds, compute = self._whole(dict(one.called)["body"])
            return count * trips, seconds * trips, compute * trips
        if one.opcode in ("call", "conditional"):
            return max((self._whole(name) for _, name in one.called), key=lambda cost: cost[1])
        work = self.costs.of(inside, one)
        seconds = work.seconds(self.machine)
        return work.matmuls, seconds, seconds

    def _whole(self, name: str) -> tuple[int, float, float]:
        line = self._timeline(self.module.computations[name])
        count, _ = self.costs.matmuls(name)
        return count, line.now, line.computed[-1]

    def _window(
        self, members: list[Collective], flight: _Flight, inside: tuple[int, float], hidden: float
    ) -> CollectiveWindow:
        first = members[0]
        times = first.times or 0
        matmuls, work_s = inside
        return CollectiveWindow(
            classify(first.kind, first.over, first.op_name, sum(one.whole for one in members)),
            first.name,
            first.over,
            link(self.machine, first.groups),
            times,
            float(sum(one.bytes for one in members)),
            times * (flight.end - flight.begin),
            matmuls,
            times * work_s,
            times * hidden,
        )
