"""Pictures of plans; matplotlib is imported when one is drawn."""

from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from axonn_jax.core.documents import new_figure, save_picture
from axonn_jax.core.errors import UserError
from axonn_jax.core.grid import GRID_AXES
from axonn_jax.planning.request import Estimate, PlanRequest
from axonn_jax.planning.search import MEMORY_KINDS, SearchResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def draw_plan(
    request: PlanRequest, plan: SearchResult, scaling: Sequence[tuple[int, float]], path: Path, *, title: str
) -> None:
    """Draw step times of the best grids by parts, their memory, time against memory, and scaling.

    Raises:
        UserError: the file cannot be written.
    """
    # Only --png needs matplotlib, so other plans do not pay for its import.
    from matplotlib import rc_context

    with rc_context({"font.size": 8.0, "lines.markersize": 4.0}):
        figure = new_figure(8, 7.2)
        figure.suptitle(title)
        _draw_panels(figure.subplots(2, 2), request, plan, scaling)
        try:
            save_picture(figure, path)
        except (OSError, ValueError) as error:
            raise UserError("--png", str(path), f"the path of a .png file that can be written; {error}") from None


def _draw_panels(
    panels: "Sequence[Sequence[Axes]]", request: PlanRequest, plan: SearchResult, scaling: Sequence[tuple[int, float]]
) -> None:
    shown = plan.in_order()[:8]
    names = [_name(estimate, request) for estimate in shown]
    _bars(panels[0][0], names, _parts(shown), "s a step", begin=_begin(shown))
    # The same kinds as in the search's messages, so that the picture and the texts agree.
    kinds = {kind: [getattr(estimate.memory, kind) / 1e9 for estimate in shown] for kind in MEMORY_KINDS}
    _bars(panels[0][1], names, kinds, "GB a device")
    front = panels[1][0]
    front.plot(
        [estimate.memory.total / 1e9 for estimate in plan.best],
        [estimate.step_s for estimate in plan.best],
        ".",
        color="0.6",
        label="best of a grid",
    )
    pareto = sorted(plan.pareto, key=lambda estimate: estimate.memory.total)
    front.step(
        [estimate.memory.total / 1e9 for estimate in pareto],
        [estimate.step_s for estimate in pareto],
        where="post",
        marker="o",
        label="Pareto set",
    )
    front.set_xlabel("GB a device")
    front.set_ylabel("s a step")
    front.legend()
    curve = panels[1][1]
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
    for panel in chain(*panels):
        panel.grid(alpha=0.3)


def _parts(shown: Sequence[Estimate]) -> dict[str, list[float]]:
    parts = {"compute": [estimate.compute_s for estimate in shown]}
    for axis in reversed(GRID_AXES):
        parts[f"exposed, {axis}"] = [estimate.exposed.get(axis, 0.0) for estimate in shown]
    parts["bubble"] = [estimate.bubble * estimate.step_s for estimate in shown]
    parts["optimizer"] = [estimate.update_s for estimate in shown]
    return {name: values for name, values in parts.items() if any(values)}


def _begin(shown: Sequence[Estimate]) -> float:
    """Return the start of the time axis: just below the shortest compute time, because grids differ above it."""
    least = 0.95 * min(estimate.compute_s for estimate in shown)
    return least if max(estimate.step_s for estimate in shown) < 2 * least else 0.0


def _bars(panel: "Axes", names: list[str], parts: dict[str, list[float]], label: str, begin: float = 0.0) -> None:
    starts = [0.0] * len(names)
    for name, values in parts.items():
        panel.barh(names, values, left=starts, label=name)
        starts = [a + b for a, b in zip(starts, values, strict=True)]
    panel.invert_yaxis()
    panel.set_xlim(begin, begin + 1.05 * (max(starts) - begin))
    panel.set_xlabel(f"{label}, from {begin:.3g} on" if begin else label)
    panel.legend(fontsize=7, ncols=3, loc="lower center", bbox_to_anchor=(0.4, 1.0), frameon=False, columnspacing=1.0)


def _name(estimate: Estimate, request: PlanRequest) -> str:
    grid = estimate.candidate.grid
    sizes = " ".join(f"{axis}{getattr(grid, axis)}" for axis in GRID_AXES if getattr(grid, axis) > 1)
    return (
        f"{sizes or 'one device'}\n{estimate.candidate.sequences(request.batch)} seq, {estimate.candidate.activations}"
    )
