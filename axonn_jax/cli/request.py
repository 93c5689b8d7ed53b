"""The flags that `plan` and `simulate` share, and the one question to the planner that they make."""

from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from tyro.conf import arg

from axonn_jax.cli import planning
from axonn_jax.cli.refusals import check_legal
from axonn_jax.errors import UserError
from axonn_jax.models.inner import InnerFeatures
from axonn_jax.planner.job import Job
from axonn_jax.planner.machine_file import load_machine
from axonn_jax.planner.search import Plan as Found
from axonn_jax.planner.search import search
from axonn_jax.planner.space import SEARCHED, Space
from axonn_jax.schedule.policies import Policy

SEQUENCES = 8
"""Sequences a device of a step where no batch is given."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """A model, a machine, and what is fixed of the choices on it."""

    model: str
    """Name of a published model (docs/config.md lists them)."""
    machine: str
    """Name of a machine, or the path of a machine file (docs/plan.md)."""
    devices: int
    """Number of devices: GPUs, or GCDs."""
    batch_tokens: str | None
    """Tokens a step over all devices: 16777216, or rounded, such as 16.8M."""
    seq: Annotated[int | None, arg(metavar="INT", help_behavior_hint="(default: the model's)")] = None
    """Tokens of a sequence."""
    grid: planning.Axes = field(default_factory=planning.Axes)
    """Axes that are fixed."""
    microbatch: Annotated[int | None, arg(metavar="INT", help_behavior_hint="(default: searched)")] = None
    """Sequences of a microbatch on a device."""
    activations: Literal["auto", "none", "full", "dots", "save_collectives", "offload"] = "auto"
    """What the backward pass computes again; auto: searched."""
    gather: Literal["auto", "layer", "pass", "step"] = "auto"
    """How long weights gathered over z live (memory.gather); auto: searched."""
    offload: Literal["auto", "none", "optimizer"] = "auto"
    """Whether optimizer state is on the host; auto: searched."""
    zero: Literal["auto", "0", "1"] = "auto"
    """Whether replicas share optimizer state (ZeRO-1); auto: searched."""
    sequence_parallel: bool = False
    """Whether the sequence of the residual stream is split over grid.y (memory.sequence_parallel)."""
    inner_features: InnerFeatures = "y"
    """What splits the features inside blocks (train.inner_features): y, yx or auto."""
    virtual_stages: Annotated[int | None, arg(metavar="INT", help_behavior_hint="(default: searched)")] = None
    """Stages each place of the pipe holds; more than one: pipelines alone are searched."""
    policy: Policy = "message"
    """Who decides which task a stage runs next."""
    precision: planning.Chosen = "auto"
    """Of compute; auto: the machine's half precision."""
    overlap: str = "all"
    """Collectives that run beside matmuls: all, none, or some of gathers,scatters,gradients,forward."""
    memory_limit: Annotated[str | None, arg(metavar="STR", help_behavior_hint="(default: what surely fits)")] = None
    """Memory of a device that may be used, such as 36GB."""
    png: Annotated[Path | None, arg(metavar="PATH", help_behavior_hint="(default: none)")] = None
    """Draw a picture of the answer into this file."""
    json: bool = False
    """Print one JSON object instead of the text."""


class Question(NamedTuple):
    """What the planner is asked."""

    job: Job
    devices: int
    space: Space
    limit: float
    """Bytes of a device's memory that may be used."""

    def answer(self, limited: bool = True) -> Found:
        """The search; `limited=False` takes no notice of the devices' memory. Raises ``UserError`` if nothing fits."""
        try:
            return search(self.job, self.devices, self.space, self.limit if limited else float("inf"))
        except UserError as error:
            if not limited or self.limit >= self.job.memory_limit():
                raise
            closest = str(error).partition("; ")[2]
            raise UserError("--memory-limit", f"{self.limit / 1e9:g}GB", f"an amount that fits; {closest}") from None


def question(args: Request, *, layers: int | None = None, split: bool = True) -> Question:
    """What the flags ask; `layers` replaces the model's, `split` is whether gradients of weights may be tasks.

    Raises:
        UserError: a flag is wrong, or flags exclude each other.
    """
    for flag in ("devices", "microbatch", "virtual_stages"):
        planning.positive(f"--{flag.replace('_', '-')}", getattr(args, flag))
    shape, machine = planning.model_shape(args.model, args.seq), load_machine(args.machine).shared(args.devices)
    shape = shape if layers is None else replace(shape, layers=layers)
    batch = SEQUENCES * args.devices
    if args.batch_tokens is not None:
        batch = planning.sequences(args.batch_tokens, shape.seq_len)
    layout = (args.sequence_parallel, args.inner_features)
    job = planning.job_of(shape, machine, batch, args.precision, args.overlap, args.policy, split, *layout)
    limit, space = planning.limit(args.memory_limit, job), _space(args)
    check_legal(job, args.devices, space)
    return Question(job, args.devices, space, limit)


def _space(args: Request) -> Space:
    axes, stages = args.grid.fixed(), args.virtual_stages
    if args.gather in ("pass", "step") and max(axes.get("pipe", 1), stages or 1) > 1:
        raise UserError("--gather", args.gather, "auto or layer where --grid.pipe or --virtual-stages is above 1")
    if stages is not None and stages > 1:
        rest = prod(size for axis, size in axes.items() if axis != "pipe")
        if axes.get("pipe") == 1 or ("pipe" not in axes and rest == args.devices):
            raise UserError("--virtual-stages", stages, "1 without a pipeline, which --grid.pipe above 1 makes")
        if args.policy == "1f1b":
            raise UserError("--virtual-stages", stages, "1 with --policy 1f1b; interleaved is its order for more")
    return Space(
        axes=axes,
        sequences=args.microbatch,
        activations=SEARCHED if args.activations == "auto" else (args.activations,),
        offload=(False, True) if args.offload == "auto" else (args.offload == "optimizer",),
        zero=(0, 1) if args.zero == "auto" else (int(args.zero),),
        virtual_stages=(1, 2, 4) if stages is None else (stages,),
        gather=("layer", "pass", "step") if args.gather == "auto" else (args.gather,),
    )
