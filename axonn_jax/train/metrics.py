"""Metrics and samples of a run: metrics.jsonl, samples.jsonl, TensorBoard events, loss.png."""

import contextlib
import hashlib
import io
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flax import nnx

from axonn_jax.data.tokenize import ends_of
from axonn_jax.distributed.host_sync import HostSync
from axonn_jax.documents import new_figure, parse_json, read_bytes, save_picture
from axonn_jax.errors import UserError
from axonn_jax.grid import Grid
from axonn_jax.inference.generator import Generator
from axonn_jax.inference.sampling import Sampling
from axonn_jax.inference.slots import Request
from axonn_jax.inference.texts import write
from axonn_jax.inference.weights import grid_of_run
from axonn_jax.models.config import ModelShape
from axonn_jax.models.transformer import Transformer
from axonn_jax.options import typed
from axonn_jax.train.config import Config
from axonn_jax.train.validate import samples_of

METRICS = "metrics.jsonl"
SAMPLES = "samples.jsonl"
SAMPLE_TOKENS = 32
"""The most tokens of a sample, where `model.seq_len` leaves so many."""
_SHOWN = 60  # characters of a prompt, its last ones
_AT_ONCE = 16
_MOST = 2**31  # bytes read of a log: that of ten million steps
_LARGEST = 1e100  # losses beyond it are not drawn: axes overflow


class MetricsLog:
    """Log of one JSON object a line in a file of the run directory, each line whole on disk at once.

    A run resumed after step `resumed` keeps the lines up to this step; otherwise an earlier run's file in the same
    directory is kept under a numbered name, as is a file with unreadable lines, with a call of `warn`. A disk that
    cannot take lines does not end the run: `trouble` has the reason.
    """

    def __init__(
        self,
        directory: Path,
        name: str = METRICS,
        *,
        tensorboard: bool = False,
        resumed: int = 0,
        warn: Callable[[str], None] = lambda text: None,
    ):
        self._events = _event_writer(directory / "tensorboard", resumed) if tensorboard else None
        self.path, self.known = directory / name, frozenset[str]()
        """Path of the file, and the keys that are known of step `resumed`."""
        if os.path.lexists(self.path) and resumed:
            self._go_on_after(resumed, warn)
        elif os.path.lexists(self.path):
            self.path.rename(_free_name(self.path))
        self._file = self.path.open("a", encoding="utf-8", buffering=1)
        self.trouble = ""
        """Reason for lines not written so far, which are kept for the next write."""

    def _go_on_after(self, step: int, warn: Callable[[str], None]) -> None:
        try:
            records, damage = _read(self.path)
        except (OSError, ValueError) as error:
            records, damage = [], f"it is left out: {getattr(error, 'strerror', None) or error}"
        rewritten = self.path.with_name(f".{self.path.name}.part")
        self.known = frozenset(key for record in records if record["step"] == step for key in record)
        kept = (json.dumps(record) + "\n" for record in records if record["step"] <= step)
        rewritten.unlink(missing_ok=True)  # a link that came with the directory is not followed
        rewritten.write_text("".join(kept), encoding="utf-8")
        if damage:
            aside = _free_name(self.path)
            self.path.rename(aside)
            warn(f"warning: {self.path} is damaged and kept as {aside.name}; {damage}")
        rewritten.replace(self.path)

    def write(self, record: Mapping[str, Any]) -> None:
        """Write one record; infinite numbers and NaN become null, as JSON has neither."""
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


class Samples:
    """The likeliest texts behind fixed prompts by the weights of a step: a line each, and one of samples.jsonl.

    Collective over the run's processes. Raises ``UserError`` if prompts differ between processes.
    """

    def __init__(
        self,
        config: Config,
        shape: ModelShape,
        grid: Grid,
        sync: HostSync,
        *,
        resumed: int,
        say: Callable[[str], None],
    ):
        self._shape, self._grid, self._say, self._folder = shape, grid, say, Path(config.log.dir)
        self._every, self._sync = config.train.sample_every, sync
        self._tokenizer, self._prompts = samples_of(config, shape)
        self._requests = [
            Request(prompt.ids, min(SAMPLE_TOKENS, shape.seq_len - len(prompt.ids))) for prompt in self._prompts
        ]
        if len({*sync.gather(hashlib.sha256(repr(self._requests).encode()).hexdigest())}) > 1:
            accepted = "a file that is the same for all processes"
            raise UserError("train.sample_prompts", config.train.sample_prompts, accepted)
        self._generator: Generator | None = None
        self.log = MetricsLog(self._folder, SAMPLES, resumed=resumed, warn=say) if grid.rank == 0 else None

    def due(self, step: int) -> bool:
        """Return True if samples are due behind a step."""
        return step % self._every == 0

    def write(self, step: int, model: nnx.Module) -> None:
        """Make the texts of a step, print and record them; weights and cache are not kept."""
        assert isinstance(model, Transformer)
        generator = self._updated(step, model)
        if generator is None:
            return
        texts = ["" for _ in self._requests]
        try:
            for piece in write(generator, self._tokenizer, self._requests, Sampling(temperature=0)):
                texts[piece.request] += piece.text
        except UserError as error:  # scores that are not finite, on every process: the run goes on
            self._say(f"warning: no samples of step {step}: {error}")
            return
        finally:
            generator.release()
        for prompt, text in zip(self._prompts, texts, strict=True):
            begin, added = (json.dumps(part, ensure_ascii=False) for part in (prompt.line["prompt"][-_SHOWN:], text))
            self._say(f"step {step}: {begin} goes on {added}")
            if self.log is not None:
                self.log.write({**prompt.line, "step": step, "text": text})

    def close(self) -> None:
        """Close the file, and say where lines could not be written."""
        if self.log is not None:
            close_log(self.log, self._say)

    def _updated(self, step: int, model: Transformer) -> Generator | None:
        """Return the generator with a step's weights; None where a process has no memory for it."""
        if self._generator is not None:
            self._generator.update(model)
            return self._generator
        made, fault = None, ""
        try:
            made = self._made(model)
        except UserError as error:
            fault = str(error)
        if faults := [text for text in self._sync.gather(fault) if text]:
            self._say(f"warning: no samples of step {step}: {faults[0]}")
            return None
        self._generator = made
        return made

    def _made(self, model: Transformer) -> Generator:
        grid = grid_of_run(self._shape, self._grid)
        replicas = grid.shape.batch_shards
        return Generator(
            model,
            grid,
            slots=-(-min(_AT_ONCE, len(self._requests)) // replicas) * replicas,
            length=max(len(request.prompt) + request.tokens for request in self._requests),
            stops=ends_of(self._folder, self._tokenizer, "log.dir", self._shape.vocab),
            limit=1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values()),
        )


def close_log(log: MetricsLog, say: Callable[[str], None]) -> None:
    """Close a log, and say where lines could not be written in time."""
    log.close()
    if log.trouble:
        say(f"warning: lines of {log.path} could not be written in time: {log.trouble}")


def _free_name(path: Path) -> Path:
    number = 1
    while os.path.lexists(candidate := path.with_name(f"{path.stem}.{number}{path.suffix}")):
        number += 1
    return candidate


def _event_writer(folder: Path, resumed: int) -> Any:
    """Return a writer of events behind step `resumed`: TensorBoard drops later ones; another run's are set aside."""
    from tensorboardX import SummaryWriter  # the config's check has looked for it

    if not resumed and os.path.lexists(folder):
        folder.rename(_free_name(folder))
    purge = {"purge_step": resumed + 1, "filename_suffix": f".{resumed}"} if resumed else {}  # files are of a second
    return SummaryWriter(str(folder), **purge)


def read_metrics(directory: Path) -> list[dict[str, Any]]:
    """Return the readable records of a run directory, in order."""
    return _read(directory / METRICS)[0]


@dataclass
class _Record:
    """Fields of every record."""

    step: int


def _read(path: Path) -> tuple[list[dict[str, Any]], str]:
    """Return the readable records of a log, and a description of the other lines, empty if there are none.

    A last line cut off in the middle is no fault: a killed process may leave one.
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
    records = read_metrics(directory)
    train = [(r["step"], r["loss"]) for r in records if _drawable(r.get("loss"))]
    held_out = [(r["step"], r["eval_loss"]) for r in records if _drawable(r.get("eval_loss"))]
    figure = new_figure(8, 4.5)
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
    if train or held_out:  # matplotlib warns of a legend without a line
        axes.legend(loc="upper right" if unigram_entropy is None else "best")
    path = directory / "loss.png"
    save_picture(figure, path)
    return path


def _drawable(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < _LARGEST


def _running_mean(values: tuple[float, ...]) -> list[float]:
    """Return the mean of the values around each, of up to ten on either side and as many on both, without a lag."""
    means, most = [], min(10, len(values) // 10)
    for at in range(len(values)):
        side = min(most, at, len(values) - 1 - at)
        means.append(sum(values[at - side : at + side + 1]) / (2 * side + 1))
    return means
