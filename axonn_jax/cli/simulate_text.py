"""A simulated step as text: what ran, how long it took, what else could have, and the command to train so."""

from statistics import fmean
from typing import Any

from axonn_jax.planner.steps import Baseline, Step


def text(figures: dict[str, Any], done: Step, beside: list[Baseline]) -> str:
    """What `axonn-jax simulate` prints."""
    lines = [*_choice(figures), "", *(_finished(figures, done) if figures["finished"] else [_stalled(done)])]
    lines += [_memory(figures)]
    lines += [f"{one.name:24} {_beside(figures, one)}" for one in beside]
    lines += [figures["png"]] if "png" in figures else []
    if figures["fits"]:
        lines += ["", "To run it (CONFIG.toml names the data):", f"  {figures['command']}"]
    return "\n".join(lines)


def _choice(figures: dict[str, Any]) -> list[str]:
    grid = " x ".join(f"{axis} {size}" for axis, size in figures["grid"].items())
    options = [
        f"{_count(figures['microbatches'], 'microbatch', 'microbatches')} of "
        f"{_count(figures['microbatch'], 'sequence')} a device",
        *([f"{figures['in_flight']} in flight"] if figures["in_flight"] else []),
        _count(figures["virtual_stages"], "virtual stage"),
        *(f"{name} {figures[name]}" for name in ("activations", "gather", "offload", "zero", "policy", "precision")),
        *(["sequence parallel"] if figures["sequence_parallel"] else []),
        *([f"inner features {figures['inner_features']}"] if figures["inner_features"] != "y" else []),
    ]
    return [f"{figures['model']} on {figures['devices']} of {figures['machine']}: {grid}", ", ".join(options)]


def _finished(figures: dict[str, Any], done: Step) -> list[str]:
    behind = "the pipeline" if figures["grid"]["pipe"] > 1 else "the last microbatch"
    lines = [
        f"step      {figures['step_s']:,.4f} s ({figures['mfu']:.1%} of peak), "
        f"of it {figures['update_s']:,.4f} s behind {behind}",
    ]
    if figures["grid"]["pipe"] > 1:
        lines += [
            f"pipeline  {figures['pipeline_s']:,.4f} s, ranks idle {figures['idle']:.1%} of it; "
            f"the busiest rank works {figures['no_bubble_s']:,.4f} s",
        ]
    if done.left_out:
        lines.append(
            f"          of its steady stretch {_count(done.left_out, 'microbatch', 'microbatches')} "
            "were not simulated: each takes as long as those beside it"
        )
    spread = done.replicas_s
    if len(spread) > 1:
        lines.append(
            f"replicas  {min(spread):,.4f} to {max(spread):,.4f} s, mean {fmean(spread):,.4f}; the slowest counts"
        )
    return lines


def _stalled(done: Step) -> str:
    simulation = done.slowest.simulation
    layout = simulation.layout
    each = 3 if any(span.task.kind.value == "W" for span in simulation.spans) else 2
    return (
        f"The step does not end: after {done.slowest.stalled_at:,.4f} s nothing moves any more, "
        f"{simulation.tasks:,} of {each * layout.stages * layout.microbatches:,} tasks done. "
        "All of it is lost; a run resumes from its checkpoint."
    )


def _memory(figures: dict[str, Any]) -> str:
    limit = f"{figures['memory_limit_bytes'] / 1e9:.1f} GB"
    fits = f"fits {limit}"
    if not figures["fits"]:
        fits = f"does NOT fit {limit}, nor does anything else: this is the fastest without a limit"
    peak = max(rank["peak_live"] for rank in figures["ranks"])
    return f"memory    {figures['memory_bytes'] / 1e9:.1f} GB a device ({fits}); activations alive at most {peak}"


def _beside(figures: dict[str, Any], one: Baseline) -> str:
    if one.seconds is None:
        return one.why
    said = f"{one.seconds / figures['step_s']:.3f} times as long" if figures["step_s"] else "over before the failure"
    return f"{one.seconds:,.4f} s ({said})"


def _count(number: int, one: str, several: str = "") -> str:
    return f"{number:,} {one if number == 1 else several or one + 's'}"
