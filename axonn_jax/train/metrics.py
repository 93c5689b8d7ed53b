"""Metrics of a run: metrics.jsonl, TensorBoard events, loss.png."""

import contextlib
import io
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from axonn_jax.documents import parse_json, read_bytes, save_picture, typed

METRICS = "metrics.jsonl"
_MOST = 2**31  # bytes read of a log: that of ten million steps
_LARGEST = 1e100  # losses beyond it are not drawn: axes overflow


class MetricsLog:
    """Appends one JSON object a line to the run directory's metrics.jsonl, each line whole on disk at once.

    A run that goes on after step `resumed` keeps the lines up to it; otherwise an earlier run's file in the same
    directory is kept under a numbered name. So is a file of which lines cannot be read, and `warn` is told.
    A disk that cannot take lines does not end the run: `trouble` says why.
    """

    def __init__(
        self,
        directory: Path,
        *,
        tensorboard: bool = False,
        resumed: int = 0,
        warn: Callable[[str], None] = lambda text: None,
    ):
        self._events = _event_writer(directory) if tensorboard else None
        self.path = directory / METRICS
        if os.path.lexists(self.path) and resumed:
            self._go_on_after(resumed, warn)
        elif os.path.lexists(self.path):
            self.path.rename(_free_name(self.path))
        self._file = self.path.open("a", encoding="utf-8", buffering=1)
        self.trouble = ""
        """Why lines could not be written so far; they are kept and written with the next one that can be."""

    def _go_on_after(self, step: int, warn: Callable[[str], None]) -> None:
        try:
            records, damage = _read(self.path)
        except (OSError, ValueError) as error:
            records, damage = [], f"it is left out: {getattr(error, 'strerror', None) or error}"
        rewritten = self.path.with_name(f".{METRICS}.part")
        kept = (json.dumps(record) + "\n" for record in records if record["step"] <= step)
        rewritten.unlink(missing_ok=True)  # a link that came with the directory is not followed
        rewritten.write_text("".join(kept), encoding="utf-8")
        if damage:
            aside = _free_name(self.path)
            self.path.rename(aside)
            warn(f"warning: {self.path} is damaged and kept as {aside.name}; {damage}")
        rewritten.replace(self.path)

    def write(self, record: Mapping[str, Any]) -> None:
        """Write one record; a number that is not finite becomes null, which JSON can hold."""
        clean = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
        with self._told():
            self._file.write(json.dumps(clean) + "\n")
            if self._events is not None:
                for name, value in record.items():
                    if name != "step":
                        self._events.add_scalar(name, value, record["step"])

    def close(self) -> None:
        """Close the files."""
        with self._told():
            self._file.close()
            if self._events is not None:
                self._events.close()

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.trouble = self.trouble or f"{error.strerror or error}"


def _free_name(path: Path) -> Path:
    number = 1
    while os.path.lexists(candidate := path.with_name(f"{path.stem}.{number}{path.suffix}")):
        number += 1
    return candidate


def _event_writer(directory: Path) -> Any:
    from tensorboardX import SummaryWriter  # the config's check has looked for it

    return SummaryWriter(str(directory / "tensorboard"))


def read_metrics(directory: Path) -> list[dict[str, Any]]:
    """All records of a run directory that can be read, in order.

    Raises ``OSError`` where there is no such file, ``ValueError`` where it is no regular file or too large.
    """
    return _read(directory / METRICS)[0]


@dataclass
class _Record:
    """What every record has."""

    step: int


def _read(path: Path) -> tuple[list[dict[str, Any]], str]:
    """The records of a log that can be read, and what is wrong with other lines, or an empty text.

    With a last line cut off in the middle nothing is wrong: a process that is killed may leave one.
    """
    records, unread, first = [], 0, ""
    for number, line in enumerate(io.BytesIO(read_bytes(path, _MOST)), 1):
        try:
            record = parse_json(line)
            typed(_Record, record)
            records.append(record)
        except ValueError as error:
            cut_off = line.startswith(b"{") and not line.endswith(b"\n")
            if line.strip() and not cut_off:
                unread, first = unread + 1, first or f"line {number}: {error}"
    return records, f"lines left out: {unread}, the first {first}" if unread else ""


def plot_loss(directory: Path, unigram_entropy: float | None) -> Path:
    """Draw loss.png from metrics.jsonl: training loss, its running mean, held-out loss, unigram entropy."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    records = read_metrics(directory)
    train = [(r["step"], r["loss"]) for r in records if _drawable(r.get("loss"))]
    held_out = [(r["step"], r["eval_loss"]) for r in records if _drawable(r.get("eval_loss"))]
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    if train:
        steps, losses = zip(*train, strict=True)
        axes.plot(steps, losses, color="tab:blue", alpha=0.3, linewidth=1, label="training loss")
        axes.plot(steps, _running_mean(losses), color="tab:blue", linewidth=1.8, label="running mean")
    if held_out:
        axes.plot(*zip(*held_out, strict=True), "o-", color="tab:orange", markersize=4, label="held-out loss")
        step, loss = held_out[-1]
        axes.annotate(f"{loss:.3f}", (step, loss), xytext=(-4, 8), textcoords="offset points", ha="right")
    if unigram_entropy is not None:
        axes.axhline(unigram_entropy, color="gray", linestyle="--", linewidth=1)
        axes.annotate(
            f"unigram entropy of the held-out text: {unigram_entropy:.3f}",
            (0.99, unigram_entropy),
            xycoords=("axes fraction", "data"),
            xytext=(0, 3),
            textcoords="offset points",
            ha="right",
            color="gray",
            fontsize=9,
        )
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats a token)")
    axes.set_title(f"{directory.name}")
    axes.grid(alpha=0.25)
    axes.legend(loc="upper right" if unigram_entropy is None else "best")
    path = directory / "loss.png"
    save_picture(figure, path, dpi=120)
    return path


def _drawable(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < _LARGEST


def _running_mean(values: tuple[float, ...]) -> list[float]:
    """Mean of the values around each, of up to ten on either side and as many on both, so that it lags behind none."""
    means, most = [], min(10, len(values) // 10)
    for at in range(len(values)):
        side = min(most, at, len(values) - 1 - at)
        means.append(sum(values[at - side : at + side + 1]) / (2 * side + 1))
    return means
