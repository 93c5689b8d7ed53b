"""``axonn-jax plan``: which grid to use, before a node-hour is spent."""

import json
from dataclasses import MISSING, Field, asdict, dataclass, fields, replace
from typing import Annotated, Any, Literal

from tyro.conf import arg

from axonn_jax.cli import planning
from axonn_jax.cli.plan_text import text
from axonn_jax.cli.request import Request, question
from axonn_jax.cli.ticker import Ticker
from axonn_jax.errors import UserError
from axonn_jax.planner import published
from axonn_jax.planner.explain import explain
from axonn_jax.planner.job import Estimate, Job
from axonn_jax.planner.machine_file import load_machine
from axonn_jax.planner.search import Plan as Found
from axonn_jax.planner.space import AXES


@dataclass(frozen=True, kw_only=True)
class Plan(Request):
    """Find the best grids for a model on a machine: time, memory, communication, and the command to run.

    Predictions need neither the machine nor jax. docs/plan.md says what is modelled and how far to trust it.
    """

    batch_tokens: str
    """Tokens a step over all devices: 16777216, or rounded, such as 16.8M."""
    cost_model: Literal["corrected", "published"] = "corrected"
    """corrected: all of the above; published: the communication model of SC 24 as it was, and its search."""
    min_tensor: Annotated[int | None, arg(metavar="INT", help_behavior_hint="(default: the authors', else 1)")] = None
    """Smallest x * y * z; published only."""
    top: int = 5
    """Configurations to show."""


_PUBLISHED = {"model", "machine", "devices", "batch_tokens", "seq", "cost_model", "min_tensor", "top", "json"}
"""What the published cost model takes notice of."""


def run(args: Plan) -> int:
    """Searches and prints.

    Raises:
        UserError: a flag is wrong, or nothing is legal or fits.
    """
    for flag in ("top", "min_tensor"):
        planning.positive(f"--{flag.replace('_', '-')}", getattr(args, flag))
    if args.cost_model == "published":
        return _published(args)
    if args.min_tensor is not None:
        raise UserError("--min-tensor", args.min_tensor, "left out without --cost-model published, which alone has it")
    asked = question(args)
    with Ticker("comparing grids") as ticker:
        found = asked.answer()
        if args.png is not None:
            from axonn_jax.planner.picture import draw_plan
            from axonn_jax.planner.scaling import scaling

            ticker.now("drawing")
            curve = scaling(_fewer(args), found.best, asked.space, asked.limit)
            draw_plan(asked.job, found, curve, args.png, title=f"{args.model} on {args.machine}")
    job, limit = asked.job, asked.limit
    print(
        json.dumps(_figures(args, job, found, limit))
        if args.json
        else text(args.model, args.machine, args.seq, job, found, limit, args.devices, args.top)
    )
    return 0


def _fewer(args: Plan) -> list[Job]:
    """The job on a half, a quarter, ... of the devices, as far as the flags allow and down to a sixteenth."""
    jobs, devices = [], args.devices
    while devices % 2 == 0 and devices > max(1, args.devices // 16):
        devices //= 2
        try:
            jobs.append(question(replace(args, devices=devices)).job)
        except UserError:
            break
    return jobs


def _config(job: Job, one: Estimate) -> dict[str, Any]:
    choice = one.choice
    return {
        **{axis: getattr(choice.grid, axis) for axis in AXES},
        **planning.chosen(job, choice),
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


def _published(args: Plan) -> int:
    for flag_of in fields(args):
        if flag_of.name not in _PUBLISHED and getattr(args, flag_of.name) != _default(flag_of):
            flag, value = f"--{flag_of.name.replace('_', '-')}", getattr(args, flag_of.name)
            if isinstance(value, planning.Axes):
                axis, value = next(iter(value.fixed().items()))
                flag += f".{axis}"
            raise UserError(flag, value, "left out with --cost-model published, which takes no notice of it")
    planning.positive("--devices", args.devices)
    shape, machine = planning.model_shape(args.model, args.seq), load_machine(args.machine).shared(args.devices)
    batch = planning.sequences(args.batch_tokens, shape.seq_len)
    least = args.min_tensor or published.MIN_TENSOR.get(args.model, 1)
    found = published.search(shape, machine, args.devices, batch, min_tensor=least)
    if args.json:
        configs = [
            {
                **{axis: getattr(one.grid, axis) for axis in AXES},
                "microbatch": batch // one.grid.batch_shards,
                "step_s": one.total_s,
                "mfu": None,
                "comm_s": {**one.comm_s, "pipe": 0.0},
                "exposed_comm_s": one.total_s,
                "memory_bytes": None,
                "bubble": None,
            }
            for one in found[: args.top]
        ]
        named = {"model": args.model, "machine": args.machine, "devices": args.devices, "cost_model": "published"}
        print(json.dumps({**named, "min_tensor": least, "configs": configs, "rejected": [], "batch_sequences": batch}))
        return 0
    print(
        f"{args.model} on {args.devices} of {args.machine}, {batch} sequences: "
        f"communication alone, as published (x*y*z >= {least})\n"
    )
    print("     data        z        y        x   comm, s")
    for one in found[: args.top]:
        print("".join(f"{getattr(one.grid, axis):9}" for axis in AXES[1:]) + f"{one.total_s:10.4f}")
    return 0


def _default(one: Field[Any]) -> object:
    return one.default if one.default_factory is MISSING else one.default_factory()
