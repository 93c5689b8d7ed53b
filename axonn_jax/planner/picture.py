"""Pictures of plans and simulated steps; matplotlib is imported when one is drawn."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from axonn_jax.errors import UserError
from axonn_jax.planner.job import Estimate, Job
from axonn_jax.planner.search import MEMORY_KINDS, Plan
from axonn_jax.planner.simulator import Simulation
from axonn_jax.schedule.tasks import Kind

_COLOURS = {
    Kind.FORWARD: "tab:blue",
    Kind.BACKWARD: "tab:orange",
    Kind.BACKWARD_INPUT: "tab:orange",
    Kind.BACKWARD_WEIGHT: "tab:green",
}
_NAMES = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}
_COLUMNS = 4000  # pixels of a time line
_AXES = ("x", "y", "z", "data", "pipe")


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def _save(figure: Any, path: Path) -> None:
    try:
        figure.savefig(path, dpi=110)
    except (OSError, ValueError) as error:
        raise UserError("--png", str(path), f"the path of a .png file that can be written; {error}") from None


def draw_plan(job: Job, plan: Plan, scaling: Sequence[tuple[int, float]], path: Path, *, title: str) -> None:
    """Step times of the best grids by what they go to, their memory, time against memory, and scaling.

    Raises:
        UserError: the file cannot be written.
    """
    plt = _pyplot()
    shown = plan.best[:8]
    figure, panels = plt.subplots(2, 2, figsize=(14, 9), layout="constrained")
    figure.suptitle(title)
    names = [_name(one, job) for one in shown]
    _bars(panels[0, 0], names, _parts(shown), "s a step")
    kinds = {kind: [getattr(one.memory, kind) / 1e9 for one in shown] for kind in MEMORY_KINDS}
    _bars(panels[0, 1], names, kinds, "GB a device")
    front = panels[1, 0]
    front.plot(
        [one.memory.total / 1e9 for one in plan.best],
        [one.step_s for one in plan.best],
        ".",
        color="0.6",
        label="best of a grid",
    )
    pareto = sorted(plan.pareto, key=lambda one: one.memory.total)
    front.step(
        [one.memory.total / 1e9 for one in pareto],
        [one.step_s for one in pareto],
        where="post",
        marker="o",
        label="Pareto set",
    )
    front.set_xlabel("GB a device")
    front.set_ylabel("s a step")
    front.legend()
    curve = panels[1, 1]
    if scaling:
        devices, seconds = zip(*sorted(scaling), strict=True)
        curve.loglog(devices, seconds, "o-", base=2, label="predicted")
        curve.loglog(
            devices, [seconds[0] * devices[0] / count for count in devices], "--", base=2, color="0.5", label="linear"
        )
        curve.legend()
        curve.set_xticks(devices, [f"{count:,}" for count in devices])
        curve.yaxis.set_major_formatter("{x:g}")
    curve.set_xlabel("devices")
    curve.set_ylabel("s a step, best grid, same batch")
    for panel in panels.flat:
        panel.grid(alpha=0.3)
    _save(figure, path)
    plt.close(figure)


def _parts(shown: Sequence[Estimate]) -> dict[str, list[float]]:
    parts = {"compute": [one.compute_s for one in shown]}
    for axis in _AXES:
        parts[f"exposed, {axis}"] = [one.exposed.get(axis, 0.0) for one in shown]
    parts["bubble"] = [one.bubble * one.step_s for one in shown]
    parts["optimizer"] = [one.update_s for one in shown]
    return {name: values for name, values in parts.items() if any(values)}


def _bars(panel: Any, names: list[str], parts: dict[str, list[float]], label: str) -> None:
    left = [0.0] * len(names)
    for name, values in parts.items():
        panel.barh(names, values, left=left, label=name)
        left = [a + b for a, b in zip(left, values, strict=True)]
    panel.invert_yaxis()
    panel.set_xlabel(label)
    panel.legend(fontsize=7, ncols=4, loc="lower center", bbox_to_anchor=(0.5, 1.0))


def _name(one: Estimate, job: Job) -> str:
    grid = one.choice.grid
    sizes = " ".join(
        f"{axis}{getattr(grid, axis)}" for axis in ("pipe", "data", "z", "y", "x") if getattr(grid, axis) > 1
    )
    return f"{sizes or 'one device'}\n{one.choice.sequences(job.batch)} seq, {one.choice.activations}"


def draw_timeline(simulation: Simulation, path: Path, *, title: str) -> None:
    """A row a rank, its tasks coloured by kind, white where it waits; as an image, so that millions of tasks fit.

    Raises:
        UserError: the file cannot be written.
    """
    import numpy as np
    from matplotlib.colors import to_rgb
    from matplotlib.patches import Patch
    from matplotlib.ticker import MaxNLocator

    plt = _pyplot()
    ranks, end = simulation.layout.pipe, simulation.makespan or 1.0
    picture = np.ones((ranks, _COLUMNS, 3))
    colours = {kind: np.array(to_rgb(colour)) for kind, colour in _COLOURS.items()}
    for span in simulation.spans:
        first, last = int(span.start / end * _COLUMNS), int(span.end / end * _COLUMNS)
        shade = 1.0 if span.task.microbatch % 2 else 0.8  # neighbours can be told apart
        picture[span.rank, first : max(last, first + 1)] = colours[span.task.kind] * shade
    figure, panel = plt.subplots(figsize=(15, min(12.0, 2.0 + 0.3 * ranks)), layout="constrained")
    panel.imshow(picture, aspect="auto", interpolation="nearest", extent=(0.0, end, ranks - 0.5, -0.5))
    panel.set_xlabel("s")
    panel.set_ylabel("rank")
    panel.yaxis.set_major_locator(MaxNLocator(integer=True))
    panel.set_title(f"{title}: {end:,.3f} s, idle {simulation.idle_fraction:.1%}", loc="left")
    used = sorted({span.task.kind for span in simulation.spans})
    panel.legend(
        handles=[Patch(color=_COLOURS[kind], label=_NAMES[kind.value]) for kind in used],
        loc="lower right",
        bbox_to_anchor=(1.0, 1.0),
        ncols=len(used),
        fontsize=8,
    )
    _save(figure, path)
    plt.close(figure)
