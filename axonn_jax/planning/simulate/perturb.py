"""Task times that differ from the model's: jitter, slow ranks, ranks that fail. The same seed gives the same times."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from math import exp, inf
from statistics import NormalDist

from axonn_jax.core.errors import UserError
from axonn_jax.pipe.schedule.policies import Policy
from axonn_jax.pipe.schedule.tasks import Kind, Message, Task
from axonn_jax.planning.simulate.simulator import Simulation, simulate
from axonn_jax.planning.simulate.steady import StageTimes

_NORMAL = NormalDist()
_KINDS = {kind: number for number, kind in enumerate(Kind)}
_MASK = 2**64 - 1


@dataclass(frozen=True)
class Perturbation:
    """Disturbances by which a run differs from the model."""

    jitter: float = 0.0
    """Sigma of lognormal task and message times with the model's as their mean."""
    slow: Mapping[int, float] = field(default_factory=dict)
    """Factors of ranks that take longer."""
    failed: Mapping[int, float] = field(default_factory=dict)
    """Seconds into the step after which ranks finish nothing."""
    members: int = 1
    """Devices of a rank that wait for each other in every task: the slowest one's time counts."""
    seed: int = 0

    def check(self, ranks: int) -> None:
        """Raise ``UserError`` for a rank that does not exist, or an amount that means nothing."""
        if not 0.0 <= self.jitter < 5.0:
            raise UserError("--jitter", self.jitter, "a number from 0 to 5, the sigma of lognormal times")
        for flag, amounts, low in (("--slow", self.slow, 1.0), ("--fail", self.failed, 0.0)):
            for rank, amount in amounts.items():
                if not 0 <= rank < ranks:
                    raise UserError(flag, rank, f"a rank of the pipeline, 0 to {ranks - 1}")
                if not low <= amount < inf:
                    raise UserError(flag, amount, "a factor of at least 1" if low else "seconds of at least 0")


def uniform(*numbers: int) -> float:
    """Return a number in (0, 1) that only depends on the arguments (the mixing function of SplitMix64)."""
    state = 0
    for number in numbers:
        state = (state + number + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return (state + 0.5) / 2**64


def factor(sigma: float, members: int, *numbers: int) -> float:
    """Return a lognormal factor with mean one; for several members, the largest of their factors."""
    # The maximum of n uniform numbers is distributed as the n-th root of a single one. The bound keeps the quantile
    # finite.
    chance = min(uniform(*numbers) ** (1.0 / members), 1.0 - 2.0**-53)
    return exp(sigma * _NORMAL.inv_cdf(chance) - sigma * sigma / 2)


def simulate_perturbed(
    times: StageTimes,
    policy: Policy,
    by: Perturbation,
    replica: int = 0,
    progress: Callable[[int], None] | None = None,
) -> Simulation:
    """One pipeline's step under a disturbance; replicas differ in their jitter; `progress` is `simulate`'s."""
    by.check(times.pipe_shape.pipe)
    pipe_shape, times = times.pipe_shape, times.slowed(by.slow)

    def jittered(seconds: float, kind: int, of: Task | Message) -> float:
        key = (by.seed, replica, kind, of.stage, of.microbatch)
        return seconds * factor(by.jitter, by.members, *key) if by.jitter else seconds

    def task_time(task: Task) -> float:
        return jittered(times.task(task), _KINDS[task.kind], task)

    def message_time(message: Message) -> float:
        return jittered(times.message, 8 + (message.direction == "backward"), message)

    run = partial(simulate, pipe_shape, policy, message_time=message_time, progress=progress)
    healthy = run(task_time=task_time)
    # Until it fails a rank behaves as in the healthy run, so that run tells which task it does not finish.
    if not (lost := _lost(healthy, by.failed)):
        return healthy
    # The lost tasks never end, so the tasks that depend on them do not end either.
    broken = run(task_time=lambda task: inf if task in lost else task_time(task))
    ended = [span for span in broken.spans if span.end < inf]
    last = max((span.end for span in ended), default=0.0)
    busy, peak = [0.0] * pipe_shape.pipe, broken.peak_live
    for span in ended:
        busy[span.rank] += span.end - span.start
    return Simulation(pipe_shape, ended, last, busy, peak, tasks=len(ended), finished=False)


def _lost(healthy: Simulation, failed: Mapping[int, float]) -> set[Task]:
    """Return, for each rank that fails, the first task that would have ended after the failure."""
    lost: dict[int, tuple[float, Task]] = {}
    for span in healthy.spans:
        if span.rank in failed and span.end > failed[span.rank]:
            lost[span.rank] = min(lost.get(span.rank, (inf, span.task)), (span.start, span.task))
    return {task for _, task in lost.values()}
