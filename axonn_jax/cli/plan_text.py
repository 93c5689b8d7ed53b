"""A plan as text: the table, the reasons, and the command to run."""

from dataclasses import asdict
from typing import Any

from axonn_jax.cli import planning
from axonn_jax.memory.pinned import GIB, LIMIT, XLAS_OWN
from axonn_jax.planner.explain import explain
from axonn_jax.planner.job import SHORT, Estimate, Job
from axonn_jax.planner.ranking import TIE
from axonn_jax.planner.search import Plan
from axonn_jax.planner.space import AXES


def text(model: str, machine: str, seq: int | None, job: Job, found: Plan, limit: float, devices: int, top: int) -> str:
    """What `axonn-jax plan` prints: the `top` best, why, and what was left out."""
    shown = found.best[:top]
    lines = [
        f"{model} ({job.shape.params() / 1e9:.1f} B parameters) on {devices} x {job.machine.device.kind} "
        f"of {machine}: "
        f"{job.batch} sequences of {job.shape.seq_len} tokens a step, {job.precision}, {_limited(job, limit)}",
        "",
        *_table(job, shown),
        "",
    ]
    best = shown[0]
    ties = [one for one in shown[1:] if one.step_s < best.step_s * (1 + TIE)]
    if ties:
        lines.append(f"The first {len(ties) + 1} are a tie: their times differ by less than {TIE:.0%}.")
    lines += [f"Why the first: {' '.join(explain(job, found, best))}", ""]
    lines += ["Communication of the first, s a step (exposed + hidden):"]
    lines += [
        f"  {axis:4}  {best.exposed.get(axis, 0.0):9.3f} + {best.hidden.get(axis, 0.0):.3f}"
        for axis, seconds in best.comm_s.items()
        if seconds > 0
    ] or ["  none"]
    memory = {name: size for name, size in asdict(best.memory).items() if name != "host"}
    lines.append(
        "Memory of the first, GB a device: " + ", ".join(f"{name} {size / 1e9:.1f}" for name, size in memory.items())
    )
    if best.memory.host:
        lines.append(f"  and {best.memory.host / 1e9:.1f} GB on the host for each device, one a process")
    if best.memory.host > XLAS_OWN * GIB:
        lines.append(f"  more than the {XLAS_OWN} GiB that XLA lets a process pin: the run raises {LIMIT}")
    if len(found.pareto) > 1:
        lines += ["", "Slower but smaller (time and memory of what nothing beats in both):"]
        lines += [
            f"  {one.step_s:9.3f} s  {one.memory.total / 1e9:6.1f} GB  {_named(job, one)}" for one in found.pareto[:6]
        ]
    if found.rejected:
        lines += ["", "Left out:"]
        lines += [f"  {one.grid}: {one.why}" for one in _few(found)]
    lines += [
        "",
        "To run the first (CONFIG.toml names the data):",
        f"  {planning.command(model, job, best.choice, seq)}",
    ]
    return "\n".join(lines)


def _limited(job: Job, limit: float) -> str:
    """The memory that may be used, and what it is made of where no flag says it."""
    text, device = f"{limit / 1e9:.1f} GB a device", job.machine.device
    if limit != job.memory_limit():
        return text
    margin = f"{1 - SHORT:.0%} of the {device.program_bytes / 1e9:.1f} that a run gets"
    return f"{text} ({margin} of {device.memory_bytes / 1e9:.1f})"


def _few(found: Plan) -> list[Any]:
    """The grids that came closest to fitting, and the rules."""
    single = [one for one in found.rejected if one.grid.startswith("pipe")]
    rules = [one for one in found.rejected if not one.grid.startswith("pipe")]
    return [*single[:3], *rules]


def _named(job: Job, one: Estimate) -> str:
    choice = one.choice
    grid = (
        " x ".join(f"{axis} {getattr(choice.grid, axis)}" for axis in AXES if getattr(choice.grid, axis) > 1)
        or "one device"
    )
    extra = [choice.activations] + ([f"gather {choice.gather}"] if choice.gather != "layer" else [])
    extra += (["offload"] if choice.offload else []) + (["zero 1"] if choice.zero else [])
    return f"{grid}, microbatch {choice.sequences(job.batch)}, {', '.join(extra)}"


def _table(job: Job, shown: list[Estimate]) -> list[str]:
    heads = (
        *AXES,
        "micro",
        "stages",
        "activations",
        "gather",
        "offload",
        "zero",
        "step, s",
        "mfu",
        "exposed, s",
        "bubble",
        "memory, GB",
    )
    rows = [
        (
            *(str(getattr(one.choice.grid, axis)) for axis in AXES),
            f"{one.choice.microbatches} x {one.choice.sequences(job.batch)}",
            str(one.choice.virtual_stages),
            one.choice.activations,
            one.choice.gather,
            "optimizer" if one.choice.offload else "none",
            str(one.choice.zero),
            f"{one.step_s:,.3f}",
            f"{one.peak_share(job):.1%}",
            f"{one.exposed_s:,.3f}",
            f"{one.bubble:.1%}",
            f"{one.memory.total / 1e9:.1f}",
        )
        for one in shown
    ]
    widths = [max(len(row[at]) for row in (heads, *rows)) for at in range(len(heads))]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in (heads, *rows)]
