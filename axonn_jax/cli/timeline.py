"""``axonn-jax timeline``: picture and figures of the tasks of a pipelined run's stages."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

from axonn_jax.cli.arguments import Arg
from axonn_jax.core.errors import UserError
from axonn_jax.core.options import PipelinePolicy
from axonn_jax.core.terminal import table
from axonn_jax.pipe.timeline.spans import KINDS, Span, last_complete_step, ranks_of, usage, window
from axonn_jax.pipe.timeline.trace import TIMELINE, read_trace
from axonn_jax.planning.simulate.replay import Replay, replay, task_runs

_SHOWN = 20


@dataclass(frozen=True)
class Timeline:
    """Draw timeline.png from the timeline.json of a pipelined run, and print the use of the stages' time.

    timeline.json itself opens in Perfetto (https://ui.perfetto.dev) and in chrome://tracing.
    """

    run_dir: Annotated[Path, Arg(positional="RUN_DIR")]
    """A directory left by a pipelined `axonn-jax train`."""
    step: Annotated[int | None, Arg(default="the last whole one")] = None
    """The step to show, one of the last few of the run."""
    replay: Annotated[PipelinePolicy | None, Arg(default="none")] = None
    """Policy for a simulation of the step with the measured task times; the run's policy or another one."""
    json: bool = False
    """Print one JSON object instead of the table."""


def run(args: Timeline) -> int:
    """Draw the picture and print the figures.

    Raises:
        UserError: The directory is missing or has no timeline, or the step is not recorded.
    """
    if not args.run_dir.is_dir():
        raise UserError("RUN_DIR", str(args.run_dir), "an existing directory left by a pipelined `axonn-jax train`")
    recorded = read_trace(args.run_dir / TIMELINE)
    # Skip steps that were stopped before their first task ended.
    steps = sorted({span.step for span in recorded if span.is_task and span.end > span.start})
    if not steps:
        raise UserError(TIMELINE, str(args.run_dir / TIMELINE), "a trace with at least one step; this one has none")
    step = last_complete_step(recorded) if args.step is None else args.step
    if step not in steps:
        raise UserError("--step", step, f"a step that was recorded: {_listed(steps)}")
    played = None if args.replay is None else _replayed(recorded, step, args.replay)
    from axonn_jax.pipe.timeline.picture import PICTURE, draw

    picture = args.run_dir / PICTURE
    try:
        draw(recorded, picture, title=args.run_dir.resolve().name, step=step)
    except OSError as error:
        raise UserError("RUN_DIR", str(args.run_dir), f"a directory to write {PICTURE} in ({error.strerror})") from None
    figures = _figures([span for span in recorded if span.step == step], ranks_of(recorded))
    if played is not None:
        figures |= {"replay": asdict(played)}
    if args.json:
        files = {"trace": str(args.run_dir / TIMELINE), "png": str(picture)}
        print(json.dumps({"step": step, "steps": steps, **figures, **files}))
        return 0
    print(f"step {step} (recorded: {_listed(steps)}), {figures['step_s'] * 1e3:,.3f} ms\n")
    print(_table(figures))
    if played is not None:
        print(
            f"\ntasks {played.measured_s * 1e3:,.3f} ms; simulated under {played.policy}: "
            f"{played.simulated_s * 1e3:,.3f} ms ({played.simulated_s / played.measured_s - 1:+.1%})"
        )
    print(f"\n{picture}\n{args.run_dir / TIMELINE} opens in https://ui.perfetto.dev")
    return 0


def _listed(steps: Sequence[int]) -> str:
    return ", ".join(["..."] * (len(steps) > _SHOWN) + [str(step) for step in steps[-_SHOWN:]])


def _replayed(recorded: Sequence[Span], step: int, policy: PipelinePolicy) -> Replay:
    # The optimizer runs after the pipeline and is not part of a schedule.
    tasks = [span for span in recorded if span.step == step and span.is_task and span.kind != "optimizer"]
    try:
        return replay(chain(*(task_runs(span.name, span.rank, span.start, span.end) for span in tasks)), policy)
    except (KeyError, ValueError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError("--step", step, f"a whole step to replay; this one has {error}") from None


def _figures(spans: Sequence[Span], ranks: int) -> dict[str, Any]:
    start, end = window(spans)
    used = usage(spans, ranks)
    return {
        "step_s": end - start,
        "idle": fmean(use.idle for use in used),
        "exposed_communication": fmean(use.exposed for use in used),
        "shares": {kind: fmean(use.shares[kind] for use in used) for kind in KINDS},
        "stages": [
            {
                "stage": use.rank,
                "idle": use.idle,
                "exposed_communication": use.exposed,
                "shares": dict(use.shares),
            }
            for use in used
        ],
    }


def _table(figures: dict[str, Any]) -> str:
    kinds = [kind for kind in KINDS if figures["shares"][kind] > 0]
    heads = ["stage", "idle", *(kind.replace("_", " ") for kind in kinds)]
    rows = []
    for name, entry in [*((str(stage["stage"]), stage) for stage in figures["stages"]), ("all", figures)]:
        row = [name, f"{entry['idle']:.1%}"]
        for kind in kinds:
            exposed = f" ({entry['exposed_communication']:.1%} exposed)" if kind == "communication" else ""
            row.append(f"{entry['shares'][kind]:.1%}{exposed}")
        rows.append(row)
    return "\n".join(table(heads, rows))
