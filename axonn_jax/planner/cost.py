"""The corrected cost model: a choice's step time, in closed form."""

from collections.abc import Iterator
from functools import cache

from axonn_jax.grid import GridShape
from axonn_jax.models.inner import PAPERS, Inner
from axonn_jax.models.pieces import Piece, transformer_pieces
from axonn_jax.models.shape import ModelShape
from axonn_jax.planner.communication import Gather
from axonn_jax.planner.compute import Compute
from axonn_jax.planner.footprint import Footprint, Load
from axonn_jax.planner.job import Choice, Estimate, Job, Place
from axonn_jax.planner.network import Links, copies
from axonn_jax.planner.tasks import Tasks, Times
from axonn_jax.planner.traffic import Part, Traffic
from axonn_jax.schedule.partition import Cost, partition

Parts = list[tuple[Part, float, Times]]
"""The parts of a rank: which, how many there are of it, and what a microbatch takes in one."""

Stages = tuple[tuple[Piece, ...], list[range]]
"""Pieces of a model, and the range of them that each virtual stage holds."""

_POWER = 8
"""How sharply a pipeline's period turns from work to messages."""


class CostModel:
    """Predicts steps of one job; what choices have in common is worked out once."""

    def __init__(self, job: Job):
        self.job = job
        self._models: dict[Inner, tuple[Compute, Traffic]] = {}
        self.compute, self.traffic = self.priced(PAPERS)
        self.footprint = Footprint(job)
        self._tasks: dict[tuple[int, int, int, int, Inner], Tasks] = {}
        self._once: dict[GridShape, dict[Place, float]] = {}

    def priced(self, inner: Inner) -> tuple[Compute, Traffic]:
        """What is computed and communicated where inner features are split so."""
        if inner not in self._models:
            job = self.job
            kernel = job.attention_form.kernel
            compute = Compute(job.shape, job.machine, job.precision, kernel, job.sequence_parallel, inner)
            how = (job.accumulate, job.sequence_parallel, inner)
            self._models[inner] = compute, Traffic(job.shape, job.machine, compute.item, *how)
        return self._models[inner]

    def tasks(self, choice: Choice) -> Tasks:
        """The task times of a choice's stages; of `pipe` and `data` counts alone where groups lie in nodes."""
        grid, inner = choice.grid, self.job.inner(choice.grid, choice.activations)
        placed = copies(grid, self.job.machine.node.devices, grid.z * grid.y * grid.x)
        key = (placed, grid.z, grid.y, grid.x, inner)
        if key not in self._tasks:
            mesh = GridShape(placed, 1, grid.z, grid.y, grid.x)
            self._tasks[key] = Tasks(mesh, self.job.machine, *self.priced(inner), self.job.switches)
        return self._tasks[key]

    def stages(self, pipe: int, virtual_stages: int) -> Stages:
        """The model's pieces, and which of them each virtual stage holds, cut as a run cuts them.

        Raises ``UserError`` where there are fewer pieces than virtual stages.
        """
        return _stages(self.job.shape, pipe, virtual_stages)

    def bound(self, grid: GridShape, reductions: bool = True) -> float:
        """Seconds that no choice on this grid goes below, however inner features are split for its activations.

        Blocks alone, without recomputation or bubble: the larger of what a device computes at the best microbatch size,
        and what either kind of links carries; then, if asked for, the reductions over `data`, which nothing hides.
        """
        inners = {self.job.inner(grid, activations) for activations in ("none", "full")}
        return min(self._bound(grid, *self.priced(inner), reductions) for inner in inners)

    def _bound(self, grid: GridShape, of_compute: Compute, traffic: Traffic, reductions: bool) -> float:
        each, layers = self.job.batch // grid.batch_shards, self.job.shape.layers / grid.pipe
        sizes = {size for size in (1, 2, 4, 8, 16, 32, each) if each % size == 0}
        blocks = [(of_compute.block(grid.x, grid.y, size), size) for size in sizes]
        compute = min((one.forward + one.inputs + one.weights) / size for one, size in blocks) * each
        carried = {True: 0.0, False: 0.0}
        for role in ("reduce", "input"):
            for line in traffic.lines(grid, "block", role):
                carried[line.near] += line.each * each
        # Once a microbatch, of which a pipeline has as many as stages.
        for line in traffic.lines(grid, "block", "scatter"):
            carried[line.near] += line.fixed * grid.pipe
        zero = (4 + self.compute.item) / 8
        lines = traffic.updates(grid) if reductions else ()
        reduced = zero * sum(line.fixed for part, line in lines if part == "block")
        return layers * (max(compute, *carried.values()) + reduced)

    def pipeline_s(self, choice: Choice, parts: Parts | None = None) -> float:
        """Seconds from the first microbatch to the last, offload and ZeRO aside; `parts` are of the busiest rank."""
        parts = parts or self.busiest(choice)
        busy = choice.microbatches * (sum(count * times.total for _, count, times in parts) + self._programs(choice))
        wait, messages = self._waits(choice, parts)
        return busy + wait + messages + sum(seconds for _, seconds in self._once_for_all(choice, parts))

    def once_s(self, grid: GridShape, place: Place) -> float:
        """Seconds of what comes once a step after the last microbatch: reductions and the optimizer."""
        of_grid = self._once.setdefault(grid, {})
        if place not in of_grid:
            load = self._largest(grid)
            of_grid[place] = sum(seconds for _, seconds in self._reduced(grid, load, place[1]))
            of_grid[place] += self._update(grid, load, place)
        return of_grid[place]

    def outside_s(self, choice: Choice) -> float:
        """Seconds of a step outside the passes of its microbatches: what comes once, or is shared by all of them."""
        shared = sum(seconds for _, seconds in self._once_for_all(choice, self.busiest(choice)))
        return shared + self.once_s(choice.grid, choice.place)

    def estimate(self, choice: Choice) -> Estimate:
        """Step time, its parts, and memory of a choice.

        A step is what the busiest rank does for all microbatches, the bubble, what is gathered and reduced once, and
        the optimizer. The bubble is `(pipe - 1)` times a virtual stage's `F + I - W` where weight gradients are
        tasks of their own, else its `F + B`; a message there and back for every stage comes on top.
        """
        parts, load, place = self.busiest(choice), self._largest(choice.grid), choice.place
        exposed, hidden = dict[str, float](), dict[str, float]()

        def add(sums: dict[str, float], axis: str, seconds: float) -> None:
            sums[axis] = sums.get(axis, 0.0) + seconds

        for _, count, times in parts:
            for sums, found in ((exposed, times.exposed), (hidden, times.hidden)):
                for axis, seconds in found.items():
                    add(sums, axis, count * choice.microbatches * seconds)
        wait, messages = self._waits(choice, parts)
        if choice.grid.pipe > 1:
            add(exposed, "pipe", messages)
        for axis, seconds in (*self._once_for_all(choice, parts), *self._reduced(choice.grid, load, choice.zero)):
            add(exposed, axis, seconds)
        return Estimate(
            choice,
            step_s := self.pipeline_s(choice) + self.once_s(choice.grid, place),
            compute_s=choice.microbatches * sum(count * times.compute for _, count, times in parts),
            update_s=self._update(choice.grid, load, place),
            bubble=wait / step_s,
            memory=self.footprint.memory(choice),
            exposed=exposed,
            hidden=hidden,
        )

    def message(self, choice: Choice) -> float:
        """Seconds of a message between stages: a microbatch's residual stream on a device."""
        links = Links(choice.grid, self.job.machine)
        tokens = choice.sequences(self.job.batch) * self.job.shape.seq_len
        parts = choice.grid.x * (choice.grid.y if self.job.sequence_parallel else 1)
        carried = tokens * self.job.shape.hidden / parts * self.compute.item
        return links.neighbour_latency() + carried / links.neighbour_rate()

    def _programs(self, choice: Choice) -> float:
        """Seconds a microbatch's programs take at least: a pipeline has one for each task of a virtual stage."""
        tasks = 3 if self.job.splits(choice.activations) else 2
        return choice.virtual_stages * tasks * self.job.machine.device.program_s if choice.grid.pipe > 1 else 0.0

    def busiest(self, choice: Choice) -> Parts:
        """The parts of the busiest rank, whatever is in flight."""
        return max(self._ranks(choice), key=lambda parts: sum(count * times.total for _, count, times in parts))

    def _ranks(self, choice: Choice) -> list[Parts]:
        """The parts of every rank that may be the busiest."""
        tasks, sequences = self.tasks(choice), choice.sequences(self.job.batch)
        # One program loops over the microbatches and shares what it gathers; a pipeline's stage has one for each task.
        gathers = choice.grid.pipe > 1 or choice.microbatches == 1
        # Without recomputation it keeps them, too; a stage gathers again, as its programs keep none for one another.
        kept = (choice.activations == "none" and choice.grid.pipe == 1) or choice.gather != "layer"
        gather: Gather = "step" if choice.once else "pass" if kept else "layer"
        block, first, last = (
            tasks.times(part, sequences, choice.activations, gathers, gather) for part in ("block", "first", "last")
        )
        found: list[Parts] = []
        for load in self.footprint.loads(choice.grid.pipe):
            parts: Parts = [("block", load.blocks, block)]
            parts += [("first", 1.0, first)] if load.first else []
            parts += [("last", 1.0, last)] if load.last else []
            found.append(parts)
        return found

    def _largest(self, grid: GridShape) -> Load:
        """The rank with the most parameters."""
        return max(self.footprint.loads(grid.pipe), key=lambda load: self.footprint.params(grid, load))

    def _waits(self, choice: Choice, parts: Parts) -> tuple[float, float]:
        """Seconds of the bubble, and of waits for messages.

        These are the messages that fill and drain the pipeline (weight gradients run while it drains), and what every
        microbatch takes longer where those in flight are back too late for a rank to be always at work.
        """
        pipe, stages = choice.grid.pipe, choice.virtual_stages
        if pipe == 1:
            return 0.0, 0.0
        forward = sum(count * times.forward for _, count, times in parts)
        inputs = sum(count * times.inputs for _, count, times in parts)
        weights = sum(count * times.weights for _, count, times in parts)
        split, message = self.job.splits(choice.activations), self.message(choice)
        work = forward + inputs + weights
        unit = forward + max(0.0, inputs - weights) if split else work
        way = forward + inputs if split else work
        kept = pipe * way + 2 * (pipe * stages - 1) * message + (weights / stages if split else 0.0)
        late = self._period(choice, work, kept) - work
        messages = (pipe - 1) * (1 if split else 2) * message
        # Several stages take microbatches by groups of `pipe`; the last ranks wait where the last group is not whole.
        short = 0.0 if split else -choice.microbatches % pipe * (stages - 1) / stages * (inputs + weights)
        return (pipe - 1) * unit / stages + short, messages + choice.microbatches * late

    def _period(self, choice: Choice, work: float, kept: float) -> float:
        """Seconds from one microbatch to the next where each takes a rank `work` and is kept for `kept`.

        No less than either `work` or `kept` over the microbatches in flight; where both are about as long it is more,
        since a rank is often in the middle of a task when a message comes. The power is fitted to simulations.
        """
        pipe, stages = choice.grid.pipe, choice.virtual_stages
        # Of a rank's stages the deepest is left first: on average a microbatch keeps (V + 1) / 2 activations.
        room = self.footprint.live(choice, 0) * 2 * stages / (stages + 1)
        if self.job.policy == "message" and stages > 1:
            room = min(room, choice.in_flight or 2 * pipe)
        if choice.microbatches <= room:
            return work
        if room <= pipe and stages == 1 and not self.job.splits(choice.activations):
            return max(work, kept / room)  # as regular as 1F1B
        return float((work**_POWER + (kept / room) ** _POWER) ** (1 / _POWER))

    def _once_for_all(self, choice: Choice, parts: Parts) -> Iterator[tuple[str, float]]:
        """Seconds by axis of what all microbatches share over `z`.

        The first one's compute hides gathers of blocks; where they are kept for a step they come before it, and what
        is scattered, in the sums' precision, behind the last.
        """
        if choice.grid.pipe > 1 or choice.microbatches == 1:
            return
        grid, sequences = choice.grid, choice.sequences(self.job.batch)
        compute, traffic = self.priced(self.job.inner(grid, choice.activations))
        forward = compute.block(grid.x, grid.y, sequences).forward
        speed = 1.0 - self.job.machine.device.contention
        for part, count, _ in parts:
            for line in traffic.lines(grid, part, "gather"):
                beside = forward if part == "block" and self.job.switches.gathers and not choice.once else 0.0
                yield line.axis, count * (line.fixed - min(speed * line.fixed, beside))
            for line in traffic.lines(grid, part, "scatter") if choice.once else ():
                yield line.axis, count * line.fixed

    def _reduced(self, grid: GridShape, load: Load, zero: int) -> Iterator[tuple[str, float]]:
        """Seconds by axis of what is reduced once a step; ZeRO-1 scatters gradients and gathers weights instead.

        Biases count as in the papers' layout: elsewhere they are a little smaller.
        """
        counts = {"block": load.blocks, "first": float(load.first), "last": float(load.last), "step": 1.0}
        share = (4 + self.compute.item) / 8 if zero else 1.0
        for part, line in self.traffic.updates(grid):
            yield line.axis, counts[part] * line.fixed * (share if line.axis == "data" else 1.0)

    def _update(self, grid: GridShape, load: Load, place: Place) -> float:
        (offload, zero), params = place, self.footprint.params(grid, load)
        return self.compute.update(params, params / (grid.data if zero else 1), self.job.accumulate, offload)


@cache
def _stages(shape: ModelShape, pipe: int, virtual_stages: int) -> Stages:
    pieces = transformer_pieces(shape)
    costs = [Cost(piece.name, piece.flops, 2 * piece.flops, piece.params) for piece in pieces]
    return pieces, partition(costs, pipe, virtual_stages)
