"""Steps of one choice in virtual time, undisturbed or disturbed, and of what else could run with the same memory."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from axonn_jax.errors import UserError
from axonn_jax.planner.baselines import NOTHING, tensor_1d
from axonn_jax.planner.cost import CostModel
from axonn_jax.planner.disturb import Disturbance, Outcome
from axonn_jax.planner.disturb import run as disturbed
from axonn_jax.planner.job import Choice, Job
from axonn_jax.planner.refine import StageTimes, stage_times
from axonn_jax.planner.space import Space
from axonn_jax.schedule.policies import Policy
from axonn_jax.schedule.tasks import Kind

Told = Callable[[str, int], Callable[[int], None]]
"""Called with what is simulated and how many tasks that is, gives what is called with how many are done."""

_STATIC: tuple[Policy, ...] = ("gpipe", "interleaved", "zero-bubble")


@dataclass(frozen=True)
class Step:
    """A simulated step: its slowest pipeline, beside the others."""

    slowest: Outcome
    replicas_s: list[float]
    """Seconds of every pipeline that was simulated."""
    behind_s: float
    """Seconds of the update and of reductions once a step, behind the pipeline."""
    left_out: int = 0
    """Microbatches of the steady stretch that were not simulated, each as long as those beside them."""

    @property
    def seconds(self) -> float | None:
        """Of the whole step, None where a failure stops it."""
        return self.slowest.simulation.makespan + self.behind_s if self.slowest.finished else None


@dataclass(frozen=True)
class Baseline:
    """Another way to run the same step."""

    name: str
    seconds: float | None = None
    """None where it does not fit or does not end."""
    memory_bytes: float | None = None
    """None where no grid fits."""
    why: str = ""
    """What keeps it from running."""


def step(model: CostModel, choice: Choice, by: Disturbance, replicas: int, told: Told, name: str = "a step") -> Step:
    """One step under a disturbance: the slowest of so many pipelines where there is jitter.

    Raises:
        UserError: the disturbance is of a rank that does not exist, or means nothing.
    """
    grid, policy, split = choice.grid, model.job.policy, model.job.splits(choice.activations)
    times = _times(model, choice)
    by = replace(by, members=grid.x * grid.y * grid.z)
    count = min(replicas, grid.data) if by.jitter else 1
    tasks = (3 if split else 2) * times.layout.stages * times.layout.microbatches
    outcomes = []
    for replica in range(count):
        done = told(f"simulating {name}" + (f", replica {replica + 1} of {count}" if count > 1 else ""), tasks)
        outcomes.append(disturbed(times, policy, split, by, replica, choice.in_flight, done))
    slowest = max(outcomes, key=lambda one: (not one.finished, one.simulation.makespan))
    spent = [one.simulation.makespan for one in outcomes]
    return Step(slowest, spent, model.once_s(grid, choice.place))


def _times(model: CostModel, choice: Choice) -> StageTimes:
    """Task times; those of a program without pipeline, which shares gathers among microbatches, add up to its time."""
    times = stage_times(model, choice)
    if choice.grid.pipe > 1:
        return times
    each = times.tasks[Kind.FORWARD, 0] + times.tasks[Kind.BACKWARD, 0]
    share = model.pipeline_s(choice) / (choice.microbatches * each)
    forward, backward = share * times.tasks[Kind.FORWARD, 0], share * times.tasks[Kind.BACKWARD, 0]
    weights = share * times.tasks[Kind.BACKWARD_WEIGHT, 0]
    parts = (forward, backward, backward - weights, weights)
    kinds = (Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
    return replace(times, tasks={(kind, 0): seconds for kind, seconds in zip(kinds, parts, strict=True)})


def baselines(
    job: Job, choice: Choice, by: Disturbance, replicas: int, limit: float, space: Space, told: Told
) -> Iterator[Baseline]:
    """Static schedules of a choice, and tensor parallelism over one axis: same memory limit, disturbance, replicas."""
    for policy in _STATIC if choice.grid.pipe > 1 else ():
        name = "1f1b (Megatron-LM)" if policy == "interleaved" and choice.virtual_stages == 1 else policy
        model = CostModel(replace(job, policy=policy))
        static = choice if policy == job.policy else replace(choice, in_flight=0)
        need = model.footprint.memory(static).total
        if need > limit:
            yield Baseline(name, None, need, f"does not fit: needs {need / 1e9:,.0f} GB a device")
        else:
            yield _ended(name, step(model, static, by, replicas, told, name), need)
    flat_name = "1-D tensor parallelism"
    try:
        flat = tensor_1d(job, choice.grid.devices, limit, space)
    except UserError as error:
        yield Baseline(flat_name, why=f"does not fit: {str(error).partition('; ')[2]}")
        return
    # All its devices wait for the slow one, and stop with the one that fails.
    slow, failed = {0: max(by.slow.values())} if by.slow else {}, {0: min(by.failed.values())} if by.failed else {}
    alone = replace(by, slow=slow, failed=failed)
    model = CostModel(replace(job, switches=NOTHING))
    yield _ended(flat_name, step(model, flat.choice, alone, replicas, told, flat_name), flat.memory.total)


def _ended(name: str, done: Step, memory: float) -> Baseline:
    return Baseline(name, done.seconds, memory, "" if done.slowest.finished else "does not end")
