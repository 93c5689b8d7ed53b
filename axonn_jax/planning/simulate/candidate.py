"""A candidate's price: in closed form without a pipeline, else simulated by the real dispatchers."""

from collections.abc import Iterable
from dataclasses import replace

from axonn_jax.core.models.declared.segments import Segment
from axonn_jax.pipe.schedule.tasks import Kind
from axonn_jax.planning.cost_model.compute import Times
from axonn_jax.planning.cost_model.model import CostModel, stages_of
from axonn_jax.planning.cost_model.traffic import Part
from axonn_jax.planning.request import Candidate, Estimate
from axonn_jax.planning.simulate.simulator import Simulation
from axonn_jax.planning.simulate.steady import StageTimes, pipelined


def _tasks(model: CostModel, candidate: Candidate) -> dict[tuple[Kind, int], float]:
    """Return the seconds of the tasks of every virtual stage; without a pipeline one stage holds the full model."""
    times: dict[tuple[Kind, int], float] = {}
    pipe, virtual = candidate.grid.pipe, candidate.virtual_stages
    least = model.request.machine.device.program_s if pipe > 1 else 0.0

    def add(stage: int, parts: Iterable[tuple[float, Times]]) -> None:
        forward = inputs = weights = 0.0
        for count, part_times in parts:
            forward += count * part_times.forward
            inputs += count * part_times.inputs
            weights += count * part_times.weights
        times[Kind.FORWARD, stage] = least + forward
        times[Kind.BACKWARD_INPUT, stage] = least + inputs
        times[Kind.BACKWARD_WEIGHT, stage] = least + weights
        times[Kind.BACKWARD, stage] = least + inputs + weights

    if pipe == 1:
        add(0, ((count, part_times) for _, count, part_times in model.busiest(candidate)))
        return times
    tasks, sequences = model.tasks(candidate), candidate.sequences(model.request.batch)
    segments, ranges = stages_of(model.request.shape, pipe, virtual)
    block_flops = model.footprint.ranks.block_flops

    def part(segment: Segment) -> tuple[float, Times]:
        ends: dict[str, Part] = {"embedding": "first", "head": "last"}
        share = 1.0 if segment.name in ends else segment.flops / block_flops
        return share, tasks.times(ends.get(segment.name, "block"), sequences, candidate.activations, True)

    for stage, indices in enumerate(ranges):
        add(stage, map(part, segments[indices.start : indices.stop]))
    return times


class Prices:
    """Prices of a request's candidates, as `plan` and `simulate` show them; equal pipelines are simulated once."""

    def __init__(self, model: CostModel):
        self.model = model
        self.tasks = 0
        """Simulated so far."""
        self._pipelines: dict[tuple[object, ...], Simulation] = {}
        self._tasks: dict[tuple[object, ...], dict[tuple[Kind, int], float]] = {}

    def price(self, candidate: Candidate) -> Estimate:
        """Return the closed form, with the pipeline in it replaced by its simulation.

        The real cut balances FLOPs, not times, and the closed form rounds blocks up: the busiest rank has less, or
        more, to compute and communicate.
        """
        closed = self.model.estimate(candidate)
        if candidate.grid.pipe == 1:
            return closed
        # Scale the closed form's parts to the busiest simulated rank, so that the parts still add up to the step.
        done = self.pipelined(candidate)
        busy = max(done.busy)
        step = done.makespan + self.model.outside_s(candidate)
        idle = done.makespan - busy
        messages = min(closed.exposed.get("pipe", 0.0), idle)
        inside = [seconds for axis, seconds in closed.exposed.items() if axis not in ("pipe", "data")]
        scale = busy / (closed.compute_s + sum(inside))
        exposed = {axis: seconds * (1.0 if axis == "data" else scale) for axis, seconds in closed.exposed.items()}
        hidden = {axis: seconds * scale for axis, seconds in closed.hidden.items()}
        return replace(
            closed,
            step_s=step,
            compute_s=closed.compute_s * scale,
            bubble=(idle - messages) / step,
            exposed={**exposed, "pipe": messages},
            hidden=hidden,
            simulated=True,
        )

    def stage_times(self, candidate: Candidate) -> StageTimes:
        """Times of a candidate's stages, cut as a run cuts them, and of its messages.

        Raises:
            UserError: the model has fewer segments than there are virtual stages.
        """
        key = self._key(candidate)
        if key not in self._tasks:
            self._tasks[key] = _tasks(self.model, candidate)
        return StageTimes(candidate.pipeline, self._tasks[key], self.model.message(candidate))

    def _key(self, candidate: Candidate) -> tuple[object, ...]:
        """Return the key of everything that task times depend on."""
        grid, sequences = candidate.grid, candidate.sequences(self.model.request.batch)
        # Replicas of the same number of sequences differ in `expert`, over which tasks exchange tokens.
        axes = grid.pipe, grid.expert, grid.z, grid.y, grid.x
        return *axes, candidate.virtual_stages, sequences, candidate.activations

    def pipelined(self, candidate: Candidate) -> Simulation:
        """Simulate a candidate's step without work done once a step."""
        times = self.stage_times(candidate)
        policy = self.model.request.schedule(candidate)
        key = (*self._key(candidate), candidate.microbatches, policy, times.message)
        if key not in self._pipelines:
            done = self._pipelines[key] = pipelined(times, policy)
            self.tasks += done.tasks
        return self._pipelines[key]
