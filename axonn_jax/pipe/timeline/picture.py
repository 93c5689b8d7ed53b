"""Picture of a pipelined step, measured or simulated, with a row for each pipe rank.

A step whose tasks would be too narrow to tell apart is continued on up to three lines. An even longer one is shown in
three parts: its fill, its middle, and its drain. A strip above them shows the full step, dark where ranks work.
"""

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from axonn_jax.core.documents import new_figure, save_picture
from axonn_jax.pipe.timeline.spans import KINDS, Kind, Span, last_complete_step, ranks_of, usage, window

PICTURE = "timeline.png"

COLORS: dict[Kind, str] = {
    "forward": "#0072b2",
    "backward": "#e69f00",
    "input_gradient": "#d55e00",
    "weight_gradient": "#009e73",
    "forward_and_backward": "#56b4e9",
    "forward_and_input_gradient": "#f0e442",
    "communication": "#cc79a7",
    "optimizer": "#4d4d4d",
}
"""Okabe and Ito's palette, which colour-blind readers can distinguish."""
_WITHOUT_MICROBATCH: tuple[Kind, ...] = ("communication", "optimizer")
_IDLE, _INK, _GREY = "#e9e9ec", "#22252b", "#5b606b"
_WIDTH, _DPI = 8.0, 200
"""Width in inches and pixels per inch; a page shows the picture 800 pixels wide, at half the resolution."""
_ACROSS = 6.9
"""Width of the data in inches, without the labels."""
_NARROWEST, _LEGIBLE = 0.06, 0.11
"""Widths in inches of a median task of the shortest kind: a step with narrower ones than the first is continued on
further lines, on which they get the second if possible."""
_MOST_LINES = 3
_STRIP_PIXELS = 1400
# Offset and height of a row's boxes, in rows: its tasks, and below them the strip of its communication.
_TASKS = (-0.44, 0.7)
_STRIP = (0.28, 0.13)
_MIDDLE = _TASKS[0] + _TASKS[1] / 2
_MOST_NUMBERS = 6000


class _Scale(NamedTuple):
    """Time scale of a picture."""

    start: float
    """Start of the first task, in seconds of the spans' clock."""
    per_second: float
    """Units per second."""
    unit: str
    """Unit of displayed times."""
    ranks: int
    chunks: int
    """Number of virtual stages per rank; later ones are paler."""

    def at(self, seconds: float) -> float:
        """Return the position of a time of the spans' clock, in units from the start of the first task."""
        return (seconds - self.start) * self.per_second

    def face(self, span: Span) -> tuple[float, float, float]:
        """Return the colour of a span."""
        from matplotlib.colors import to_rgb

        pale = 0.6 * ((span.stage or 0) // self.ranks) / self.chunks if span.is_task else 0.0
        red, green, blue = (channel + (1 - channel) * pale for channel in to_rgb(COLORS[span.kind]))
        return red, green, blue


class _Line(NamedTuple):
    """Interval of a step that is drawn on one line, in seconds from the start of the first task."""

    title: str
    start: float
    end: float


def draw(
    spans: Sequence[Span], path: Path, title: str | None = None, *, step: int | None = None, simulated: bool = False
) -> None:
    """Draw a step as a PNG.

    Tasks show the number of their microbatch where it fits; virtual stages of a rank differ in shade. Times before the
    first task and after the last one are not shown.

    Args:
        spans: Spans of all ranks.
        path: The file to write.
        title: Start of the heading.
        step: The step; None: the last complete one.
        simulated: True to omit the step's number from the heading.

    Raises:
        ValueError: There is no task in that step.
    """
    step = last_complete_step(spans) if step is None else step
    ranks = ranks_of(spans)
    spans = [span for span in spans if span.step == step]
    start, end = window(spans)
    if end <= start:
        raise ValueError(f"no tasks in step {step} to draw")
    spans = [span for span in spans if span.end > start and span.start < end]
    used = [rank_usage.idle for rank_usage in usage(spans, ranks)]
    lines = _lines(spans, end - start)
    rows = min(max(1.1 / ranks, 0.34 if ranks <= 4 else 0.26), 2.6 / ranks)  # inches a rank
    strip = [max(0.35, min(0.14 * ranks, 0.9))] if len(lines) > 1 else []
    heights = [*strip, *[rows * ranks] * len(lines)]
    figure = new_figure(_WIDTH, sum(heights) + 0.5 * len(heights) + 0.75)
    panels = figure.subplots(len(heights), 1, squeeze=False, gridspec_kw={"height_ratios": heights})[:, 0]
    length = end - start
    length_text = f"{length:,.3f} s" if length >= 10 else f"{length * 1e3:,.{1 if length >= 0.01 else 3}f} ms"
    heading = f"{length:,.3f} s" if simulated else f"step {step}: {length_text}"
    heading += f", idle {sum(used) / ranks:.1%}"
    figure.suptitle(
        f"{title} \N{EM DASH} {heading}" if title else heading, fontsize=10, color=_INK, parse_math=False, wrap=True
    )
    shown = [
        [span for span in spans if span.start - start < line.end and span.end - start > line.start] for line in lines
    ]
    stages = max((span.stage or 0 for part in shown for span in part), default=0) + 1
    scale = _Scale(start, *((1.0, "s") if length >= 10 else (1e3, "ms")), ranks, -(-stages // ranks))
    if strip:
        _draw_strip(panels[0], spans, lines, scale, used, strip[0])
    for axes, line, part in zip(panels[len(strip) :], lines, shown, strict=True):
        _decorate(axes, line, scale, used, rows * ranks, idle=not strip)
        _draw_boxes(axes, part, scale)
    _draw_legend(figure, [kind for kind in KINDS if any(span.kind == kind for span in spans)])
    # Font sizes depend on the boxes' widths, so settle the layout first; the numbers must not start it again.
    figure.draw_without_rendering()
    figure.set_layout_engine("none")
    for axes, line, part in zip(panels[len(strip) :], lines, shown, strict=True):
        tasks = [span for span in part if span.kind not in _WITHOUT_MICROBATCH and span.microbatch is not None]
        inside = [span for span in tasks if line.start <= (span.start + span.end) / 2 - start < line.end]
        _draw_numbers(axes, inside, scale)
    save_picture(figure, path)


def _lines(spans: Sequence[Span], length: float) -> list[_Line]:
    shortest = max(min(_usual_widths(spans).values(), default=length), length * 1e-7)
    most = shortest * _ACROSS / _NARROWEST  # seconds on a line
    count = -(-length // most)
    if count <= 1:
        return [_Line("", 0.0, length)]
    if count <= _MOST_LINES:
        count = min(_MOST_LINES, -(-length * _LEGIBLE // (shortest * _ACROSS)))
        return [_Line("", length * at / count, length * (at + 1) / count) for at in range(int(count))]
    # A line covers 1.5 times the time until every rank has started a backward, unless tasks would get far too narrow.
    start, _ = window(spans)
    first: dict[int, float] = {}
    for span in spans:
        if span.is_task and span.kind != "forward":
            first[span.rank] = min(first.get(span.rank, length), span.start - start)
    across = min(max(shortest * _ACROSS / _LEGIBLE, 1.5 * max(first.values(), default=0.0)), 3 * most, length / 4)
    starts = {"fill": 0.0, "steady": (length - across) / 2, "drain": length - across}
    return [_Line(title, start, start + across) for title, start in starts.items()]


def _bare(axes: Any, used: Sequence[float], inches: float, *, right: bool) -> None:
    """Label ranks on the left and their idle shares on the `right`, as many as fit, and remove all frames."""
    shown = range(0, len(used), -int(-len(used) // max(1, inches // 0.115)))
    heights = [rank + _MIDDLE for rank in shown]
    size = 8 if len(shown) <= 8 else 6.5
    axes.set_yticks(heights, [f"rank {rank}" for rank in shown], fontsize=size, color=_INK)
    sides = [axes]
    if right:
        sides.append(axes.secondary_yaxis("right"))
        sides[1].set_yticks(heights, [f"{used[rank]:.0%} idle" for rank in shown], fontsize=size, color=_GREY)
    for side in sides:
        side.tick_params(axis="y", length=0)
        side.spines[:].set_visible(False)


def _decorate(axes: Any, line: _Line, scale: _Scale, used: Sequence[float], inches: float, *, idle: bool) -> None:
    ends = (line.start * scale.per_second, line.end * scale.per_second)
    axes.set_xlim(*ends)
    axes.set_ylim(len(used) - 0.5, -0.5)
    _bare(axes, used, inches, right=idle)
    _add_boxes(axes, [(*ends, rank + _TASKS[0]) for rank in range(len(used))], _TASKS[1], _IDLE, "none", 0.0)
    axes.spines["bottom"].set(visible=True, color="#9aa0ab")
    axes.tick_params(axis="x", color="#9aa0ab", labelsize=8)
    axes.ticklabel_format(axis="x", style="plain", useOffset=False)
    title = f"{line.title}, " if line.title else ""
    axes.set_xlabel(f"{title}time ({scale.unit})", fontsize=8, color=_INK)


def _draw_strip(
    axes: Any, spans: Sequence[Span], lines: Sequence[_Line], scale: _Scale, used: Sequence[float], inches: float
) -> None:
    """Draw the strip of the full step: each pixel shows a rank's busy share of its time; mark the lines' intervals."""
    import numpy as np
    from matplotlib.colors import LinearSegmentedColormap

    end = scale.start + lines[-1].end
    edges = np.linspace(scale.start, end, _STRIP_PIXELS + 1)
    busy = np.zeros((len(used), _STRIP_PIXELS))
    by_rank: dict[int, list[Span]] = {}
    for span in sorted((span for span in spans if span.is_task), key=lambda span: span.start):
        by_rank.setdefault(span.rank, []).append(span)
    for rank, tasks in by_rank.items():
        # Tasks may overlap: let each one count from where all earlier ones have ended.
        until = np.maximum.accumulate([span.end for span in tasks])
        begin = np.maximum([span.start for span in tasks], np.concatenate([[scale.start], until[:-1]]))
        times = np.stack([begin, np.maximum(until, begin)], 1).ravel()
        worked = np.concatenate([[0.0], np.cumsum(np.diff(times) * (np.arange(len(times) - 1) % 2 == 0))])
        busy[rank] = np.diff(np.interp(edges, times, worked)) / np.diff(edges)
    extent = (0.0, scale.at(end), len(used) - 0.5, -0.5)
    shades = LinearSegmentedColormap.from_list("busy", [_IDLE, "#6b7280"])
    axes.imshow(busy, aspect="auto", interpolation="nearest", cmap=shades, vmin=0.0, vmax=1.0, extent=extent)
    _bare(axes, used, inches, right=True)
    if lines[0].title:
        for line in lines:
            axes.axvspan(
                line.start * scale.per_second, line.end * scale.per_second, color="#cc3311", alpha=0.35, linewidth=0
            )
    axes.tick_params(axis="x", color="#9aa0ab", labelsize=8)
    cut = "; below, the parts in red: fill, middle, drain" if lines[0].title else f"; below, on {len(lines)} lines"
    axes.set_xlabel(f"the whole step, dark where a rank works, time ({scale.unit}){cut}", fontsize=8, color=_INK)


def _draw_boxes(axes: Any, spans: Sequence[Span], scale: _Scale) -> None:
    for tasks, (top, height) in ((True, _TASKS), (False, _STRIP)):
        shown = [span for span in spans if span.is_task == tasks]
        boxes = [(scale.at(span.start), scale.at(span.end), span.rank + top) for span in shown]
        faces = [scale.face(span) for span in shown]
        # A white edge separates tasks. Communication gets edges of its colour, or short messages would vanish.
        _add_boxes(axes, boxes, height, faces, *(("white", 0.3) if tasks else (faces, 0.4)))


def _add_boxes(
    axes: Any, boxes: Sequence[tuple[float, float, float]], height: float, faces: Any, edges: Any, seam: float
) -> None:
    # One collection for all boxes, of which a step may have many thousands; later calls draw over earlier ones.
    from matplotlib.collections import PolyCollection

    corners = [[(a, top), (b, top), (b, top + height), (a, top + height)] for a, b, top in boxes]
    axes.add_collection(PolyCollection(corners, facecolors=faces, edgecolors=edges, linewidths=seam), autolim=False)


def _draw_numbers(axes: Any, tasks: Sequence[Span], scale: _Scale) -> None:
    """Write microbatch numbers; tasks of a kind share size and direction, except for unusually narrow ones."""
    if len(tasks) > _MOST_NUMBERS:
        return
    area = axes.get_window_extent()
    first, last = axes.get_xlim()
    points_per_second = area.width / (last - first) * scale.per_second * 72 / _DPI  # points a second
    row_points = area.height * _TASKS[1] / abs(axes.get_ylim()[0] - axes.get_ylim()[1]) * 72 / _DPI  # points
    digits = max((len(str(span.microbatch)) for span in tasks), default=0)
    usual = {kind: _fit(width * points_per_second, row_points, digits) for kind, width in _usual_widths(tasks).items()}
    for span in tasks:
        text = str(span.microbatch)
        most, angle = usual[span.kind]
        size, angle = _fit((span.end - span.start) * points_per_second, row_points, len(text), turn=angle == 90)
        size = round(2 * min(size, most)) / 2  # few distinct sizes, since matplotlib caches text layouts
        if size < 3.5:
            continue
        red, green, blue = scale.face(span)
        axes.text(
            scale.at((span.start + span.end) / 2),
            span.rank + _MIDDLE,
            text,
            fontsize=size,
            rotation=angle,
            ha="center",
            va="center",
            color="white" if 0.299 * red + 0.587 * green + 0.114 * blue < 0.52 else _INK,
            clip_on=True,
            zorder=3,
        ).set_in_layout(False)


def _fit(width: float, height: float, digits: int, turn: bool = False) -> tuple[float, int]:
    """Return the font size in points and the angle at which a number fits into a box; turned only if it must be."""
    # A digit of the default font is 0.64 of its size wide, and 0.73 of it high.
    upright = min(8.0, (width - 1.0) / (0.64 * digits), (height - 2) / 0.8)
    turned = min(6.0, (width - 0.6) / 0.74, (height - 1.5) / (0.64 * digits))
    return (turned, 90) if turn or upright < min(4.5, turned) else (upright, 0)


def _usual_widths(spans: Sequence[Span]) -> dict[Kind, float]:
    """Return the median duration in seconds of each kind of microbatch task."""
    lengths: dict[Kind, list[float]] = {}
    for span in spans:
        if span.kind not in _WITHOUT_MICROBATCH:
            lengths.setdefault(span.kind, []).append(span.end - span.start)
    return {kind: median(seconds) for kind, seconds in lengths.items()}


def _draw_legend(figure: Any, kinds: Sequence[Kind]) -> None:
    from matplotlib.patches import Patch

    colors = {kind.replace("_", " "): COLORS[kind] for kind in kinds} | {"idle": _IDLE}
    columns = len(colors) if sum(len(label) + 8 for label in colors) <= 100 else 4
    entries = [Patch(facecolor=color, label=label) for label, color in colors.items()]
    figure.legend(
        handles=entries, loc="outside lower center", ncols=columns, fontsize=8, frameon=False, labelcolor=_INK,
        columnspacing=1.2, handlelength=1.4,
    )  # fmt: skip
