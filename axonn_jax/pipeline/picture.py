"""The picture of a measured timeline: a row a stage, one step."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from axonn_jax.documents import replace_whole
from axonn_jax.pipeline.timeline import KINDS, Kind, Span, last_whole_step, ranks_of, usage, window

PICTURE = "timeline.png"

_IDLE = "#e9e9ec"
_INK = "#22252b"
# A row's parts, in rows: its tasks, and the strip of its communication below them.
_TASKS = (-0.42, 0.66)
_STRIP = (0.28, 0.13)
_MIDDLE = _TASKS[0] + _TASKS[1] / 2
_DPI = 150
_LEGEND_ROW = 0.19  # inches
# More take many seconds, and are hardly legible.
_MOST_NUMBERS, _MOST_LABELS = 4000, 128


def _color(kind: Kind) -> str:
    """Okabe and Ito's colours, which the colour-blind tell apart."""
    colors: dict[Kind, str] = {
        "forward": "#0072b2",
        "backward": "#e69f00",
        "input_gradient": "#d55e00",
        "weight_gradient": "#009e73",
        "forward_and_backward": "#56b4e9",
        "forward_and_input_gradient": "#f0e442",
        "communication": "#cc79a7",
        "optimizer": "#4d4d4d",
    }
    return colors[kind]


def draw(spans: Sequence[Span], path: Path, title: str | None = None, *, step: int | None = None) -> None:
    """Draws one step as a PNG, the last whole one unless `step` says which; the title ends with its idle share.

    Tasks bear the number of their microbatch where it fits; virtual stages of a rank differ in shade. What lies outside
    the time from the first task to the end of the last is not shown.

    Raises:
        ValueError: there is no task in that step.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    step = last_whole_step(spans) if step is None else step
    ranks = ranks_of(spans)
    spans = [span for span in spans if span.step == step]
    start, end = window(spans)
    if end <= start:
        raise ValueError(f"no tasks in step {step} to draw")
    spans = [span for span in spans if span.end > start and span.start < end]
    used = usage(spans, ranks)
    figure_width = _width(min(_usual_widths(spans).values(), default=end - start) / (end - start))
    figure = Figure(figsize=(figure_width, 1.55 + ranks * min(0.62, 9.0 / ranks + 0.1)), layout="constrained", dpi=_DPI)
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.set_xlim(0, (end - start) * 1e3)
    axes.set_ylim(ranks - 0.5, -0.5)
    _decorate(axes, [one.idle for one in used])
    mean = sum(one.idle for one in used) / ranks
    heading = f"step {step}: {_milliseconds(end - start)}, idle {mean:.1%}"
    axes.set_title(
        f"{title} \N{EM DASH} {heading}" if title else heading, fontsize=12, color=_INK, pad=10, parse_math=False
    )
    _boxes(axes, spans, start)
    _legend(figure, [kind for kind in KINDS if any(span.kind == kind for span in spans)])
    figure.draw_without_rendering()  # the layout decides how wide a box is
    _numbers(axes, [span for span in spans if span.is_task], start)
    png = io.BytesIO()
    figure.savefig(png, format="png")
    replace_whole(path, png.getvalue())


def _width(share: float) -> float:
    """Inches for the picture, from the share of it that the usual task of the shortest kind takes."""
    share = max(share, 1e-6)  # tasks of no length make no difference
    upright, turned = 0.19 / share, 0.115 / share  # room for two digits, side by side and above each other
    return max(10.0, upright if upright <= 16 else min(turned, 26.0))


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:,.{0 if seconds >= 1 else 1 if seconds >= 0.01 else 3}f} ms"


def _decorate(axes: Any, idle: Sequence[float]) -> None:
    """Axes: the stages on the left, their idle shares on the right, the time below."""
    ranks = range(len(idle))
    size = 9 if len(idle) <= 8 else 8
    middles = [rank + _MIDDLE for rank in ranks]
    axes.barh(middles, axes.get_xlim()[1], color=_IDLE, height=_TASKS[1], linewidth=0, zorder=0)
    shown = ranks[:: -(-len(ranks) // _MOST_LABELS)]
    places = [middles[rank] for rank in shown]
    axes.set_yticks(places, [f"stage {rank}" for rank in shown], fontsize=size, color=_INK)
    right = axes.secondary_yaxis("right")
    right.set_yticks(places, [f"{idle[rank]:.0%} idle" for rank in shown], fontsize=size, color="#5b606b")
    for side in (axes, right):
        side.tick_params(axis="y", length=0)
        for spine in side.spines.values():
            spine.set_visible(False)
    axes.spines["bottom"].set(visible=True, color="#9aa0ab")
    axes.tick_params(axis="x", color="#9aa0ab", labelsize=9)
    axes.set_xlabel("time (ms)", fontsize=9, color=_INK)


def _boxes(axes: Any, spans: Sequence[Span], start: float) -> None:
    from matplotlib.collections import PolyCollection

    for tasks, (top, height) in ((True, _TASKS), (False, _STRIP)):
        shown = [span for span in spans if span.is_task == tasks]
        corners = []
        for span in shown:
            left, right = ((time - start) * 1e3 for time in (span.start, span.end))
            low, high = span.rank + top, span.rank + top + height
            corners.append([(left, low), (right, low), (right, high), (left, high)])
        faces = _faces(shown)
        # A white seam parts tasks; the strip has edges of its own colour, or short messages would vanish.
        edges, seam = ("white", 0.4) if tasks else (faces, 0.5)
        boxes = PolyCollection(corners, facecolors=faces, edgecolors=edges, linewidths=seam, zorder=2)
        axes.add_collection(boxes, autolim=False)


def _faces(spans: Sequence[Span]) -> list[tuple[float, float, float]]:
    """Each span's colour; the further virtual stages of a rank are paler."""
    from matplotlib.colors import to_rgb

    stages: dict[int, dict[int, int]] = {}  # of each rank: the number of a stage among its own
    for rank, stage in sorted({(span.rank, span.stage) for span in spans if span.stage is not None}):
        stages.setdefault(rank, {})[stage] = len(stages.get(rank, ()))
    faces = []
    for span in spans:
        pale = 0.0
        if span.is_task and span.stage is not None:
            pale = 0.6 * stages[span.rank][span.stage] / len(stages[span.rank])
        red, green, blue = (channel + (1 - channel) * pale for channel in to_rgb(_color(span.kind)))
        faces.append((red, green, blue))
    return faces


def _numbers(axes: Any, tasks: Sequence[Span], start: float) -> None:
    """Microbatch numbers, of one size and direction for tasks of one kind except in unusually narrow ones."""
    area = axes.get_window_extent()
    wide = area.width / axes.get_xlim()[1] * 1e3 * 72 / _DPI  # points a second
    high = area.height * _TASKS[1] / abs(axes.get_ylim()[0] - axes.get_ylim()[1]) * 72 / _DPI  # points
    if len(tasks) > _MOST_NUMBERS:
        return
    digits = max((len(str(span.microbatch)) for span in tasks if span.microbatch is not None), default=0)
    usual = {kind: _fit(width * wide, high, digits) for kind, width in _usual_widths(tasks).items()}
    for span, face in zip(tasks, _faces(tasks), strict=True):
        if span.microbatch is None:
            continue
        text = str(span.microbatch)
        most, angle = usual[span.kind]
        size, angle = _fit((span.end - span.start) * wide, high, len(text), turn=angle == 90)
        size = min(size, most)
        if size < 4.2:
            continue
        luminance = 0.299 * face[0] + 0.587 * face[1] + 0.114 * face[2]
        axes.text(
            ((span.start + span.end) / 2 - start) * 1e3,
            span.rank + _MIDDLE,
            text,
            fontsize=size,
            rotation=angle,
            ha="center",
            va="center",
            color="white" if luminance < 0.52 else _INK,
            clip_on=True,
            zorder=3,
        ).set_in_layout(False)


def _fit(width: float, height: float, digits: int, turn: bool = False) -> tuple[float, int]:
    """The size of a number that fits into a box, all in points, and its angle: turned where only that is legible."""
    # A digit of the default font is 0.64 of its size wide and 0.73 of it high.
    upright = min(9.0, (width - 1.5) / (0.64 * digits), (height - 2) / 0.8)
    turned = min(7.0, (width - 1.0) / 0.74, (height - 2) / (0.64 * digits))
    return (turned, 90) if turn or upright < min(5.5, turned) else (upright, 0)


def _usual_widths(spans: Sequence[Span]) -> dict[Kind, float]:
    """The median duration in seconds of each kind of task that has a microbatch."""
    from statistics import median

    kinds = {span.kind for span in spans if span.is_task and span.microbatch is not None}
    return {kind: median(span.end - span.start for span in spans if span.kind == kind) for kind in kinds}


def _legend(figure: Any, kinds: Sequence[Kind]) -> None:
    from matplotlib.patches import Patch

    entries = [Patch(facecolor=_color(kind), label=kind.replace("_", " ")) for kind in kinds]
    entries.append(Patch(facecolor=_IDLE, label="idle"))
    for rows in range(1, len(entries) + 1):
        legend = figure.legend(
            handles=entries,
            loc="outside lower center",
            ncols=-(-len(entries) // rows),
            fontsize=9,
            frameon=False,
            labelcolor=_INK,
        )
        if legend.get_window_extent(figure.canvas.get_renderer()).width <= figure.bbox.width:
            break
        legend.remove()
    figure.set_figheight(figure.get_figheight() + _LEGEND_ROW * (rows - 1))
