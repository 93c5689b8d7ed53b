"""``axonn-jax simulate``: one step of a pipeline in virtual time, by the dispatchers that run real ones."""

import json
import re
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, Literal

from tyro.conf import UseAppendAction, arg

from axonn_jax.cli import planning
from axonn_jax.errors import UserError
from axonn_jax.models.inner import InnerFeatures
from axonn_jax.planner.baselines import tensor_1d
from axonn_jax.planner.cost import CostModel
from axonn_jax.planner.disturb import Disturbance, Outcome
from axonn_jax.planner.disturb import run as disturbed
from axonn_jax.planner.job import Estimate, Job
from axonn_jax.planner.machine_file import load_machine
from axonn_jax.planner.refine import stage_times
from axonn_jax.planner.search import search
from axonn_jax.planner.space import SEARCHED, Space
from axonn_jax.schedule.policies import Policy


@dataclass(frozen=True)
class Simulate:
    """Run one pipelined step in virtual time: with jitter, slow ranks and failures, beside other schedules.

    Task times come from the planner's model. What is not fixed by a flag is what `axonn-jax plan` would choose.
    """

    model: str
    """Name of a published model (docs/config.md lists them)."""
    machine: str
    """Name of a machine, or the path of a machine file (docs/plan.md)."""
    devices: int
    """Number of devices."""
    batch_tokens: Annotated[str | None, arg(metavar="STR", help_behavior_hint="(default: 8 microbatches a stage)")] = (
        None
    )
    """Tokens a step over all devices."""
    seq: Annotated[int | None, arg(metavar="INT", help_behavior_hint="(default: the model's)")] = None
    """Tokens of a sequence."""
    layers: Annotated[int | None, arg(metavar="INT", help_behavior_hint="(default: the model's)")] = None
    """Number of blocks, so that very long pipelines can be simulated."""
    grid: planning.Axes = field(default_factory=planning.Axes)
    """Axes that are fixed."""
    microbatch: Annotated[int | None, arg(metavar="INT", help_behavior_hint="(default: searched)")] = None
    """Sequences of a microbatch on a device."""
    activations: Literal["auto", "none", "full", "dots", "save_collectives", "offload"] = "auto"
    """What the backward pass computes again."""
    sequence_parallel: bool = False
    """Whether the sequence of the residual stream is split over grid.y (memory.sequence_parallel)."""
    inner_features: InnerFeatures = "y"
    """What splits the features inside blocks (train.inner_features): y, yx or auto."""
    virtual_stages: Annotated[int | None, arg(metavar="INT", help_behavior_hint="(default: searched)")] = None
    """Stages each place of the pipe holds."""
    policy: Policy = "message"
    """Who decides which task a stage runs next."""
    split_backward: bool = True
    """Policy message: gradients of weights are tasks of their own."""
    precision: planning.Chosen = "auto"
    """Of compute; auto: the machine's half precision."""
    overlap: str = "all"
    """Collectives that run beside matmuls: all, none, or some of gathers,scatters,gradients,forward."""
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
    """Also simulate static schedules with the same tasks, and price tensor parallelism over one axis alone."""
    png: Annotated[Path | None, arg(metavar="PATH", help_behavior_hint="(default: none)")] = None
    """Draw the time line into this file."""
    json: bool = False
    """Print one JSON object instead of the text."""


def run(args: Simulate) -> int:
    """Simulates and prints; status 1 where a failure stops the step.

    Raises:
        UserError: a flag is wrong, or no such step is legal.
    """
    for flag in ("devices", "microbatch", "virtual_stages", "layers", "replicas"):
        planning.positive(f"--{flag.replace('_', '-')}", getattr(args, flag))
    shape, machine = planning.model_shape(args.model, args.seq), load_machine(args.machine).shared(args.devices)
    shape = shape if args.layers is None else replace(shape, layers=args.layers)
    axes = args.grid.fixed()
    batch = args.devices * 8 if args.batch_tokens is None else planning.sequences(args.batch_tokens, shape.seq_len)
    job = planning.job_of(
        shape,
        machine,
        batch,
        args.precision,
        args.overlap,
        args.policy,
        args.split_backward,
        args.sequence_parallel,
        args.inner_features,
    )
    space = Space(
        axes=axes,
        sequences=args.microbatch,
        activations=SEARCHED if args.activations == "auto" else (args.activations,),
        virtual_stages=(1, 2, 4) if args.virtual_stages is None else (args.virtual_stages,),
    )
    try:
        estimate = search(job, args.devices, space, job.memory_limit()).best[0]
    except UserError:  # whether it fits is the plan's question: simulated it can be, and its memory shown
        estimate = search(job, args.devices, space, float("inf")).best[0]
    model = CostModel(job)
    times = stage_times(model, estimate.choice)
    grid = estimate.choice.grid
    by = Disturbance(
        args.jitter, _pairs("--slow", args.slow), _pairs("--fail", args.fail), grid.x * grid.y * grid.z, args.seed
    )
    split = job.splits(estimate.choice.activations)
    count = min(args.replicas, grid.data) if args.jitter else 1
    outcomes = [disturbed(times, job.policy, split, by, replica, estimate.choice.in_flight) for replica in range(count)]
    slowest = max(outcomes, key=lambda one: (not one.finished, one.simulation.makespan))
    if args.png is not None:
        from axonn_jax.planner.picture import draw_timeline

        draw_timeline(
            slowest.simulation, args.png, title=f"{args.model} on {args.devices} of {args.machine}, {args.policy}"
        )
    beside = _baselines(job, args.devices, estimate, by, model) if args.baselines else {}
    figures = _figures(args, job, estimate, model, outcomes, slowest, beside)
    print(json.dumps(figures) if args.json else _text(figures, slowest))
    return 0 if slowest.finished else 1


def _pairs(flag: str, given: tuple[str, ...]) -> dict[int, float]:
    pairs = {}
    for text in given:
        found = re.fullmatch(r"(\d+):(\d+(?:\.\d*)?)", text)
        if found is None:
            raise UserError(flag, text, "RANK:AMOUNT, such as 3:1.5")
        pairs[int(found[1])] = float(found[2])
    return pairs


def _outside(model: CostModel, estimate: Estimate) -> float:
    """Seconds of the update and of reductions once a step, behind the pipeline."""
    return model.once_s(estimate.choice.grid, estimate.choice.place)


def _baselines(job: Job, devices: int, one: Estimate, by: Disturbance, model: CostModel) -> dict[str, float]:
    """Step times of static schedules with the same tasks and disturbance, and of one-dimensional tensor parallelism."""
    times, found = stage_times(model, one.choice), {}
    outside = _outside(model, one)
    for policy in ("gpipe", "interleaved", "zero-bubble"):
        outcome = disturbed(times, policy, False, by)
        if outcome.finished:
            name = "1f1b (Megatron-LM)" if policy == "interleaved" and one.choice.virtual_stages == 1 else policy
            found[name] = outcome.simulation.makespan + outside
    try:
        found["1-D tensor parallelism"] = tensor_1d(job, devices, float("inf")).step_s
    except UserError:  # the model's heads do not divide over so many devices
        return found
    return found


def _figures(
    args: Simulate,
    job: Job,
    estimate: Estimate,
    model: CostModel,
    outcomes: list[Outcome],
    slowest: Outcome,
    beside: dict[str, float],
) -> dict[str, Any]:
    simulation, choice = slowest.simulation, estimate.choice
    outside = _outside(model, estimate)
    step = simulation.makespan + outside if slowest.finished else None
    flops = job.flops / (choice.grid.devices * job.machine.peak(job.precision))
    return {
        "model": args.model,
        "machine": args.machine,
        "devices": args.devices,
        "grid": asdict(choice.grid),
        "microbatches": choice.microbatches,
        "microbatch": choice.sequences(job.batch),
        "virtual_stages": choice.virtual_stages,
        "activations": choice.activations,
        "in_flight": planning.in_flight(job, choice),
        "policy": job.policy,
        "finished": slowest.finished,
        "step_s": step,
        "pipeline_s": simulation.makespan,
        "update_s": outside,
        "no_bubble_s": simulation.no_bubble,
        "bubble": simulation.idle_fraction,
        "mfu": flops / step if step else None,
        "memory_bytes": estimate.memory.total,
        "fits": estimate.memory.total <= job.memory_limit(),
        "replicas_s": [one.simulation.makespan for one in outcomes],
        "tasks": len(simulation.spans),
        "ranks": [
            {"rank": rank, "busy_s": busy, "peak_live": simulation.peak_live[rank]}
            for rank, busy in enumerate(simulation.busy)
        ],
        "baselines_s": beside,
        **({"png": str(args.png)} if args.png is not None else {}),
    }


def _text(figures: dict[str, Any], slowest: Outcome) -> str:
    grid = " x ".join(f"{axis} {size}" for axis, size in figures["grid"].items())
    lines = [
        f"{figures['model']} on {figures['devices']} of {figures['machine']}: {grid}",
        f"{figures['microbatches']} microbatches of {figures['microbatch']} sequences a device, "
        f"{figures['virtual_stages']} virtual stages, activations {figures['activations']}, policy {figures['policy']}",
        "",
    ]
    if figures["finished"]:
        lines += [
            f"step      {figures['step_s']:,.4f} s ({figures['mfu']:.1%} of peak), "
            f"of it {figures['update_s']:,.4f} s behind the pipeline",
            f"pipeline  {figures['pipeline_s']:,.4f} s, bubble {figures['bubble']:.1%}; "
            f"the busiest rank works {figures['no_bubble_s']:,.4f} s",
        ]
        if len(figures["replicas_s"]) > 1:
            spread = figures["replicas_s"]
            lines.append(
                f"replicas  {min(spread):,.4f} to {max(spread):,.4f} s, mean {fmean(spread):,.4f}; the slowest counts"
            )
    else:
        done = len(slowest.simulation.spans)
        layout = slowest.simulation.layout
        per = 3 if any(span.task.kind.value == "W" for span in slowest.simulation.spans) else 2
        lines.append(
            f"The step does not end: after {slowest.stalled_at:,.4f} s nothing moves any more, "
            f"{done} of {per * layout.stages * layout.microbatches} tasks done. "
            "All of it is lost; a run resumes from its checkpoint."
        )
    peaks = [rank["peak_live"] for rank in figures["ranks"]]
    fits = "fits" if figures["fits"] else "does NOT fit"
    lines.append(
        f"memory    {figures['memory_bytes'] / 1e9:.1f} GB a device ({fits}); activations alive at most {max(peaks)}"
    )
    lines += [
        f"{name:24} {seconds:,.4f} s ({_times(figures, seconds)})" for name, seconds in figures["baselines_s"].items()
    ]
    lines += [figures["png"]] if "png" in figures else []
    return "\n".join(lines)


def _times(figures: dict[str, Any], seconds: float) -> str:
    return f"{seconds / figures['step_s']:.3f} times as long" if figures["step_s"] else "without a failure"
