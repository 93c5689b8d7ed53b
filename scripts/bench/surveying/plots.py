"""Pictures of the survey: held-out loss over tokens and over seconds, and what the batch size costs."""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from surveying.efficiency import TARGET

from axonn_jax.core.documents import new_figure, save_picture

Curve = Mapping[str, Any]
SHOWN = {
    "ours-data": "axonn_jax, data 2", "deepspeed-0": "DeepSpeed, stage 0", "jax-data": "Flax and jit, 2 devices",
    "torch-ddp": "PyTorch DDP",
}  # fmt: skip
"""Names of racers for people."""


def draw(curves: Sequence[Curve], rows: int, path: Path) -> None:
    """Draw three panels: all racers' curves over tokens and seconds, and the first racer's batch sizes."""
    figure = new_figure(11, 3.6)
    over_tokens, over_seconds, sizes = figure.subplots(1, 3)
    names = list(dict.fromkeys(one["name"] for one in curves))
    for number, name in enumerate(names):
        for one in curves:
            if (one["name"], one["rows"]) != (name, rows):
                continue
            losses = [point["loss"] for point in one["points"]]
            style = {"color": f"C{number}", "linewidth": 1.2, "alpha": 0.8}
            dashes = "-" if number == 0 else (0, (4, 1 + number))
            for panel, key, unit in ((over_tokens, "tokens", 1e3), (over_seconds, "seconds", 1)):
                at = [point[key] / unit for point in one["points"]]
                panel.plot(
                    at, losses, linestyle=dashes, label=SHOWN.get(name, name) if one["seed"] == 0 else None, **style
                )
    for panel, label in ((over_tokens, "thousand tokens"), (over_seconds, "seconds of steps")):
        panel.axhline(TARGET, color="grey", linewidth=0.8, linestyle=":")
        panel.set(xlabel=label, ylabel="held-out loss, nats")
        panel.legend(frameon=False)
    _draw_sizes(sizes, [one for one in curves if one["name"] == names[0] and one["reached"]])
    sizes.set_title(f"{SHOWN.get(names[0], names[0])}, to a loss of {TARGET}")
    save_picture(figure, path)


def _draw_sizes(panel: Any, curves: Sequence[Curve]) -> None:
    batches = sorted({one["rows"] for one in curves})
    panel.set(xlabel="sequences a batch", ylabel="thousand tokens", xscale="log", xticks=batches)
    panel.set_xticks([], minor=True)
    panel.set_xticklabels(map(str, batches))
    seconds = panel.twinx()
    seconds.set_ylabel("seconds")
    for axis, key, unit, color, mark in ((panel, "tokens", 1e3, "C0", "o"), (seconds, "seconds", 1, "C3", "s")):
        each = {rows: [one["reached"][key] / unit for one in curves if one["rows"] == rows] for rows in batches}
        for rows, values in each.items():
            axis.plot([rows] * len(values), values, mark, color=color, alpha=0.5)
        axis.plot(batches, [statistics.median(each[rows]) for rows in batches], color=color, label=key)
        axis.set_ylim(bottom=0)
    panel.legend(frameon=False, loc="lower left")
    seconds.legend(frameon=False, loc="lower right")
