"""``axonn-jax simulate``: one step of a pipeline in virtual time, by the dispatchers that run real ones."""

import json
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Annotated, Any

from tyro.conf import UseAppendAction, arg

from axonn_jax.cli import planning
from axonn_jax.cli.request import SEQUENCES, Request, question
from axonn_jax.cli.simulate_text import text
from axonn_jax.cli.ticker import Ticker
from axonn_jax.errors import UserError
from axonn_jax.planner.disturb import Disturbance
from axonn_jax.planner.job import Estimate, Job
from axonn_jax.planner.steps import Baseline, Step, baselines, step


@dataclass(frozen=True, kw_only=True)
class Simulate(Request):
    """Run one step in virtual time: with jitter, slow ranks and failures, beside other schedules.

    What runs is the first row of `axonn-jax plan` for the same flags, in the time that it says if nothing is disturbed.
    """

    batch_tokens: Annotated[
        str | None, arg(metavar="STR", help_behavior_hint=f"(default: {SEQUENCES} sequences a device)")
    ] = None
    """Tokens a step over all devices: 16777216, or rounded, such as 16.8M."""
    layers: Annotated[int | None, arg(metavar="INT", help_behavior_hint="(default: the model's)")] = None
    """Number of blocks, so that very long pipelines can be simulated."""
    split_backward: bool = True
    """Policy message: gradients of weights are tasks of their own."""
    jitter: float = 0.0
    """Sigma of lognormal task and message times."""
    slow: UseAppendAction[tuple[str, ...]] = ()
    """A slow rank, such as 3:1.5 for rank 3 taking 1.5 times as long; repeat it for more."""
    fail: UseAppendAction[tuple[str, ...]] = ()
    """A rank that dies, such as 3:0.5 for rank 3 after 0.5 s of the step; repeat it for more."""
    replicas: int = 4
    """Pipelines of grid.data simulated where there is jitter; the step ends with the slowest."""
    seed: int = 0
    """Seed of the jitter."""
    baselines: bool = False
    """Also simulate static schedules with the same tasks, and tensor parallelism over one axis alone, in the same
    memory."""


def run(args: Simulate) -> int:
    """Simulates and prints; status 1 where a failure stops the step.

    Raises:
        UserError: a flag is wrong, or no such step is legal.
    """
    for flag in ("layers", "replicas"):
        planning.positive(f"--{flag}", getattr(args, flag))
    asked = question(args, layers=args.layers, split=args.split_backward)
    job, limit = asked.job, asked.limit
    by = Disturbance(args.jitter, _pairs("--slow", args.slow), _pairs("--fail", args.fail), seed=args.seed)
    with Ticker("comparing grids") as ticker:

        def told(what: str, tasks: int) -> Callable[[int], None]:
            ticker.now(what, tasks)
            return ticker.told

        try:
            found = asked.answer()
        except UserError:  # whether it fits is the plan's question: simulated it can be, and its memory shown
            found, limit = asked.answer(limited=False), float("inf")
        estimate = found.best[0]
        done = step(found.prices, estimate.choice, by, args.replicas, told, drawn=args.png is not None)
        beside = list[Baseline]()
        if args.baselines:
            beside += baselines(found.prices, estimate.choice, by, args.replicas, limit, asked.space, told)
        if args.png is not None:
            from axonn_jax.planner.picture import draw_timeline

            ticker.now("drawing")
            title = f"{args.model} on {args.devices} of {args.machine}, {args.policy}"
            title += f", {done.left_out:,} microbatches left out" if done.left_out else ""
            draw_timeline(done.slowest.simulation, args.png, title=title)
    figures = _figures(args, job, asked.limit, estimate, done, beside)
    print(json.dumps(figures) if args.json else text(figures, done, beside))
    return 0 if done.slowest.finished else 1


def _pairs(flag: str, given: tuple[str, ...]) -> dict[int, float]:
    pairs = {}
    for pair in given:
        found = re.fullmatch(r"(\d+):(\d+(?:\.\d*)?)", pair)
        if found is None:
            raise UserError(flag, pair, "RANK:AMOUNT, such as 3:1.5")
        pairs[int(found[1])] = float(found[2])
    return pairs


def _figures(
    args: Simulate, job: Job, limit: float, estimate: Estimate, done: Step, beside: list[Baseline]
) -> dict[str, Any]:
    simulation, choice = done.slowest.simulation, estimate.choice
    flops = job.flops / (choice.grid.devices * job.machine.peak(job.precision))
    return {
        "model": args.model,
        "machine": args.machine,
        "devices": args.devices,
        "batch_sequences": job.batch,
        "seq_len": job.shape.seq_len,
        "precision": job.precision,
        "sequence_parallel": job.sequence_parallel,
        "inner_features": job.inner_features,
        "grid": asdict(choice.grid),
        **planning.chosen(job, choice),
        "policy": job.policy,
        "finished": done.slowest.finished,
        "step_s": done.seconds,
        "pipeline_s": done.pipeline_s,
        "update_s": done.behind_s,
        "no_bubble_s": max(done.busy),
        "idle": done.idle,
        "mfu": flops / done.seconds if done.seconds else None,
        "memory_bytes": estimate.memory.total,
        "memory_limit_bytes": limit,
        "fits": estimate.memory.total <= limit,
        "replicas_s": done.replicas_s,
        "tasks": simulation.tasks,
        "left_out_microbatches": done.left_out,
        "ranks": [
            {"rank": rank, "busy_s": busy, "peak_live": simulation.peak_live[rank]}
            for rank, busy in enumerate(done.busy)
        ],
        "baselines_s": {one.name: one.seconds for one in beside},
        "baselines_memory_bytes": {one.name: one.memory_bytes for one in beside},
        "command": planning.command(args.model, job, choice, args.seq),
        **({"png": str(args.png)} if args.png is not None else {}),
    }
