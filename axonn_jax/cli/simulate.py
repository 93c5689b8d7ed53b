"""``axonn-jax simulate``: one step of a pipeline in virtual time, run by the dispatchers of real steps."""

import json
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Annotated, Any

from axonn_jax.cli.arguments import Arg
from axonn_jax.cli.plan.flags import Count, PlanFlags, Question, ask, candidate_fields, command, question_fields
from axonn_jax.core.adapters.config import step_flops
from axonn_jax.core.errors import UserError
from axonn_jax.core.terminal import Ticker
from axonn_jax.planning.request import Estimate
from axonn_jax.planning.simulate.perturb import Perturbation
from axonn_jax.planning.simulate.simulator import Simulation
from axonn_jax.planning.steps import Baseline, SimulatedStep, baselines, step


@dataclass(frozen=True, kw_only=True)
class Simulate(PlanFlags):
    """Run one step in virtual time: with jitter, slow ranks and failures, beside other schedules.

    The step is the first row of `axonn-jax plan` for the same flags, and takes the row's time if nothing is disturbed.
    """

    jitter: float = 0.0
    """Sigma of lognormal task and message times."""
    slow: Annotated[tuple[str, ...], Arg(repeat=True)] = ()
    """Slow rank, such as 3:1.5 for rank 3 taking 1.5 times as long; repeat for more ranks."""
    fail: Annotated[tuple[str, ...], Arg(repeat=True)] = ()
    """Dying rank, such as 3:0.5 for rank 3 after 0.5 s of the step; repeat for more ranks."""
    replicas: Count = 4
    """Pipelines of grid.data simulated where there is jitter; the step ends with the slowest."""
    seed: int = 0
    """Seed of the jitter."""
    baselines: bool = False
    """Also simulate static schedules with the same tasks, and tensor parallelism over one axis alone, in the same
    memory."""


def run(args: Simulate) -> int:
    """Simulate a step and print the result; the exit status is 1 if a failure stops the step.

    Raises:
        UserError: A flag is wrong, or no grid is legal.
    """
    question = ask(args)
    limit = question.limit
    by = Perturbation(args.jitter, _pairs("--slow", args.slow), _pairs("--fail", args.fail), seed=args.seed)
    with Ticker("comparing grids") as ticker:

        def begin(phase: str, tasks: int) -> Callable[[int], None]:
            ticker.now(phase, tasks)
            return ticker.done

        try:
            result = question.answer()
        except UserError:
            # A step that does not fit can still be simulated, and its memory shown; `plan` decides what fits.
            result, limit = question.answer(limited=False), float("inf")
        estimate = result.in_order()[0]
        outcome = step(result.prices, estimate.candidate, by, args.replicas, begin, drawn=args.png is not None)
        compared = list[Baseline]()
        if args.baselines:
            compared += baselines(result.prices, estimate.candidate, by, args.replicas, limit, question.space, begin)
        if args.png is not None:
            from axonn_jax.pipe.timeline.picture import draw

            ticker.now("drawing")
            title = f"{args.model} on {args.devices} of {args.machine}, {args.policy}"
            skipped = outcome.slowest.skipped_microbatches
            title += f", {skipped:,} microbatches left out" if skipped else ""
            try:
                draw(outcome.slowest.timeline(), args.png, title, simulated=True)
            except (OSError, ValueError) as error:
                accepted = f"the path of a .png file that can be written; {error}"
                raise UserError("--png", str(args.png), accepted) from None
    figures = _figures(args, question, estimate, outcome, compared)
    print(json.dumps(figures) if args.json else text(figures, outcome, compared))
    return 0 if outcome.slowest.finished else 1


def _pairs(flag: str, values: tuple[str, ...]) -> dict[int, float]:
    pairs = {}
    for pair in values:
        match = re.fullmatch(r"(\d+):(\d+(?:\.\d*)?)", pair)
        if match is None:
            raise UserError(flag, pair, "RANK:AMOUNT, such as 3:1.5")
        pairs[int(match[1])] = float(match[2])
    return pairs


def _figures(
    args: Simulate, question: Question, estimate: Estimate, outcome: SimulatedStep, compared: list[Baseline]
) -> dict[str, object]:
    simulation, candidate = outcome.slowest, estimate.candidate
    request, limit, model = question.request, question.limit, question.model
    flops = step_flops(request.shape, request.lora, request.batch)
    flops_s = flops / (candidate.grid.devices * request.machine.peak(request.precision))
    return {
        **question_fields(args, request),
        "grid": asdict(candidate.grid),
        **candidate_fields(request, candidate),
        "policy": request.policy,
        "finished": simulation.finished,
        "step_s": outcome.seconds,
        "pipeline_s": simulation.makespan,
        "update_s": outcome.behind_s,
        "no_bubble_s": max(simulation.busy),
        "idle": simulation.idle_fraction,
        "mfu": flops_s / outcome.seconds if outcome.seconds else None,
        "memory_bytes": estimate.memory.total,
        "memory_limit_bytes": limit,
        "fits": estimate.memory.total <= limit,
        "replicas_s": outcome.replicas_s,
        "tasks": simulation.tasks,
        "left_out_microbatches": simulation.skipped_microbatches,
        "ranks": [
            {"rank": rank, "busy_s": busy, "peak_live": simulation.peak_live[rank]}
            for rank, busy in enumerate(simulation.busy)
        ],
        "baselines_s": {baseline.name: baseline.seconds for baseline in compared},
        "baselines_memory_bytes": {baseline.name: baseline.memory_bytes for baseline in compared},
        "command": command(model, request, candidate),
        **({"png": str(args.png)} if args.png is not None else {}),
    }


def text(figures: dict[str, Any], outcome: SimulatedStep, compared: list[Baseline]) -> str:
    """Return the output of `axonn-jax simulate`."""
    outcome_lines = _finished(figures) if figures["finished"] else [_stalled(outcome.slowest)]
    lines = [*_candidate_text(figures), "", *outcome_lines]
    lines += [_memory(figures)]
    lines += [f"{baseline.name:24} {_baseline_text(figures, baseline)}" for baseline in compared]
    lines += [figures["png"]] if "png" in figures else []
    if figures["fits"]:
        lines += ["", "To run it (CONFIG.toml names the data):", f"  {figures['command']}"]
    return "\n".join(lines)


def _candidate_text(figures: dict[str, Any]) -> list[str]:
    grid = " x ".join(f"{axis} {size}" for axis, size in figures["grid"].items())
    options = [
        f"{_count(figures['microbatches'], 'microbatch', 'microbatches')} of "
        f"{_count(figures['microbatch'], 'sequence')} a device",
        *([f"{figures['in_flight']} in flight"] if figures["in_flight"] else []),
        _count(figures["virtual_stages"], "virtual stage"),
        *(
            f"{name} {figures[name]}"
            for name in ("activations", "reshard_after", "offload", "zero", "policy", "precision")
        ),
        *(["sequence parallel"] if figures["sequence_parallel"] else []),
        *([f"density {figures['density']:g}"] if figures["density"] < 1.0 else []),
        *([f"residual_comm {figures['residual_comm']}"] if figures["residual_comm"] != "all_reduce" else []),
    ]
    return [f"{figures['model']} on {figures['devices']} of {figures['machine']}: {grid}", ", ".join(options)]


def _finished(figures: dict[str, Any]) -> list[str]:
    behind = "the pipeline" if figures["grid"]["pipe"] > 1 else "the last microbatch"
    lines = [
        f"step      {figures['step_s']:,.4f} s ({figures['mfu']:.1%} of peak), "
        f"with {figures['update_s']:,.4f} s after {behind}",
    ]
    if figures["grid"]["pipe"] > 1:
        lines += [
            f"pipeline  {figures['pipeline_s']:,.4f} s, ranks idle {figures['idle']:.1%} of it; "
            f"the busiest rank works {figures['no_bubble_s']:,.4f} s",
        ]
    if skipped := figures["left_out_microbatches"]:
        lines.append(
            f"          of its steady phase {_count(skipped, 'microbatch', 'microbatches')} "
            "were extrapolated, not simulated"
        )
    if len(spread := figures["replicas_s"]) > 1:
        lines.append(
            f"replicas  {min(spread):,.4f} to {max(spread):,.4f} s, mean {fmean(spread):,.4f}; the slowest counts"
        )
    return lines


def _stalled(simulation: Simulation) -> str:
    pipe_shape = simulation.pipe_shape
    # Schedules that split the backward pass have a third task, the weight gradients.
    tasks_per_microbatch = 3 if any(span.task.kind.value == "W" for span in simulation.spans) else 2
    return (
        f"The step does not end: after {simulation.makespan:,.4f} s all ranks stall, with "
        f"{simulation.tasks:,} of {tasks_per_microbatch * pipe_shape.stages * pipe_shape.microbatches:,} tasks done. "
        "The step is lost; a run resumes from its checkpoint."
    )


def _memory(figures: dict[str, Any]) -> str:
    limit = f"{figures['memory_limit_bytes'] / 1e9:.1f} GB"
    fits = f"fits {limit}"
    if not figures["fits"]:
        fits = f"does NOT fit {limit}, and no other configuration does: this is the fastest without a limit"
    peak = max(rank["peak_live"] for rank in figures["ranks"])
    return f"memory    {figures['memory_bytes'] / 1e9:.1f} GB a device ({fits}); activations alive at most {peak}"


def _baseline_text(figures: dict[str, Any], baseline: Baseline) -> str:
    if baseline.seconds is None:
        return baseline.why
    ratio = (
        f"{baseline.seconds / figures['step_s']:.3f} times as long" if figures["step_s"] else "over before the failure"
    )
    return f"{baseline.seconds:,.4f} s ({ratio})"


def _count(number: int, singular: str, plural: str = "") -> str:
    return f"{number:,} {singular if number == 1 else plural or singular + 's'}"
