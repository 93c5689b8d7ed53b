"""What `plan` and `simulate` share: reading amounts, the job they are about, the command that would run a choice."""

import re
from dataclasses import dataclass, fields
from fractions import Fraction
from math import floor
from typing import Annotated, Any, Literal

from tyro.conf import arg

from axonn_jax.errors import UserError, nearest
from axonn_jax.grid import MOST_DEVICES
from axonn_jax.models.inner import InnerFeatures
from axonn_jax.models.presets import preset
from axonn_jax.models.shape import ModelShape
from axonn_jax.planner.job import Choice, Job
from axonn_jax.planner.machine import Machine
from axonn_jax.planner.memory import Precision
from axonn_jax.planner.tasks import Switches
from axonn_jax.schedule.policies import Policy, default_in_flight
from axonn_jax.schedule.tasks import Layout

_TOKENS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "ki": 2**10, "mi": 2**20}
_BYTES = {"": 10**9, "gb": 10**9, "gib": 2**30, "mb": 10**6, "mib": 2**20, "tb": 10**12}
_MOST_SEQUENCES = 2**31 - 1  # as train.global_batch

Chosen = Literal["auto", "fp32", "bf16", "fp16"]
OVERLAPS = tuple(f.name for f in fields(Switches))
Size = Annotated[int | None, arg(metavar="INT", help_behavior_hint="(default: searched)")]


@dataclass(frozen=True)
class Axes:
    """Sizes of the grid's axes that are fixed."""

    pipe: Size = None
    """Pipeline stages."""
    data: Size = None
    """Replicas."""
    z: Size = None
    """Shards of batch and weights."""
    y: Size = None
    """Shards of output features, heads, vocabulary."""
    x: Size = None
    """Shards of input features."""

    def fixed(self) -> dict[str, int]:
        """Those that are given; raises ``UserError`` for a size below 1."""
        given = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) is not None}
        for name, size in given.items():
            positive(f"--grid.{name}", size)
        return given


def model_shape(model: str, seq: int | None) -> ModelShape:
    """The preset, with sequences of `seq` tokens where that is given."""
    if seq is not None and seq < 1:
        raise UserError("--seq", seq, "an integer of at least 1")
    return preset(model) if seq is None else preset(model, seq_len=seq)


def _amount(flag: str, text: str, units: dict[str, int], accepted: str) -> tuple[Fraction, Fraction]:
    """The number, and the half of its last digit if it has a unit that makes it a rounded one."""
    found = re.fullmatch(r"(\d+(?:\.(\d+))?)\s*([a-z]*)", text.strip().replace("_", "").replace(",", "").lower())
    if found is None or found[3] not in units:
        raise UserError(flag, text, accepted)
    unit = units[found[3]]
    return Fraction(found[1]) * unit, Fraction(unit, 2 * 10 ** len(found[2] or "")) if found[3] else Fraction(0)


def sequences(text: str, seq: int) -> int:
    """Sequences of a batch given in tokens: exactly, or rounded such as `16.8M`.

    A rounded number stands for the batch near it with the most factors of two: 16.8M at 2,048 is 8,192 sequences.
    Raises ``UserError`` where there is no whole number of sequences.
    """
    accepted = "tokens a step, such as 16777216, 4Mi or 16.8M"
    tokens, slack = _amount("--batch-tokens", text, _TOKENS, accepted)
    if tokens > _MOST_SEQUENCES * seq:
        raise UserError("--batch-tokens", text, f"at most {_MOST_SEQUENCES:,} sequences of {seq} tokens")
    low, high = (tokens - slack) / seq, (tokens + slack) / seq
    first, last = -floor(-low), floor(high)
    if first > last or last < 1:
        near = max(1, round(tokens / seq)) * seq
        raise UserError("--batch-tokens", text, f"a multiple of the sequence length, {seq}; nearest: {near}")
    step = 1
    while (last // (2 * step)) * 2 * step >= max(first, 1):
        step *= 2
    return last // step * step


def limit(text: str | None, job: Job) -> float:
    """Bytes of device memory that may be used: what is given, else `Job.memory_limit`.

    Raises ``UserError`` for what is no amount, or more than a device has.
    """
    if text is None:
        return job.memory_limit()
    found, _ = _amount("--memory-limit", text, _BYTES, "an amount such as 36GB or 32GiB")
    if found <= 0:
        raise UserError("--memory-limit", text, "an amount above 0, such as 36GB")
    device = job.machine.device
    if found > device.memory_bytes:
        raise UserError(
            "--memory-limit", text, f"at most {device.memory_bytes / 1e9:.5g}GB, the memory of {device.kind}"
        )
    return float(found)


def switches(text: str) -> Switches:
    """Which collectives run beside matmuls: `all`, `none`, or names with commas."""
    if text in ("all", "none"):
        return Switches(**dict.fromkeys(OVERLAPS, text == "all"))
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in OVERLAPS:
            raise UserError("--overlap", text, f"all, none, or some of {','.join(OVERLAPS)}{nearest(name, OVERLAPS)}")
    return Switches(**{name: name in names for name in OVERLAPS})


def job_of(
    shape: ModelShape,
    machine: Machine,
    batch: int,
    precision: Chosen,
    overlap: str,
    policy: Policy,
    split: bool,
    sequence_parallel: bool = False,
    inner_features: InnerFeatures = "y",
) -> Job:
    """The job that the flags describe.

    Raises ``UserError`` for a precision that the device does not have, and for layouts that exclude each other.
    """
    if sequence_parallel and inner_features == "yx":
        raise UserError("--inner-features", inner_features, "y or auto with --sequence-parallel")
    chosen: Precision = machine.half if precision == "auto" else precision
    machine.peak(chosen)
    return Job(
        shape,
        machine,
        batch,
        chosen,
        switches=switches(overlap),
        policy=policy,
        split=split,
        sequence_parallel=sequence_parallel,
        inner_features=inner_features,
    )


def command(model: str, job: Job, choice: Choice, seq: int | None) -> str:
    """The command that trains so, CONFIG.toml with the data aside."""
    grid = choice.grid
    free = "--bind-to none " if grid.devices == 2 else ""  # two processes are bound to a core each
    words = [f"mpirun {free}-n {grid.devices}" if grid.devices > 1 else "", "axonn-jax train CONFIG.toml"]
    words.append(f"--model.preset {model}" + (f" --model.seq_len {seq}" if seq else ""))
    words += [f"--model.layers {job.shape.layers}"] if job.shape.layers != preset(model).layers else []
    words += [
        f"--grid.{axis} {getattr(grid, axis)}" for axis in ("pipe", "data", "z", "y", "x") if getattr(grid, axis) > 1
    ]
    words.append(f"--train.global_batch {job.batch} --train.microbatches {choice.microbatches}")
    words.append(f"--memory.precision {job.precision} --memory.activations {choice.activations}")
    words += [f"--memory.gather {choice.gather}"] if choice.gather != "layer" else []
    words += ["--memory.offload optimizer"] if choice.offload else []
    words += ["--memory.zero 1"] if choice.zero else []
    words += ["--memory.sequence_parallel true"] if job.sequence_parallel else []
    words += [f"--train.inner_features {job.inner_features}"] if job.inner_features != "y" else []
    if grid.pipe > 1:
        words.append(f"--pipeline.policy {job.policy}")
        words += ["--pipeline.split_backward false"] if job.policy == "message" and not job.split else []
        words += [f"--pipeline.virtual_stages {choice.virtual_stages}"] if choice.virtual_stages > 1 else []
        words += [f"--pipeline.in_flight {choice.in_flight}"] if choice.in_flight else []
    return " ".join(word for word in words if word)


def chosen(job: Job, choice: Choice) -> dict[str, Any]:
    """The options of a choice beside its grid, by name."""
    return {
        "microbatch": choice.sequences(job.batch),
        "microbatches": choice.microbatches,
        "virtual_stages": choice.virtual_stages,
        "in_flight": in_flight(job, choice),
        "activations": choice.activations,
        "gather": choice.gather,
        "offload": "optimizer" if choice.offload else "none",
        "zero": choice.zero,
    }


def in_flight(job: Job, choice: Choice) -> int:
    """Microbatches that the message-driven policy has in flight; 0 under another."""
    layout = Layout(choice.grid.pipe, choice.microbatches, choice.virtual_stages)
    return (choice.in_flight or default_in_flight(layout)) if job.policy == "message" and layout.pipe > 1 else 0


def positive(flag: str, value: int | None) -> None:
    """Raises ``UserError`` unless the value is left out or a number that machines have of anything."""
    if value is not None and not 1 <= value <= MOST_DEVICES:
        raise UserError(flag, value, f"an integer of at least 1 and at most {MOST_DEVICES:,}")
