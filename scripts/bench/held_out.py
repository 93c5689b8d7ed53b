"""SC 24's runs, and a number of a machine that is estimated from all of them but the one it is judged on."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache

from other_systems import BACKWARD, fused, sustained

from axonn_jax.models.presets import preset
from axonn_jax.planner.cost_model.model import CostModel
from axonn_jax.planner.machines.machine import Machine
from axonn_jax.planner.machines.machine_file import load_machine
from axonn_jax.planner.request import Candidate, Estimate, OverlapFlags, PlanRequest
from axonn_jax.planner.search import search
from axonn_jax.planner.space import SearchSpace

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


@dataclass(frozen=True)
class Knob:
    """One number of a machine that could be what its large runs lose."""

    name: str
    change: Callable[[Machine, float, int], Machine]
    """The machine with another value of it, as a job of so many devices sees it."""
    none: float
    """Its value where nothing is lost."""
    most: float
    """The largest loss that is tried."""


def straggling(machine: Machine, value: float, devices: int) -> Machine:
    """Devices take so much longer with every doubling of a job's nodes."""
    return replace(machine, network=replace(machine.network, straggling=value)).shared(devices)


def flat(machine: Machine, value: float, devices: int) -> Machine:
    """Devices keep this share of their matmul rate in any of these runs."""
    return sustained(machine, machine.matmul.sustained * value)


def rings(machine: Machine, value: float, devices: int) -> Machine:
    """Collectives that leave a node reach this share of the measured or the links' bandwidth."""
    rows = tuple(
        replace(row, gib_per_s=row.gib_per_s * (value if machine.node.devices % (row.inner * row.size) else 1.0))
        for row in machine.bandwidth
    )
    network = replace(machine.network, bytes_per_s=machine.network.bytes_per_s * value)
    return replace(machine, bandwidth=rows, network=network)


def contention(machine: Machine, value: float, devices: int) -> Machine:
    """Compute loses this share of its speed beside collectives."""
    return replace(machine, device=replace(machine.device, contention=value))


STRAGGLING = Knob("`network.straggling`", straggling, 0.0, 0.2)
KNOBS = (
    STRAGGLING,
    Knob("a constant share of the matmul rate", flat, 1.0, 0.4),
    Knob("a share of ring bandwidth across nodes", rings, 1.0, 0.05),
    Knob("another `device.contention`", contention, 0.159, 0.9),
)


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
def _candidates(run: Run, knob: Knob) -> tuple[Candidate, ...]:
    """Choices that are good on a machine that loses nothing, or much."""
    middle = (knob.none + knob.most) / 2
    machines = (bare(run), knob.change(bare(run), middle, run.devices))
    return tuple({one.candidate: None for machine in machines for one in best(run, machine)[1][:8]})


@cache
def percent(run: Run, knob: Knob, value: float) -> float:
    """Predicted percent of peak, of the best among the candidates."""
    job = job_of(run, knob.change(bare(run), value, run.devices))
    model = CostModel(job)
    return 100 * max(model.estimate(choice).peak_share(job, True) for choice in _candidates(run, knob))


@cache
def solved(run: Run, knob: Knob) -> float:
    """The value at which the run is predicted as published; the bound that comes closest where none is."""
    less, more = knob.none, knob.most
    if percent(run, knob, less) <= run.percent:
        return less
    for _ in range(9):
        middle = (less + more) / 2
        less, more = (middle, more) if percent(run, knob, middle) > run.percent else (less, middle)
    return (less + more) / 2


SCOPES: dict[str, Callable[[Run, Run], bool]] = {
    "the same machine": lambda run, other: other.machine == run.machine and other != run,
    "all machines": lambda run, other: other != run,
    "the other machines": lambda run, other: other.machine != run.machine,
}
"""Which runs a held-out value is estimated from; never the one that is judged."""


def held_out(run: Run, knob: Knob = STRAGGLING, scope: str = "the same machine", runs: Sequence[Run] = RUNS) -> float:
    """The median of what the runs of a scope would have, without the one that is judged."""
    return statistics.median(solved(other, knob) for other in runs if SCOPES[scope](run, other))


def estimated(machine: str) -> float:
    """What a machine file holds: the median over all runs of the machine."""
    return statistics.median(solved(run, STRAGGLING) for run in RUNS if run.machine == machine)


def errors(knob: Knob, scope: str | None) -> list[float]:
    """Predicted over published less one, run by run, with held-out values; without any where there is no scope."""
    values = [knob.none if scope is None else held_out(run, knob, scope) for run in RUNS]
    return [percent(run, knob, value) / run.percent - 1 for run, value in zip(RUNS, values, strict=True)]
