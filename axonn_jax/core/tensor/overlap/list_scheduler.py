"""List scheduling of a program's equations in virtual time, on one compute unit and a network."""

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from jax.extend.core import JaxprEqn, Var

from axonn_jax.core.hardware import H100, Link
from axonn_jax.core.tensor.overlap.op_cost import OpTimes, axes_of, flops, is_collective

_PASS_THROUGH = frozenset({"reshape", "transpose", "convert_element_type", "squeeze", "add_any", "pvary", "pcast"})
_SUMMED = _PASS_THROUGH | {"add", "concatenate"}
"""Operations between a gradient and its reduction over replicas, including sums over microbatches and bucketing."""
# Matmuls that a weight gradient may wait for; if it waited longer, its operands would fill the memory.
_PATIENCE = 6
# Multiple of its estimated seconds that a reduce-scatter may take: it shares the links with gathers, and nothing but
# memory waits for it.
_SLACK = 3.0


@dataclass
class Window:
    """Collective with the matmuls that run during and after it, by position."""

    collective: int
    overlapping: int | None = None
    """Last matmul that ran during the collective."""
    next: int | None = None
    """First matmul after the collective."""


class ListScheduler:
    """Simulation in virtual time of one compute unit and of links that each serve one collective at a time.

    Intra-node and inter-node links are separate. The longest chain runs first.

    Args:
        eqns: The program's equations.
        costs: Estimates of their times.
        recomputes: True if the backward pass recomputes matmuls.
    """

    def __init__(self, eqns: Sequence[JaxprEqn], costs: OpTimes, recomputes: bool):
        self.eqns = eqns
        # Let small collectives go before large ones, unless the program recomputes: recomputed matmuls would run in the
        # meantime, long before they are needed, and fill the memory that recomputation is meant to save.
        self.yield_links = not recomputes
        producer = {v: i for i, eqn in enumerate(eqns) for v in eqn.outvars}
        self.producers = [
            sorted({producer[v] for v in eqn.invars if isinstance(v, Var) and v in producer}) for eqn in eqns
        ]
        self.consumers: list[list[int]] = [[] for _ in eqns]
        for i, sources in enumerate(self.producers):
            for source in sources:
                self.consumers[source].append(i)
        # Weights are available from the start, so their gathers cost nothing; a split stream (over `y`) is not.
        early = {i for i, eqn in enumerate(eqns) if eqn.primitive.name == "all_gather" and axes_of(eqn) == ("z",)}
        self.seconds = [0.0 if i in early else costs.seconds(eqn) for i, eqn in enumerate(eqns)]
        self.links = [costs.link(eqn) if is_collective(eqn) else None for eqn in eqns]
        self.rank = [0.0] * len(eqns)  # length of the longest chain that starts here
        for i in reversed(range(len(eqns))):
            self.rank[i] = self.seconds[i] + max((self.rank[j] for j in self.consumers[i]), default=0.0)
        self.matmul = _matmuls(eqns)
        self.ahead = [0] * len(eqns)  # matmuls of the longest chain behind it; 1 before a weight gradient
        for i in reversed(range(len(eqns))):
            self.ahead[i] = max((self.ahead[j] + (j in self.matmul) for j in self.consumers[i]), default=0)
        self.urgent = [False] * len(eqns)  # stands between a matmul and its collective: the network waits for it
        reduced = [False] * len(eqns)  # stands between a gradient and its reduction over replicas
        for i in reversed(range(len(eqns))):
            if eqns[i].primitive.name in _PASS_THROUGH:
                self.urgent[i] = any(is_collective(eqns[j]) or self.urgent[j] for j in self.consumers[i])
            if eqns[i].primitive.name in _SUMMED:
                reduced[i] = any(_over_replicas(eqns[j]) or reduced[j] for j in self.consumers[i])
                self.urgent[i] = self.urgent[i] or reduced[i]

        self.sequence: list[int] = []
        """The equations in the order in which they ran."""
        self.windows: list[Window] = []
        """The matmuls around each collective."""
        self.yields: dict[int, list[int]] = {}
        """For a large collective, the small ones that go first."""
        self._run()

    def _run(self) -> None:
        missing = [len(sources) for sources in self.producers]
        now = 0.0
        matmuls_run = 0
        lanes: dict[Link | None, float] = {}  # when links are free
        ready: list[tuple[bool, float, int]] = []
        waiting: list[tuple[int, int]] = []  # ready equations, by matmuls run when their last one had
        started: set[int] = set()
        in_flight: list[tuple[float, Window]] = []
        sinces: dict[int, int] = {}
        over_last: list[Window] = []  # those that no matmul has followed yet
        done: set[int] = set()
        yielding: dict[int, list[int]] = {}  # collectives that start after a small one

        def arrive(i: int, since: int) -> None:
            if not is_collective(self.eqns[i]):
                heapq.heappush(ready, (not self.urgent[i], -self.rank[i], i))
                sinces[i] = since
                if i in self.matmul or self.ahead[i] <= 1:
                    heapq.heappush(waiting, (since, i))
                return
            if (
                self.yield_links
                and i not in self.yields
                and not self.small(i)
                and (first := self._next_small(over_last, done))
            ):
                self.yields[i] = first
                missing[i] = len(first)
                for j in first:
                    yielding.setdefault(j, []).append(i)
                return
            lane = self.links[i]
            # Small collectives are bound by latency, so they do not queue behind others for the links.
            begin = now if self.small(i) else max(lanes.get(lane, 0.0), now)
            lanes[lane] = max(lanes.get(lane, 0.0), begin + self.seconds[i])
            self.sequence.append(i)
            self.windows.append(Window(i))
            slack = _SLACK if self.eqns[i].primitive.name == "reduce_scatter" else 1.0
            in_flight.append((begin + slack * self.seconds[i], self.windows[-1]))

        def release(i: int, since: int) -> None:
            done.add(i)
            for j in (*self.consumers[i], *yielding.get(i, ())):
                missing[j] -= 1
                if missing[j] == 0:
                    arrive(j, since)

        def finish(window: Window) -> None:
            in_flight[:] = [(end, running) for end, running in in_flight if running is not window]
            over_last.append(window)
            release(window.collective, matmuls_run)

        for i in [i for i, count in enumerate(missing) if count == 0]:
            arrive(i, 0)
        while ready or in_flight:
            ended = [window for end, window in in_flight if end <= now]
            over = [window for window in ended if window.overlapping is not None or self.small(window.collective)]
            for window in over:
                finish(window)
            while waiting and waiting[0][1] in started:
                heapq.heappop(waiting)
            while ready and ready[0][2] in started:
                heapq.heappop(ready)
            if not ready:
                pending = [end for end, _ in in_flight if end > now]
                if not over and pending:
                    now = min(pending)
                elif ended and not over:  # nothing can run during it; empty if all that was ready had begun
                    finish(ended[0])
                continue
            # A heap by rank alone would starve weight gradients, which no long chain follows.
            patient = not waiting or matmuls_run - waiting[0][0] < _PATIENCE
            i = heapq.heappop(ready)[2] if patient or ready[0][0] is False else heapq.heappop(waiting)[1]
            since = sinces.pop(i)
            started.add(i)
            if i in self.matmul:
                matmuls_run += 1
                for window in over_last:
                    window.next = i
                over_last.clear()
                for _, window in in_flight:
                    window.overlapping = i
            now += self.seconds[i]
            self.sequence.append(i)
            release(i, matmuls_run if i in self.matmul else since)

    def _next_small(self, over: Iterable[Window], done: set[int]) -> list[int]:
        """Return small collectives that need only elementwise work on results that have arrived."""
        # Queued behind a large collective they would wait for the links, and all other work would wait for them.
        small: list[int] = []
        seen: set[int] = set()
        ahead = [j for window in over for j in self.consumers[window.collective]]
        while ahead:
            i = ahead.pop()
            if i in seen or i in self.matmul:
                continue
            seen.add(i)
            if not is_collective(self.eqns[i]):
                ahead += self.consumers[i]
            elif self.small(i) and i not in done and self._only_elementwise(i, done):
                small.append(i)
        return small

    def _only_elementwise(self, i: int, done: set[int]) -> bool:
        """True if no matmul or collective has yet to run before an equation."""
        behind = [j for j in self.producers[i] if j not in done]
        seen: set[int] = set()
        while behind:
            j = behind.pop()
            if j in self.matmul or is_collective(self.eqns[j]):
                return False
            if j not in seen:
                seen.add(j)
                behind += [k for k in self.producers[j] if k not in done]
        return True

    def small(self, i: int) -> bool:
        """True if latency dominates a collective, as it does for a norm's sums."""
        return self.seconds[i] < 2 * H100.latency_s


def _over_replicas(eqn: JaxprEqn) -> bool:
    return is_collective(eqn) and "data" in axes_of(eqn)


def _matmuls(eqns: Iterable[JaxprEqn]) -> Mapping[int, float]:
    """Return the FLOPs of matmuls large enough to hide a collective behind, by position."""
    counts = {i: count for i, eqn in enumerate(eqns) if (count := flops(eqn))}
    least = max(counts.values(), default=0.0) / 100
    return {i: count for i, count in counts.items() if count >= least}
