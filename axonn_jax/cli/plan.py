"""``axonn-jax plan``: which grid to use, before a node-hour is spent."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from tyro.conf import arg

from axonn_jax.cli import planning
from axonn_jax.cli.plan_text import text
from axonn_jax.errors import UserError
from axonn_jax.models.inner import InnerFeatures
from axonn_jax.planner import published
from axonn_jax.planner.explain import explain
from axonn_jax.planner.job import Estimate, Job
from axonn_jax.planner.machine import Machine
from axonn_jax.planner.machine_file import load_machine
from axonn_jax.planner.search import Plan as Found
from axonn_jax.planner.search import search
from axonn_jax.planner.space import AXES, SEARCHED, Space
from axonn_jax.schedule.policies import Policy


@dataclass(frozen=True)
class Plan:
    """Find the best grids for a model on a machine: time, memory, communication, and the command to run.

    Predictions need neither the machine nor jax. docs/plan.md says what is modelled and how far to trust it.
    """

    model: str
    """Name of a published model (docs/config.md lists them)."""
    machine: str
    """Name of a machine, or the path of a machine file (docs/plan.md)."""
    devices: int
    """Number of devices: GPUs, or GCDs."""
    batch_tokens: str
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
    """Stages each place of the pipe holds."""
    policy: Policy = "message"
    """Who decides which task a stage runs next."""
    precision: planning.Chosen = "auto"
    """Of compute; auto: the machine's half precision."""
    overlap: str = "all"
    """Collectives that run beside matmuls: all, none, or some of gathers,scatters,gradients,forward."""
    memory_limit: Annotated[str | None, arg(metavar="STR", help_behavior_hint="(default: what surely fits)")] = None
    """Memory of a device that may be used, such as 36GB."""
    cost_model: Literal["corrected", "published"] = "corrected"
    """corrected: all of the above; published: the communication model of SC 24 as it was, and its search."""
    min_tensor: Annotated[int | None, arg(metavar="INT", help_behavior_hint="(default: the authors', else 1)")] = None
    """Smallest x * y * z; published only."""
    top: int = 5
    """Configurations to show."""
    png: Annotated[Path | None, arg(metavar="PATH", help_behavior_hint="(default: none)")] = None
    """Draw step times, memory against time, and scaling into this file."""
    json: bool = False
    """Print one JSON object instead of the text."""


def run(args: Plan) -> int:
    """Searches and prints.

    Raises:
        UserError: a flag is wrong, or nothing is legal or fits.
    """
    for flag in ("devices", "top", "microbatch", "virtual_stages", "min_tensor"):
        planning.positive(f"--{flag.replace('_', '-')}", getattr(args, flag))
    shape, machine = planning.model_shape(args.model, args.seq), load_machine(args.machine).shared(args.devices)
    batch = planning.sequences(args.batch_tokens, shape.seq_len)
    split = args.sequence_parallel
    layout = (split, args.inner_features)
    job = planning.job_of(shape, machine, batch, args.precision, args.overlap, args.policy, True, *layout)
    if args.cost_model == "published":
        if split:
            raise UserError("--sequence-parallel", split, "left out with --cost-model published, which has none")
        if args.inner_features != "y":
            raise UserError(
                "--inner-features", args.inner_features, "y with --cost-model published, which has no other"
            )
        return _published(args, job, machine)
    limit = planning.limit(args.memory_limit, job)
    found = search(job, args.devices, _space(args), limit)
    if args.png is not None:
        from axonn_jax.planner.picture import draw_plan

        draw_plan(job, found, _scaling(args, job, limit), args.png, title=f"{args.model} on {args.machine}")
    print(
        json.dumps(_figures(args, job, found, limit))
        if args.json
        else text(args.model, args.machine, args.seq, job, found, limit, args.devices, args.top)
    )
    return 0


def _space(args: Plan) -> Space:
    axes = args.grid.fixed()
    if args.devices % _product(axes.values()):
        raise UserError(
            "--devices", args.devices, f"a multiple of the fixed axes' product, which is {_product(axes.values())}"
        )
    if args.gather in ("pass", "step") and axes.get("pipe", 1) > 1:
        raise UserError("--gather", args.gather, "auto or layer where --grid.pipe is above 1")
    return Space(
        axes=axes,
        sequences=args.microbatch,
        activations=SEARCHED if args.activations == "auto" else (args.activations,),
        offload=(False, True) if args.offload == "auto" else (args.offload == "optimizer",),
        zero=(0, 1) if args.zero == "auto" else (int(args.zero),),
        virtual_stages=(1, 2, 4) if args.virtual_stages is None else (args.virtual_stages,),
        gather=("layer", "pass", "step") if args.gather == "auto" else (args.gather,),
    )


def _product(sizes: Any) -> int:
    product = 1
    for size in sizes:
        product *= size
    return product


def _scaling(args: Plan, job: Job, limit: float) -> list[tuple[int, float]]:
    """Devices and the best step time, for halves and quarters of the devices down to where nothing fits."""
    points, devices = [], args.devices
    while devices >= max(1, args.devices // 16) and devices >= 1:
        try:
            points.append((devices, search(job, devices, _space(args), limit).best[0].step_s))
        except UserError:
            break
        if devices % 2:
            break
        devices //= 2
    return points


def _config(job: Job, one: Estimate) -> dict[str, Any]:
    choice = one.choice
    return {
        **{axis: getattr(choice.grid, axis) for axis in AXES},
        "microbatch": choice.sequences(job.batch),
        "microbatches": choice.microbatches,
        "virtual_stages": choice.virtual_stages,
        "in_flight": planning.in_flight(job, choice),
        "activations": choice.activations,
        "gather": choice.gather,
        "offload": "optimizer" if choice.offload else "none",
        "zero": choice.zero,
        "step_s": one.step_s,
        "mfu": one.peak_share(job),
        "hfu": one.peak_share(job, recompute=choice.activations in ("full", "offload")),
        "compute_s": one.compute_s,
        "update_s": one.update_s,
        "comm_s": one.comm_s,
        "exposed_comm_s": one.exposed_s,
        "exposed_by_axis_s": {axis: one.exposed.get(axis, 0.0) for axis in one.comm_s},
        "memory_bytes": one.memory.total,
        "memory": asdict(one.memory),
        "bubble": one.bubble,
        "simulated": one.simulated,
    }


def _figures(args: Plan, job: Job, found: Found, limit: float) -> dict[str, Any]:
    return {
        "model": args.model,
        "machine": args.machine,
        "devices": args.devices,
        "batch_sequences": job.batch,
        "seq_len": job.shape.seq_len,
        "precision": job.precision,
        "cost_model": "corrected",
        "sequence_parallel": job.sequence_parallel,
        "inner_features": job.inner_features,
        "memory_limit_bytes": limit,
        "configs": [
            {
                **_config(job, one),
                "why": explain(job, found, one),
                "command": planning.command(args.model, job, one.choice, args.seq),
            }
            for one in found.best[: args.top]
        ],
        "pareto": [_config(job, one) for one in found.pareto],
        "rejected": [asdict(one) for one in found.rejected],
        "examined": found.examined,
    }


def _published(args: Plan, job: Job, machine: Machine) -> int:
    least = args.min_tensor or published.MIN_TENSOR.get(args.model, 1)
    found = published.search(job.shape, machine, args.devices, job.batch, min_tensor=least)
    if args.json:
        configs = [
            {
                **{axis: getattr(one.grid, axis) for axis in AXES},
                "microbatch": job.batch // one.grid.batch_shards,
                "step_s": one.total_s,
                "mfu": None,
                "comm_s": {**one.comm_s, "pipe": 0.0},
                "exposed_comm_s": one.total_s,
                "memory_bytes": None,
                "bubble": 0.0,
            }
            for one in found[: args.top]
        ]
        named = {"model": args.model, "machine": args.machine, "devices": args.devices, "cost_model": "published"}
        print(
            json.dumps({**named, "min_tensor": least, "configs": configs, "rejected": [], "batch_sequences": job.batch})
        )
        return 0
    print(
        f"{args.model} on {args.devices} of {args.machine}, {job.batch} sequences: "
        f"communication alone, as published (x*y*z >= {least})\n"
    )
    print("     data        z        y        x   comm, s")
    for one in found[: args.top]:
        print("".join(f"{getattr(one.grid, axis):9}" for axis in AXES[1:]) + f"{one.total_s:10.4f}")
    return 0
