"""Steps of one choice in virtual time, undisturbed or disturbed, and of what else could run with the same memory."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from axonn_jax.errors import UserError
from axonn_jax.planner.baselines import NOTHING, tensor_1d
from axonn_jax.planner.cost import CostModel
from axonn_jax.planner.disturb import Disturbance, Outcome
from axonn_jax.planner.disturb import run as disturbed
from axonn_jax.planner.job import Choice
from axonn_jax.planner.refine import Prices, run, stage_times
from axonn_jax.planner.space import Space
from axonn_jax.schedule.policies import Policy

Told = Callable[[str, int], Callable[[int], None]]
"""Called with what is simulated and how many tasks that is, gives what is called with how many are done."""

_STATIC: tuple[Policy, ...] = ("gpipe", "interleaved", "zero-bubble")


@dataclass(frozen=True)
class Step:
    """A simulated step: its slowest pipeline, beside the others."""

    slowest: Outcome
    pipeline_s: float
    """Seconds of its slowest pipeline."""
    busy: list[float]
    """By rank, how long it works in it."""
    replicas_s: list[float]
    """Seconds of every pipeline that was simulated."""
    behind_s: float
    """Seconds of the update, of reductions once a step, and without a pipeline of what microbatches share."""
    left_out: int = 0
    """Microbatches of the steady stretch that were not simulated, each as long as those beside them."""

    @property
    def seconds(self) -> float | None:
        """Of the whole step, None where a failure stops it."""
        return self.pipeline_s + self.behind_s if self.slowest.finished else None

    @property
    def idle(self) -> float:
        """Share of all ranks' time in which they do not work."""
        return 1.0 - sum(self.busy) / (self.pipeline_s * len(self.busy)) if self.pipeline_s > 0 else 0.0


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


def step(
    prices: Prices,
    choice: Choice,
    by: Disturbance,
    replicas: int,
    told: Told,
    name: str = "a step",
    drawn: bool = False,
) -> Step:
    """One step under a disturbance: the slowest of so many pipelines where there is jitter.

    What is the same in every microbatch is simulated as `prices` has it; all tasks are kept if they are to be `drawn`.

    Raises:
        UserError: the disturbance is of a rank that does not exist, or means nothing.
    """
    model = prices.model
    grid, policy, split = choice.grid, model.job.policy, model.job.splits(choice.activations)
    by.check(grid.pipe)
    times, behind = stage_times(model, choice), model.outside_s(choice)
    tasks = (3 if split else 2) * times.layout.stages * times.layout.microbatches
    if not by.jitter and not by.failed:
        done = None if by.slow or drawn else prices.pipelined(choice)
        if done is None:
            slower = {at: seconds * by.slow.get(at[1] % grid.pipe, 1.0) for at, seconds in times.tasks.items()}
            news = told(f"simulating {name}", tasks)
            done = run(model, replace(times, tasks=slower), choice, None if drawn else (), news)
        outcome = Outcome(done.simulation, True, done.makespan)
        return Step(outcome, done.makespan, done.busy, [done.makespan], behind, done.left_out)
    by = replace(by, members=grid.x * grid.y * grid.z)
    count = min(replicas, grid.data) if by.jitter else 1
    outcomes = []
    for replica in range(count):
        news = told(f"simulating {name}" + (f", replica {replica + 1} of {count}" if count > 1 else ""), tasks)
        outcomes.append(disturbed(times, policy, split, by, replica, choice.in_flight, news))
    slowest = max(outcomes, key=lambda one: (not one.finished, one.simulation.makespan))
    spent = [one.simulation.makespan for one in outcomes]
    return Step(slowest, slowest.simulation.makespan, slowest.simulation.busy, spent, behind)


def baselines(
    prices: Prices, choice: Choice, by: Disturbance, replicas: int, limit: float, space: Space, told: Told
) -> Iterator[Baseline]:
    """Static schedules of a choice, and tensor parallelism over one axis: same memory limit, disturbance, replicas."""
    job = prices.model.job
    for policy in _STATIC if choice.grid.pipe > 1 else ():
        name = "1f1b (Megatron-LM)" if policy == "interleaved" and choice.virtual_stages == 1 else policy
        others = prices if policy == job.policy else Prices(CostModel(replace(job, policy=policy)))
        static = choice if others is prices else replace(choice, in_flight=0)
        need = others.model.footprint.memory(static).total
        if need > limit:
            yield Baseline(name, None, need, f"does not fit: needs {need / 1e9:,.0f} GB a device")
        else:
            yield _ended(name, step(others, static, by, replicas, told, name), need)
    flat_name = "1-D tensor parallelism"
    try:
        flat = tensor_1d(job, choice.grid.devices, limit, space)
    except UserError as error:
        yield Baseline(flat_name, why=f"does not fit: {str(error).partition('; ')[2]}")
        return
    # All its devices wait for the slow one, and stop with the one that fails.
    slow, failed = {0: max(by.slow.values())} if by.slow else {}, {0: min(by.failed.values())} if by.failed else {}
    alone = replace(by, slow=slow, failed=failed)
    flatly = Prices(CostModel(replace(job, switches=NOTHING)))
    yield _ended(flat_name, step(flatly, flat.choice, alone, replicas, told, flat_name), flat.memory.total)


def _ended(name: str, done: Step, memory: float) -> Baseline:
    return Baseline(name, done.seconds, memory, "" if done.slowest.finished else "does not end")
