"""The corrected cost model: a candidate's step time, in closed form."""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache

from axonn_jax.core.grid import REPLICA_AXES, GridShape
from axonn_jax.core.models.block_comm import BlockComm
from axonn_jax.core.models.config import ModelShape
from axonn_jax.core.models.declared.segments import Segment, transformer_segments
from axonn_jax.pipe.schedule.partition import SegmentCost, partition
from axonn_jax.planning.cost_model.compute import Compute, PartTimes, Times
from axonn_jax.planning.cost_model.traffic import Part, Traffic
from axonn_jax.planning.machines.network import GroupLinks, copies
from axonn_jax.planning.memory_model import MemoryModel
from axonn_jax.planning.rank_state import Load
from axonn_jax.planning.request import Candidate, Estimate, PlanRequest, StatePlacement

Parts = list[tuple[Part, float, Times]]
"""Parts of a rank: kind, number of them, and times of a microbatch in one."""

_POWER = 8
"""Exponent with which a pipeline's period turns from work to messages."""


class CostModel:
    """Predicted steps of one request; shared results are computed once."""

    def __init__(self, request: PlanRequest):
        self.request = request
        self.priced = cache(lambda comm: (Compute(request, comm), Traffic(request, comm)))
        """Computation and traffic for a communication of blocks."""
        self.compute, self.traffic = self.priced(BlockComm(sequence_split=request.sequence_split))
        self.footprint = MemoryModel(request)
        self._tasks: dict[tuple[int, GridShape, BlockComm], PartTimes] = {}
        self._once: dict[GridShape, dict[StatePlacement, float]] = {}

    def tasks(self, candidate: Candidate) -> PartTimes:
        """Return the task times of a candidate's stages.

        `pipe` and `data` only matter for how groups lie in nodes, so grids share an entry if that is the same.
        """
        grid, comm = candidate.grid, self.request.comm(candidate.grid, candidate.activations)
        distinct = copies(grid, self.request.machine.node.devices, grid.inside.devices)
        key = (distinct, grid.inside, comm)
        if key not in self._tasks:
            mesh = replace(grid.inside, pipe=distinct)
            self._tasks[key] = PartTimes(mesh, self.request, *self.priced(comm))
        return self._tasks[key]

    def bound(self, grid: GridShape, reductions: bool = True) -> float:
        """Return a lower bound on the seconds of every candidate on this grid, for any communication of blocks.

        Only blocks count, without recomputation or bubble: the largest of a device's computation at the best microbatch
        size, the traffic inside nodes and the traffic between nodes; then, with `reductions`, the reductions over
        `data`, which nothing hides.
        """
        ways = {self.request.comm(grid, activations) for activations in ("none", "full")}
        return min(self._bound(grid, *self.priced(comm), reductions) for comm in ways)

    def _bound(self, grid: GridShape, of_compute: Compute, traffic: Traffic, reductions: bool) -> float:
        share, layers = self.request.batch // grid.batch_shards, self.request.shape.layers / grid.pipe
        sizes = {size for size in (1, 2, 4, 8, 16, 32, share) if share % size == 0}
        blocks = [(of_compute.block(grid.expert, grid.x, grid.y, size), size) for size in sizes]
        compute = min((times.forward + times.inputs + times.weights) / size for times, size in blocks) * share
        carried = {True: 0.0, False: 0.0}
        for role in ("reduce", "input"):
            for line in traffic.lines(grid, "block", role):
                carried[line.near] += line.per_sequence * share
        # These run once per microbatch, and a pipeline has at least as many microbatches as stages.
        for line in traffic.lines(grid, "block", "scatter"):
            carried[line.near] += line.fixed * grid.pipe
        zero = (4 + self.compute.item) / 8
        lines = traffic.updates(grid) if reductions else ()
        reduced = zero * sum(line.fixed for part, line in lines if part == "block")
        return layers * (max(compute, *carried.values()) + reduced)

    def pipeline_s(self, candidate: Candidate, parts: Parts | None = None) -> float:
        """Return the seconds from the first microbatch to the last; `parts` are those of the busiest rank.

        Offload and ZeRO do not change them.
        """
        parts = parts or self.busiest(candidate)
        busy = candidate.microbatches * (_sum(parts, "total") + self._programs(candidate))
        wait, messages = self._waits(candidate, parts)
        return busy + wait + messages + sum(seconds for _, seconds in self._once_for_all(candidate, parts))

    def once_s(self, grid: GridShape, placement: StatePlacement, device: float) -> float:
        """Return the seconds after the last microbatch of a step: reductions and the optimizer.

        `device` is the number of bytes that the candidate uses on a device; offloaded state may stay in the remainder.
        """
        of_grid, load = self._once.setdefault(grid, {}), self._largest(grid)
        if placement not in of_grid:
            of_grid[placement] = sum(seconds for _, seconds in self._reduced(grid, load, placement[1]))
        return of_grid[placement] + self._update(grid, load, placement, device)

    def outside_s(self, candidate: Candidate) -> float:
        """Return the seconds of a step outside the passes of its microbatches: done once, or shared by all of them."""
        shared = sum(seconds for _, seconds in self._once_for_all(candidate, self.busiest(candidate)))
        return shared + self.once_s(candidate.grid, candidate.placement, self.footprint.memory(candidate).total)

    def estimate(self, candidate: Candidate) -> Estimate:
        """Return the closed-form estimate of a candidate: step time, its parts, and memory.

        A step is the busiest rank's work for all microbatches, the bubble, gathers and reductions done once, and the
        optimizer. The bubble is `(pipe - 1)` times a virtual stage's `F + I - W` if weight gradients are their own
        tasks, else its `F + B`. A message in each direction for every stage is added.
        """
        parts, load, placement = self.busiest(candidate), self._largest(candidate.grid), candidate.placement
        exposed, hidden = dict[str, float](), dict[str, float]()

        def add(sums: dict[str, float], axis: str, seconds: float) -> None:
            sums[axis] = sums.get(axis, 0.0) + seconds

        for _, count, times in parts:
            for sums, seconds_by_axis in ((exposed, times.exposed), (hidden, times.hidden)):
                for axis, seconds in seconds_by_axis.items():
                    add(sums, axis, count * candidate.microbatches * seconds)
        wait, messages = self._waits(candidate, parts)
        memory = self.footprint.memory(candidate)
        if candidate.grid.pipe > 1:
            add(exposed, "pipe", messages)
        for axis, seconds in (
            *self._once_for_all(candidate, parts),
            *self._reduced(candidate.grid, load, candidate.zero),
        ):
            add(exposed, axis, seconds)
        return Estimate(
            candidate,
            step_s := self.pipeline_s(candidate) + self.once_s(candidate.grid, placement, memory.total),
            compute_s=candidate.microbatches * _sum(parts, "compute"),
            update_s=self._update(candidate.grid, load, placement, memory.total),
            bubble=wait / step_s,
            memory=memory,
            exposed=exposed,
            hidden=hidden,
        )

    def message(self, candidate: Candidate) -> float:
        """Return the seconds of a message between stages: a microbatch's residual stream on a device."""
        links = GroupLinks(candidate.grid, self.request.machine)
        tokens = candidate.sequences(self.request.batch) * self.request.shape.seq_len
        parts = candidate.grid.x * (candidate.grid.y if self.request.sequence_split else 1)
        carried = tokens * self.request.shape.hidden / parts * self.compute.item
        return links.neighbour_latency() + carried / links.neighbour_rate()

    def _programs(self, candidate: Candidate) -> float:
        """Return the launch overhead of a microbatch's programs: a pipeline has one per task of a virtual stage."""
        tasks = 3 if self.request.schedule(candidate).splits else 2
        return (
            candidate.virtual_stages * tasks * self.request.machine.device.program_s if candidate.grid.pipe > 1 else 0.0
        )

    def busiest(self, candidate: Candidate) -> Parts:
        """Return the parts of the busiest rank, which do not depend on the microbatches in flight."""
        tasks, sequences = self.tasks(candidate), candidate.sequences(self.request.batch)
        # A single program loops over the microbatches and shares gathered weights. A pipeline stage runs a program per
        # task, so it gathers for every microbatch.
        gathers = candidate.grid.pipe > 1 or candidate.microbatches == 1
        block = tasks.times("block", sequences, candidate.activations, gathers, candidate.lifetime)
        ends: tuple[Part, Part] = ("first", "last")
        first, last = (tasks.times(part, sequences, "none", gathers, candidate.lifetime) for part in ends)
        by_load: list[Parts] = []
        for load in self.footprint.ranks.loads(candidate.grid.pipe):
            parts: Parts = [("block", load.blocks, block)]
            parts += [("first", 1.0, first)] if load.first else []
            parts += [("last", 1.0, last)] if load.last else []
            by_load.append(parts)
        return max(by_load, key=lambda parts: _sum(parts, "total"))

    def _largest(self, grid: GridShape) -> Load:
        """Return the rank with the most parameters: its reductions and its update take the longest."""
        return max(self.footprint.ranks.loads(grid.pipe), key=lambda load: self.footprint.ranks.params(grid, load))

    def _waits(self, candidate: Candidate, parts: Parts) -> tuple[float, float]:
        """Return the seconds of the bubble, and of waits for messages.

        Message waits are those that fill and drain the pipeline (weight gradients run while it drains), and the delay
        of every microbatch if the microbatches in flight return too late to keep a rank busy.
        """
        pipe, stages = candidate.grid.pipe, candidate.virtual_stages
        if pipe == 1:
            return 0.0, 0.0
        forward, inputs, weights = (_sum(parts, task) for task in ("forward", "inputs", "weights"))
        split, message = self.request.schedule(candidate).splits, self.message(candidate)
        work = forward + inputs + weights
        unit = forward + max(0.0, inputs - weights) if split else work
        pass_s = forward + inputs if split else work
        lifetime = pipe * pass_s + 2 * (pipe * stages - 1) * message + (weights / stages if split else 0.0)
        late = self._period(candidate, work, lifetime) - work
        messages = (pipe - 1) * (1 if split else 2) * message
        # Virtual stages take microbatches in groups of `pipe`; the last ranks idle if the last group is incomplete.
        short = 0.0 if split else -candidate.microbatches % pipe * (stages - 1) / stages * (inputs + weights)
        return (pipe - 1) * unit / stages + short, messages + candidate.microbatches * late

    def _period(self, candidate: Candidate, work: float, lifetime: float) -> float:
        """Return the seconds between microbatches that each keep a rank busy for `work` and stay live for `lifetime`.

        The period is at least `work`, and at least `lifetime` divided by the microbatches in flight. Where the two
        bounds are close it is longer, because a message often arrives while the rank is in the middle of a task. The
        power that joins the bounds is fitted to simulations.
        """
        pipe, stages, policy = candidate.grid.pipe, candidate.virtual_stages, self.request.schedule(candidate)
        # A microbatch leaves the deepest of a rank's V stages first, so on average it keeps (V + 1) / 2 activations.
        room = min(policy.live(candidate.pipeline, 0) * 2 / (stages + 1), policy.depth(candidate.pipeline))
        if candidate.microbatches <= room:
            return work
        if room <= pipe and stages == 1 and not policy.splits:
            return max(work, lifetime / room)  # as regular as 1F1B
        return float((work**_POWER + (lifetime / room) ** _POWER) ** (1 / _POWER))

    def _once_for_all(self, candidate: Candidate, parts: Parts) -> Iterator[tuple[str, float]]:
        """Yield the seconds by axis of collectives over `z` that all microbatches share.

        The first microbatch's compute hides the gathers of blocks. If gathered weights stay for the step, gathers come
        before the first microbatch, and scatters, in the precision of the sums, after the last.
        """
        if candidate.grid.pipe > 1 or candidate.microbatches == 1:
            return
        grid, sequences = candidate.grid, candidate.sequences(self.request.batch)
        compute, traffic = self.priced(self.request.comm(grid, candidate.activations))
        forward = compute.block(grid.expert, grid.x, grid.y, sequences).forward
        speed = 1.0 - self.request.machine.device.contention
        for part, count, _ in parts:
            for line in traffic.lines(grid, part, "gather"):
                hiding = forward if part == "block" and self.request.switches.gathers and not candidate.once else 0.0
                yield line.axis, count * (line.fixed - min(speed * line.fixed, hiding))
            for line in traffic.lines(grid, part, "scatter") if candidate.once else ():
                yield line.axis, count * line.fixed

    def _reduced(self, grid: GridShape, load: Load, zero: int) -> Iterator[tuple[str, float]]:
        """Yield the seconds by axis of the reductions done once a step.

        ZeRO-1 scatters gradients and gathers weights instead. Biases are counted as in the papers' layout; in other
        layouts they are slightly smaller.
        """
        counts = {"block": load.blocks, "first": float(load.first), "last": float(load.last), "step": 1.0}
        # An all-reduce moves the gradient (4 bytes) twice; ZeRO-1 scatters it once and gathers weights of `item` bytes.
        share = (4 + self.compute.item) / 8 if zero else 1.0
        for part, line in self.traffic.updates(grid):
            yield line.axis, counts[part] * line.fixed * (share if line.axis in REPLICA_AXES else 1.0)

    def _update(self, grid: GridShape, load: Load, placement: StatePlacement, device: float) -> float:
        (dense, experts), host = self.footprint.ranks.trained(grid, load), 0.0
        local_params = dense / grid.replicas + experts / grid.data if placement[1] else dense + experts
        if placement[0]:
            host = self.footprint.ranks.state(grid, load, placement).host
        travelling = (1 - self.footprint.staying(host, device) / host) if host else 0.0
        return self.compute.update(dense + experts, local_params, self.request.gradient_item, travelling, load.moment)


def _sum(parts: Parts, name: str) -> float:
    """Return the seconds of a microbatch in all parts of a rank, by the name of `Times`."""
    return sum(count * getattr(times, name) for _, count, times in parts)


@cache
def stages_of(shape: ModelShape, pipe: int, virtual_stages: int) -> tuple[tuple[Segment, ...], list[range]]:
    """Return a model's segments, and which of them each virtual stage holds, cut as a run cuts them.

    Raises ``UserError`` where there are fewer segments than virtual stages.
    """
    segments = transformer_segments(shape)
    costs = [SegmentCost(segment.name, segment.flops, 2 * segment.flops, segment.params) for segment in segments]
    return segments, partition(costs, pipe, virtual_stages)
