"""Steps of a candidate in virtual time, undisturbed or disturbed, and of other schedules with the same memory."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from axonn_jax.core.errors import UserError
from axonn_jax.core.options import PipelinePolicy
from axonn_jax.planning.cost_model.model import CostModel
from axonn_jax.planning.request import NO_OVERLAP, Candidate, Estimate, PlanRequest
from axonn_jax.planning.search import search
from axonn_jax.planning.simulate.candidate import Prices
from axonn_jax.planning.simulate.perturb import Perturbation, simulate_perturbed
from axonn_jax.planning.simulate.simulator import Simulation
from axonn_jax.planning.simulate.steady import pipelined
from axonn_jax.planning.space import SearchSpace

Progress = Callable[[str, int], Callable[[int], None]]
"""Callback: (name of a simulation, its number of tasks) -> callback for the number of ended tasks."""

_STATIC: tuple[PipelinePolicy, ...] = ("gpipe", "interleaved", "zero-bubble")


@dataclass(frozen=True)
class SimulatedStep:
    """Simulated step: the slowest pipeline in detail, and the times of all simulated pipelines."""

    slowest: Simulation
    replicas_s: list[float]
    """Seconds of every pipeline that was simulated."""
    behind_s: float
    """Seconds of the update, of reductions once a step, and without a pipeline of work shared by microbatches."""

    @property
    def seconds(self) -> float | None:
        """Seconds of the full step; None if a failure stops it."""
        return self.slowest.makespan + self.behind_s if self.slowest.finished else None


@dataclass(frozen=True)
class Baseline:
    """Another way to run the same step."""

    name: str
    seconds: float | None = None
    """None where it does not fit or does not end."""
    memory_bytes: float | None = None
    """None where no grid fits."""
    why: str = "does not end"
    """Reason for which there are no seconds."""


def step(
    prices: Prices,
    candidate: Candidate,
    by: Perturbation,
    replicas: int,
    progress: Progress,
    name: str = "a step",
    drawn: bool = False,
) -> SimulatedStep:
    """Return one step under a disturbance; with jitter, the slowest of up to `replicas` pipelines.

    The steady phase is extrapolated as in `prices`. With `drawn` every task is simulated and kept.

    Raises:
        UserError: the disturbance is of a rank that does not exist, or means nothing.
    """
    model = prices.model
    grid, policy = candidate.grid, model.request.schedule(candidate)
    by.check(grid.pipe)
    times, behind = prices.stage_times(candidate), model.outside_s(candidate)
    tasks = (3 if policy.splits else 2) * times.pipe_shape.stages * times.pipe_shape.microbatches
    # Without jitter all replicas are equal, so one pipeline is enough, and it can reuse the plan's simulation.
    if not by.jitter and not by.failed:
        done = None if by.slow or drawn else prices.pipelined(candidate)
        if done is None:
            news = progress(f"simulating {name}", tasks)
            done = pipelined(times.slowed(by.slow), policy, shown=None if drawn else (), progress=news)
        return SimulatedStep(done, [done.makespan], behind)
    by = replace(by, members=grid.inside.devices)
    count = min(replicas, grid.data) if by.jitter else 1
    outcomes = []
    for replica in range(count):
        news = progress(f"simulating {name}" + (f", replica {replica + 1} of {count}" if count > 1 else ""), tasks)
        outcomes.append(simulate_perturbed(times, policy, by, replica, news))
    slowest = max(outcomes, key=lambda outcome: (not outcome.finished, outcome.makespan))
    return SimulatedStep(slowest, [outcome.makespan for outcome in outcomes], behind)


def baselines(
    prices: Prices,
    candidate: Candidate,
    by: Perturbation,
    replicas: int,
    limit: float,
    space: SearchSpace,
    progress: Progress,
) -> Iterator[Baseline]:
    """Yield the static schedules of a candidate, and 1-D tensor parallelism under the same limit and disturbance."""
    request = prices.model.request
    for policy in _STATIC if candidate.grid.pipe > 1 else ():
        name = "1f1b (Megatron-LM)" if policy == "interleaved" and candidate.virtual_stages == 1 else policy
        baseline = prices if policy == request.policy else Prices(CostModel(replace(request, policy=policy)))
        need = baseline.model.footprint.memory(candidate).total
        if need > limit:
            yield Baseline(name, None, need, f"does not fit: needs {need / 1e9:,.0f} GB a device")
        else:
            yield Baseline(name, step(baseline, candidate, by, replicas, progress, name).seconds, need)
    flat_name = "1-D tensor parallelism"
    try:
        flat = tensor_1d(request, candidate.grid.devices, limit, space)
    except UserError as error:
        yield Baseline(flat_name, why=f"does not fit: {str(error).partition('; ')[2]}")
        return
    # Without a pipeline all devices wait for the slowest one and stop when one fails, so a single rank has the worst of
    # each disturbance.
    slow, failed = {0: max(by.slow.values())} if by.slow else {}, {0: min(by.failed.values())} if by.failed else {}
    disturbance = replace(by, slow=slow, failed=failed)
    flatly = Prices(CostModel(replace(request, switches=NO_OVERLAP)))
    done = step(flatly, flat.candidate, disturbance, replicas, progress, flat_name)
    yield Baseline(flat_name, done.seconds, flat.memory.total)


def tensor_1d(request: PlanRequest, devices: int, limit: float, space: SearchSpace | None = None) -> Estimate:
    """Return the best data x y grid without a pipeline: Megatron's column-row pairs, without overlap.

    The axes of `space` are ignored.

    Raises:
        UserError: none fits.
    """
    only = replace(space or SearchSpace(), axes={"pipe": 1, "z": 1, "x": 1}, virtual_stages=(1,))
    return search(replace(request, switches=NO_OVERLAP), devices, only, limit).best[0]
