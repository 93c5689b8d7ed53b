"""``axonn-jax plan``: search for the best grids of a model on a machine, without using the machine."""

import json
from dataclasses import asdict, dataclass, replace
from typing import Any, get_args

from axonn_jax.cli.plan.flags import Count, PlanFlags, Question, ask, candidate_fields, command, question_fields
from axonn_jax.core.distributed.gpu_limits import GIB, LIMIT, XLA_DEFAULT_GIB
from axonn_jax.core.errors import UserError
from axonn_jax.core.grid import GRID_AXES
from axonn_jax.core.ops.costs import Phase
from axonn_jax.core.terminal import Ticker, table
from axonn_jax.planning.report import explain, step_collectives
from axonn_jax.planning.request import SHORT, Estimate, PlanRequest
from axonn_jax.planning.search import TIE, SearchResult
from axonn_jax.planning.space import grid_axes


@dataclass(frozen=True, kw_only=True)
class Plan(PlanFlags):
    """Find the best grids for a model on a machine: time, memory, communication, and the command to run.

    Predictions need neither the machine nor jax. docs/plan.md describes the model and its errors.
    """

    top: Count = 5
    """Configurations to show."""
    explain: bool = False
    """List the collectives of a step of the first configuration, by phase, with their axes and bytes."""


def run(args: Plan) -> int:
    """Search for the best grids and print them.

    Raises:
        UserError: A flag is wrong, or no grid is legal or fits.
    """
    question = ask(args)
    with Ticker("comparing grids") as ticker:
        result = question.answer()
        if args.png is not None:
            from axonn_jax.planning.picture import draw_plan
            from axonn_jax.planning.report import scaling

            ticker.now("drawing")
            curve = scaling(_fewer(args, question.request), result.best, question.space, question.limit)
            draw_plan(question.request, result, curve, args.png, title=f"{args.model} on {args.machine}")
    print(json.dumps(_figures(args, question, result)) if args.json else text(args, question, result))
    return 0


def _fewer(args: Plan, request: PlanRequest) -> list[PlanRequest]:
    # Requests on a half, a quarter, ... of the devices, down to a sixteenth or until the flags no longer allow it. The
    # batch stays that of all devices, for a strong-scaling curve; by default it would shrink with their number.
    requests, devices = [], args.devices
    while devices % 2 == 0 and devices > max(1, args.devices // 16):
        devices //= 2
        try:
            requests.append(replace(ask(replace(args, devices=devices)).request, batch=request.batch))
        except UserError:
            break
    return requests


def _config(request: PlanRequest, estimate: Estimate) -> dict[str, object]:
    candidate = estimate.candidate
    return {
        **asdict(candidate.grid),
        **candidate_fields(request, candidate),
        "step_s": estimate.step_s,
        "mfu": estimate.peak_share(request),
        "hfu": estimate.peak_share(request, recompute=candidate.activations in ("full", "offload")),
        "compute_s": estimate.compute_s,
        "update_s": estimate.update_s,
        "comm_s": estimate.comm_s,
        "exposed_comm_s": estimate.exposed_s,
        "exposed_by_axis_s": {axis: estimate.exposed.get(axis, 0.0) for axis in estimate.comm_s},
        "memory_bytes": estimate.memory.total,
        "memory": asdict(estimate.memory),
        "bubble": estimate.bubble,
        "simulated": estimate.simulated,
    }


def _figures(args: Plan, question: Question, result: SearchResult) -> dict[str, object]:
    request = question.request
    return {
        **question_fields(args, request),
        "memory_limit_bytes": question.limit,
        "configs": [
            {
                **_config(request, estimate),
                "why": explain(request, result, estimate),
                "command": command(question.model, request, estimate.candidate),
            }
            for estimate in result.in_order()[: args.top]
        ],
        **({"collectives": _collectives(request, result.in_order()[0])} if args.explain else {}),
        "pareto": [_config(request, estimate) for estimate in result.pareto],
        "rejected": [asdict(rejected) for rejected in result.rejected],
        "examined": result.examined,
    }


def _collectives(request: PlanRequest, estimate: Estimate) -> list[dict[str, Any]]:
    collectives = sorted(step_collectives(request, estimate.candidate), key=lambda op: get_args(Phase).index(op.phase))
    heads = ("phase", "kind", "axes", "layer", "times", "bytes")
    rows = ((op.phase, op.kind, op.over, op.name, op.times, float(op.bytes)) for op in collectives)
    return [dict(zip(heads, row, strict=True)) for row in rows]


def _explained(request: PlanRequest, estimate: Estimate) -> list[str]:
    collectives, grid = _collectives(request, estimate), estimate.candidate.grid
    heads = ("phase", "collective", "axes", "layer", "times", "MB")
    rows = [(*list(op.values())[:4], f"{op['times']:,}", f"{op['bytes'] / 1e6:,.3f}") for op in collectives]
    rows.append(("all", "", "", "", "", f"{sum(op['bytes'] for op in collectives) / 1e6:,.3f}"))
    stages = f", on all {grid.pipe} stages together" if grid.pipe > 1 else ""
    zero = ["ZeRO-1 makes a reduce-scatter and an all-gather of an update's all-reduce over replicas."]
    title = f"Collectives of the first, in MB sent by a device in a step{stages}:"
    return ["", title, *table(heads, rows, left=(0, 1, 2, 3)), *(zero if estimate.candidate.zero else [])]


def text(args: Plan, question: Question, result: SearchResult) -> str:
    """Return the output of `axonn-jax plan`: the best grids, the reasons for the first, and the rejected ones."""
    request, shown = question.request, result.in_order()[: args.top]
    settings = [f"density {request.density:g}"] if request.density < 1.0 else []
    settings += [f"adapters of rank {request.lora.rank}"] if request.lora.adapts else []
    settings += ["packed rows"] if request.packed else []
    settings += [_limited(request, question.limit)]
    lines = [
        f"{args.model} ({request.shape.params() / 1e9:.1f} B parameters) on {args.devices} x "
        f"{request.machine.device.kind} of {args.machine}: {request.batch} sequences of "
        f"{request.shape.seq_len} tokens ({request.batch * request.shape.seq_len:,}) a step, {request.precision}, "
        f"{', '.join(settings)}",
        "",
        *_table(request, shown),
        "",
    ]
    best = shown[0]
    if result.alike > 1:
        lines.append(
            f"{result.alike} grids are as good, their times within {TIE:.0%}: the simplest of them is first, then the "
            "fastest."
        )
    lines += [f"Why the first: {' '.join(explain(request, result, best))}", ""]
    lines += ["Communication of the first, s a step (exposed + hidden):"]
    lines += [
        f"  {axis:4}  {best.exposed.get(axis, 0.0):9.3f} + {best.hidden.get(axis, 0.0):.3f}"
        for axis, seconds in best.comm_s.items()
        if seconds > 0
    ] or ["  none"]
    memory = {name: size for name, size in asdict(best.memory).items() if name not in ("host", "staying")}
    lines.append(
        "Memory of the first, GB a device: " + ", ".join(f"{name} {size / 1e9:.1f}" for name, size in memory.items())
    )
    if best.memory.host:
        on_host, stays = best.memory.host - best.memory.staying, f"{best.memory.staying / 1e9:.1f} GB"
        line = f"  and {on_host / 1e9:.1f} GB on the host for each device, one a process"
        line += f"; {stays} of what is offloaded have room on the device and stay there" if best.memory.staying else ""
        lines.append(line)
    if best.memory.host > XLA_DEFAULT_GIB * GIB:
        lines.append(f"  more than the {XLA_DEFAULT_GIB} GiB that XLA lets a process pin: the run raises {LIMIT}")
    lines += _explained(request, best) if args.explain else []
    smaller = [estimate for estimate in result.pareto if estimate.memory.total < best.memory.total]
    if smaller:
        lines += ["", "With less memory than the first (no other configuration beats these in both time and memory):"]
        lines += [
            f"  {estimate.step_s:9.3f} s  {estimate.memory.total / 1e9:6.1f} GB  {_label(request, estimate)}"
            for estimate in smaller[:6]
        ]
    if result.rejected:
        lines += ["", "Left out:"]
        # The list begins with single grids that do not fit, closest first; the counts of grids by rule follow.
        closest = [rejected for rejected in result.rejected if rejected.grid.startswith("pipe")][:3]
        rules = [rejected for rejected in result.rejected if not rejected.grid.startswith("pipe")]
        lines += [f"  {rejected.grid}: {rejected.why}" for rejected in (*closest, *rules)]
    lines += [
        "",
        f"To run the first (CONFIG.toml names the data{' and the base in checkpoint.weights' * request.lora.adapts}):",
        f"  {command(question.model, request, best.candidate)}",
    ]
    return "\n".join(lines)


def _limited(request: PlanRequest, limit: float) -> str:
    # Explains the limit unless a flag has set it.
    text, device = f"{limit / 1e9:.1f} GB a device", request.machine.device
    if limit != request.memory_limit():
        return text
    margin = f"{1 - SHORT:.0%} of the {device.program_bytes / 1e9:.1f} that a run gets"
    return f"{text} ({margin} of {device.memory_bytes / 1e9:.1f})"


def _label(request: PlanRequest, estimate: Estimate) -> str:
    candidate = estimate.candidate
    sizes = {axis: getattr(candidate.grid, axis) for axis in GRID_AXES}
    grid = " x ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1) or "one device"
    extra: list[str] = [candidate.activations]
    extra += [f"reshard_after {candidate.reshard_after}"] if candidate.keeps_weights else []
    extra += (["offload"] if candidate.offload else []) + (["zero 1"] if candidate.zero else [])
    return f"{grid}, microbatch {candidate.sequences(request.batch)}, {', '.join(extra)}"


def _table(request: PlanRequest, shown: list[Estimate]) -> list[str]:
    axes, options = grid_axes(request.shape), ("virtual_stages", "activations", "reshard_after", "offload", "zero")
    heads = (
        *(*axes, "micro", "stages", "activations", "reshard after", "offload", "zero"),
        *("step, s", "mfu", "exposed, s", "bubble", "memory, GB"),
    )
    rows = [
        (
            *(str(getattr(estimate.candidate.grid, axis)) for axis in axes),
            f"{estimate.candidate.microbatches} x {estimate.candidate.sequences(request.batch)}",
            *(str(candidate_fields(request, estimate.candidate)[name]) for name in options),
            f"{estimate.step_s:,.3f}",
            f"{estimate.peak_share(request):.1%}",
            f"{estimate.exposed_s:,.3f}",
            f"{estimate.bubble:.1%}",
            f"{estimate.memory.total / 1e9:.1f}",
        )
        for estimate in shown
    ]
    return table(heads, rows)
