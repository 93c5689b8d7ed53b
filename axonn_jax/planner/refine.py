"""A choice's pipeline run by the real dispatchers, with task times from the cost model."""

from dataclasses import dataclass, replace

from axonn_jax.models.pieces import Piece
from axonn_jax.planner.cost import CostModel
from axonn_jax.planner.job import Choice, Estimate
from axonn_jax.planner.simulator import Simulation, simulate
from axonn_jax.schedule.tasks import Kind, Layout, Message, Task


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
    pieces, ranges = model.stages(choice.grid.pipe, choice.virtual_stages)
    tasks, sequences = model.tasks(choice), choice.sequences(model.job.batch)
    times: dict[tuple[Kind, int], float] = {}
    block_flops, program = shape.layer_forward_flops(1), model.job.machine.device.program_s
    for stage, held in enumerate(ranges):
        forward = inputs = weights = 0.0
        for piece in pieces[held.start : held.stop]:
            part, share = _part(piece, block_flops)
            found = tasks.times(part, sequences, choice.activations, True)  # type: ignore[arg-type]
            forward += share * found.forward
            inputs += share * found.inputs
            weights += share * found.weights
        times[Kind.FORWARD, stage] = program + forward
        times[Kind.BACKWARD_INPUT, stage] = program + inputs
        times[Kind.BACKWARD_WEIGHT, stage] = program + weights
        times[Kind.BACKWARD, stage] = program + inputs + weights
    return StageTimes(layout, times, model.message(choice))


def _part(piece: Piece, block_flops: int) -> tuple[str, float]:
    """Which of the model's parts a piece belongs to, and its share of it by FLOPs."""
    if piece.name == "embedding":
        return "first", 1.0
    if piece.name == "head":
        return "last", 1.0
    return "block", piece.flops / block_flops


def run(model: CostModel, times: StageTimes, choice: Choice) -> Simulation:
    """The pipelined part of one step in virtual time."""
    return simulate(
        times.layout,
        model.job.policy,
        task_time=times.task,
        message_time=times.carried,
        in_flight=choice.in_flight,
        split=model.job.splits(choice.activations),
    )


def tasks_to_refine(choice: Choice) -> int:
    """Tasks that `refine` simulates: twelve microbatches a stage at the most, in two runs."""
    pipe = choice.grid.pipe
    return 3 * pipe * choice.virtual_stages * sum(_counts(choice)) if pipe > 1 else 0


def _counts(choice: Choice) -> tuple[int, ...]:
    few = 4 * choice.grid.pipe
    return (few, 2 * few) if choice.microbatches > 2 * few else (choice.microbatches,)


def refine(model: CostModel, one: Estimate) -> Estimate:
    """Replaces the closed form of a pipeline by its simulation.

    A pipeline with many microbatches is steady between its start and its end: two shorter runs tell how long each
    further microbatch takes.
    """
    choice = one.choice
    if choice.grid.pipe == 1:
        return one
    times, spans, busy = stage_times(model, choice), [], []
    counts = _counts(choice)
    for count in counts:
        layout = replace(times.layout, microbatches=count)
        done = run(model, replace(times, layout=layout), choice)
        spans.append(done.makespan)
        busy.append(max(done.busy) / count * choice.microbatches)
    makespan = spans[-1]
    if len(counts) == 2:
        makespan += (choice.microbatches - counts[1]) * (spans[1] - spans[0]) / (counts[1] - counts[0])
    step = makespan + model.once_s(choice.grid, choice.place)
    idle = max(0.0, makespan - busy[-1]) / step
    messages = min(one.exposed.get("pipe", 0.0), idle * step)
    # The real cut balances FLOPs, not times; the closed form rounds blocks up: the busiest rank has less, or more.
    inside = [seconds for axis, seconds in one.exposed.items() if axis not in ("pipe", "data")]
    scale = busy[-1] / (one.compute_s + sum(inside))
    exposed = {axis: seconds * (1.0 if axis == "data" else scale) for axis, seconds in one.exposed.items()}
    hidden = {axis: seconds * scale for axis, seconds in one.hidden.items()}
    return replace(
        one,
        step_s=step,
        compute_s=one.compute_s * scale,
        bubble=idle - messages / step,
        exposed={**exposed, "pipe": messages},
        hidden=hidden,
        simulated=True,
    )
