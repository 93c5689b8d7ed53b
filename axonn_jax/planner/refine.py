"""A choice's price: in closed form without a pipeline, else simulated by the real dispatchers."""

from collections.abc import Callable, Collection, Iterable
from dataclasses import replace

from axonn_jax.models.pieces import Piece
from axonn_jax.planner.cost import CostModel
from axonn_jax.planner.job import Choice, Estimate
from axonn_jax.planner.steady import Pipelined, StageTimes, pipelined
from axonn_jax.planner.tasks import Times
from axonn_jax.planner.traffic import Part
from axonn_jax.schedule.tasks import Kind, Layout


def stage_times(model: CostModel, choice: Choice) -> StageTimes:
    """Times of a choice's stages, cut as a run cuts them, and of its messages.

    Raises:
        UserError: the model has fewer pieces than there are virtual stages.
    """
    layout = Layout(choice.grid.pipe, choice.microbatches, choice.virtual_stages)
    return StageTimes(layout, _tasks(model, choice), model.message(choice))


def _tasks(model: CostModel, choice: Choice) -> dict[tuple[Kind, int], float]:
    """Seconds of the tasks of every virtual stage; without a pipeline of one that holds the whole model."""
    times: dict[tuple[Kind, int], float] = {}
    pipe, virtual = choice.grid.pipe, choice.virtual_stages
    least = model.job.machine.device.program_s if pipe > 1 else 0.0

    def add(stage: int, parts: Iterable[tuple[float, Times]]) -> None:
        forward = inputs = weights = 0.0
        for count, one in parts:
            forward += count * one.forward
            inputs += count * one.inputs
            weights += count * one.weights
        times[Kind.FORWARD, stage] = least + forward
        times[Kind.BACKWARD_INPUT, stage] = least + inputs
        times[Kind.BACKWARD_WEIGHT, stage] = least + weights
        times[Kind.BACKWARD, stage] = least + inputs + weights

    if pipe == 1:
        add(0, ((count, one) for _, count, one in model.busiest(choice)))
        return times
    tasks, sequences = model.tasks(choice), choice.sequences(model.job.batch)
    block_flops = model.job.shape.layer_forward_flops(1)

    def part(piece: Piece) -> tuple[float, Times]:
        named: dict[str, Part] = {"embedding": "first", "head": "last"}
        share = 1.0 if piece.name in named else piece.flops / block_flops
        return share, tasks.times(named.get(piece.name, "block"), sequences, choice.activations, True)

    pieces, ranges = model.stages(pipe, virtual)
    for stage, held in enumerate(ranges):
        add(stage, map(part, pieces[held.start : held.stop]))
    return times


def run(
    model: CostModel,
    times: StageTimes,
    choice: Choice,
    shown: Collection[int] | None = (),
    told: Callable[[int], None] | None = None,
) -> Pipelined:
    """A choice's step without what comes once in it; `shown` and `told` are those of `pipelined`."""
    split = model.job.splits(choice.activations)
    return pipelined(times, model.job.policy, in_flight=choice.in_flight, split=split, shown=shown, told=told)


class Prices:
    """Prices of one job's choices: what `plan` compares and `simulate` shows; equal pipelines are simulated once."""

    def __init__(self, model: CostModel):
        self.model = model
        self.tasks = 0
        """Simulated so far."""
        self._pipelines: dict[tuple[object, ...], Pipelined] = {}
        self._tasks: dict[tuple[object, ...], dict[tuple[Kind, int], float]] = {}

    def price(self, choice: Choice) -> Estimate:
        """Returns the closed form, with the pipeline in it replaced by its simulation.

        The real cut balances FLOPs, not times, and the closed form rounds blocks up: the busiest rank has less, or
        more, and with it what it computes and communicates.
        """
        closed = self.model.estimate(choice)
        if choice.grid.pipe == 1:
            return closed
        done = self.pipelined(choice)
        busy = max(done.busy)
        step = done.makespan + self.model.outside_s(choice)
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

    def _stage_times(self, choice: Choice) -> StageTimes:
        layout = Layout(choice.grid.pipe, choice.microbatches, choice.virtual_stages)
        key = self._key(choice)
        if key not in self._tasks:
            self._tasks[key] = _tasks(self.model, choice)
        return StageTimes(layout, self._tasks[key], self.model.message(choice))

    def _key(self, choice: Choice) -> tuple[object, ...]:
        """What decides how long tasks take."""
        grid, sequences = choice.grid, choice.sequences(self.model.job.batch)
        return grid.pipe, grid.z, grid.y, grid.x, choice.virtual_stages, sequences, choice.activations

    def pipelined(self, choice: Choice) -> Pipelined:
        """The simulation of a choice's step without what comes once in it."""
        times = self._stage_times(choice)
        key = (*self._key(choice), choice.microbatches, choice.in_flight, times.message)
        if key not in self._pipelines:
            done = self._pipelines[key] = run(self.model, times, choice)
            self.tasks += done.simulation.tasks
        return self._pipelines[key]
