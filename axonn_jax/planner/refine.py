"""A choice's pipeline run by the real dispatchers, with task times from the cost model."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from axonn_jax.models.pieces import Piece, transformer_pieces
from axonn_jax.planner.cost import CostModel
from axonn_jax.planner.job import Choice, Estimate
from axonn_jax.planner.simulator import Simulation, simulate
from axonn_jax.schedule.partition import Cost, partition
from axonn_jax.schedule.tasks import Kind, Layout, Message, Task

_MOST_TASKS = 12_000
"""Larger pipelines keep their closed form in a search: they would take seconds."""


@dataclass(frozen=True)
class StageTimes:
    """Seconds of the tasks of every virtual stage, and of a message."""

    layout: Layout
    tasks: dict[tuple[Kind, int], float]
    message: float

    def task(self, task: Task) -> float:
        """Seconds of a task."""
        return self.tasks[task.kind, task.stage]

    def carried(self, message: Message) -> float:
        """Seconds of a message."""
        del message
        return self.message


def stage_times(model: CostModel, choice: Choice) -> StageTimes:
    """Cuts the model as a run does, and adds up what each virtual stage holds.

    Raises:
        UserError: the model has fewer pieces than there are virtual stages.
    """
    shape, layout = model.job.shape, Layout(choice.grid.pipe, choice.microbatches, choice.virtual_stages)
    pieces = transformer_pieces(shape)
    costs = [Cost(piece.name, piece.flops, 2 * piece.flops, piece.params) for piece in pieces]
    ranges = partition(costs, choice.grid.pipe, choice.virtual_stages)
    tasks, sequences = model.tasks(choice.grid), choice.sequences(model.job.batch)
    times: dict[tuple[Kind, int], float] = {}
    block_flops = shape.layer_forward_flops(1)
    for stage, held in enumerate(ranges):
        forward = inputs = weights = 0.0
        for piece in pieces[held.start : held.stop]:
            part, share = _part(piece, block_flops)
            found = tasks.times(part, sequences, choice.activations, True)  # type: ignore[arg-type]
            forward += share * found.forward
            inputs += share * found.inputs
            weights += share * found.weights
        times[Kind.FORWARD, stage] = forward
        times[Kind.BACKWARD_INPUT, stage] = inputs
        times[Kind.BACKWARD_WEIGHT, stage] = weights
        times[Kind.BACKWARD, stage] = inputs + weights
    return StageTimes(layout, times, model.message(choice))


def _part(piece: Piece, block_flops: int) -> tuple[str, float]:
    """Which of the model's parts a piece belongs to, and its share of it by FLOPs."""
    if piece.name == "embedding":
        return "first", 1.0
    if piece.name == "head":
        return "last", 1.0
    return "block", piece.flops / block_flops


Slowed = Callable[[Task], float]


def run(model: CostModel, choice: Choice, times: StageTimes | None = None) -> Simulation:
    """The pipelined part of one step in virtual time."""
    found = stage_times(model, choice) if times is None else times
    return simulate(
        found.layout,
        model.job.policy,
        task_time=found.task,
        message_time=found.carried,
        split=model.job.split,
    )


def refine(model: CostModel, one: Estimate) -> Estimate:
    """Replaces the closed form of a pipeline by its simulation; leaves alone what has no pipeline or a very long one."""
    choice = one.choice
    pipe = choice.grid.pipe
    if pipe == 1 or 3 * pipe * choice.virtual_stages * choice.microbatches > _MOST_TASKS:
        return one
    done = run(model, choice)
    # What comes once a step stays as it was: the update, and reductions and gathers outside of the pipeline.
    outside = one.update_s + sum(seconds for axis, seconds in one.exposed.items() if axis == "data")
    step = done.makespan + outside
    idle = (done.makespan - max(done.busy)) / step
    messages = min(one.exposed.get("pipe", 0.0), idle * step)
    return replace(
        one, step_s=step, bubble=idle - messages / step, exposed={**one.exposed, "pipe": messages}, simulated=True
    )
