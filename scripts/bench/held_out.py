"""SC 24's runs, and a number of a machine that is estimated from all of them but the one it is judged on."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

from other_systems import BACKWARD, fused

from axonn_jax.core.models.presets import preset
from axonn_jax.planning.cost_model.model import CostModel
from axonn_jax.planning.machines.machine import Machine
from axonn_jax.planning.machines.machine_file import load_machine
from axonn_jax.planning.request import Candidate, Estimate, OverlapFlags, PlanRequest
from axonn_jax.planning.search import search
from axonn_jax.planning.space import SearchSpace

RECOMPUTED = SearchSpace(axes={"pipe": 1}, activations=("full",), offload=(False,), zero=(0,))


@dataclass(frozen=True)
class Run:
    """A published run on a large machine: percent of the advertised peak, recomputation counted."""

    source: str
    machine: str
    model: str
    devices: int
    percent: float


RUNS = (
    # The table of weak scaling. 16.8 M tokens a step, sequence 2,048.
    *(Run("SC 24", *one) for one in (
        ("perlmutter", "gpt-5b", 512, 50.6), ("perlmutter", "gpt-10b", 1024, 61.9),
        ("perlmutter", "gpt-20b", 2048, 55.2), ("perlmutter", "gpt-40b", 4096, 48.5),
        ("frontier", "gpt-5b", 512, 41.1), ("frontier", "gpt-10b", 1024, 39.3), ("frontier", "gpt-40b", 4096, 37.6),
        ("frontier", "gpt-160b", 16384, 32.4), ("frontier", "gpt-320b", 32768, 22.0),
        ("alps", "gpt-10b", 1024, 30.6), ("alps", "gpt-60b", 6144, 23.4),
    )),
    Run("4D paper", "perlmutter", "gpt-80b", 1024, 57.0),
)  # fmt: skip


MOST = 0.2
"""Largest `network.straggling` that is tried."""


def straggling(machine: Machine, value: float, devices: int) -> Machine:
    """The machine whose devices take so much longer with every doubling of a job's nodes, as a job of them sees it."""
    return replace(machine, network=replace(machine.network, straggling=value)).shared(devices)


def bare(run: Run) -> Machine:
    """The run's machine without what its large runs lose."""
    machine = load_machine(run.machine)
    return replace(machine, network=replace(machine.network, straggling=0.0))


def job_of(run: Run, machine: Machine, switches: OverlapFlags = BACKWARD) -> PlanRequest:
    """The published conditions: everything recomputed, gradients reduced in bf16."""
    # A batch that data * z divides, the closest to 16.8 M tokens where the devices are no power of two.
    batch = 8192 if run.devices & (run.devices - 1) == 0 else 9216
    return fused(PlanRequest(preset(run.model), machine, batch, "bf16", gradient_item=2, switches=switches))


def best(run: Run, machine: Machine) -> tuple[PlanRequest, list[Estimate]]:
    """The configurations that the planner finds without a pipeline, as SC 24 had none, fastest first.

    The authors' program was not jax's: it had the whole device.
    """
    job = job_of(run, machine)
    return job, search(job, run.devices, RECOMPUTED, machine.device.free_bytes).best


@cache
def _candidates(run: Run) -> tuple[Candidate, ...]:
    """Choices that are good on a machine that loses nothing, or much."""
    machines = (bare(run), straggling(bare(run), MOST / 2, run.devices))
    return tuple({one.candidate: None for machine in machines for one in best(run, machine)[1][:8]})


@cache
def percent(run: Run, value: float) -> float:
    """Predicted percent of peak, of the best among the candidates."""
    job = job_of(run, straggling(bare(run), value, run.devices))
    model = CostModel(job)
    return 100 * max(model.estimate(choice).peak_share(job, True) for choice in _candidates(run))


@cache
def solved(run: Run) -> float:
    """The value at which the run is predicted as published; the bound that comes closest where none is."""
    less, more = 0.0, MOST
    if percent(run, less) <= run.percent:
        return less
    for _ in range(9):
        middle = (less + more) / 2
        less, more = (middle, more) if percent(run, middle) > run.percent else (less, middle)
    return (less + more) / 2


def held_out(run: Run, runs: Sequence[Run] = RUNS) -> float:
    """The median of what the other runs of the machine would have, without the one that is judged."""
    return statistics.median(solved(other) for other in runs if other.machine == run.machine and other != run)


def estimated(machine: str) -> float:
    """What a machine file holds: the median over all runs of the machine."""
    return statistics.median(solved(run) for run in RUNS if run.machine == machine)
