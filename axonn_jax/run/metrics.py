"""Output files of a run: settings and tokenizer, trackers, held-out losses, samples, loss.png."""

import hashlib
import json
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
from flax import nnx

from axonn_jax.core.checkpoint.manifest import FOLDER, all_steps, step_of
from axonn_jax.core.distributed.host_sync import HostSync
from axonn_jax.core.documents import new_figure, save_picture
from axonn_jax.core.errors import UserError
from axonn_jax.core.grid import Grid
from axonn_jax.core.hardware import peak_flops
from axonn_jax.core.models.config import ModelShape
from axonn_jax.core.models.transformer import Transformer
from axonn_jax.files.data.tokenize import ends_of
from axonn_jax.files.data.tokenize import files_of as tokenizer_files
from axonn_jax.files.huggingface.pretrained import OF_TOKENIZER, small_names, write_small_files
from axonn_jax.run.config import Config, LogConfig
from axonn_jax.run.config_file import to_toml
from axonn_jax.run.tracking.files import TensorBoard
from axonn_jax.run.tracking.records import SAMPLES, JsonLines, read_metrics
from axonn_jax.run.tracking.services import MlflowTracker, WandbTracker
from axonn_jax.run.tracking.tracker import RunFacts, RunTracker, custom_tracker
from axonn_jax.run.validate import samples_of
from axonn_jax.text.inference.generator import Generator
from axonn_jax.text.inference.sampling import Sampling
from axonn_jax.text.inference.slots import Request
from axonn_jax.text.inference.texts import write
from axonn_jax.text.inference.weights import grid_of_run

SAMPLE_TOKENS = 32
"""Maximum number of tokens in a sample; fewer where prompt and sample would exceed `model.seq_len`."""
_SHOWN = 60  # trailing characters of a prompt in its line
_AT_ONCE = 16  # prompts that are continued together, which bounds the cache
_LARGEST = 1e100  # larger losses are not drawn, since matplotlib's axes overflow


def keep_settings(config: Config, directory: Path) -> None:
    """Write a run's settings and its data's tokenizer into the run directory.

    Args:
        config: The checked configuration.
        directory: The run directory, which is created.

    Raises:
        UserError: A file cannot be written.
    """
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = tokenizer_files(Path(config.data.tokenizer))
    # Files that only an earlier run's tokenizer had would be loaded with this run's; they are set aside, not deleted.
    for name in {*small_names(directory, OF_TOKENIZER)} - tokenizer.keys():
        (directory / name).replace(directory / f"aside_{name.replace('/', '_')}")
    for name, raw in {"config.toml": to_toml(config).encode(), **tokenizer}.items():
        try:
            write_small_files(directory, {name: raw})
        except OSError as error:
            accepted = f"a directory that {name} can be written in; {error.strerror}"
            raise UserError("log.dir", str(directory), accepted) from None


def trackers_of(log: LogConfig, lines: JsonLines) -> list[RunTracker]:
    """Return the trackers that [log] asks for; a new kind of tracker adds one line here."""
    # Files in the run directory rewind to the resumed step (`once=False`); services keep what they were sent.
    trackers = [RunTracker("log.dir", log.dir, lines, once=False)]
    trackers += [RunTracker("log.tensorboard", True, TensorBoard(), once=False)] if log.tensorboard else []
    trackers += [RunTracker("log.wandb", log.wandb, WandbTracker(log.wandb))] if log.wandb else []
    trackers += [RunTracker("log.mlflow", log.mlflow, MlflowTracker(log.mlflow))] if log.mlflow else []
    trackers += [RunTracker("log.tracker", log.tracker, custom_tracker(log.tracker))] if log.tracker else []
    return trackers


class Best:
    """The lowest held-out loss of a run, its step, and the number of evaluations `since`.

    Args:
        losses: (step, loss) of the evaluations before the run was resumed, in order.
    """

    def __init__(self, losses: Iterable[tuple[int, float]] = ()):
        self.step, self.loss, self.since = 0, math.inf, 0
        for step, loss in losses:
            self.seen(step, loss)

    def seen(self, step: int, loss: float) -> bool:
        """Count an evaluation; return True if its loss is the lowest so far."""
        lowest = loss < self.loss  # False for NaN, which is never the lowest
        self.step, self.loss, self.since = (step, loss, 0) if lowest else (self.step, self.loss, self.since + 1)
        return lowest


def recorded_eval_losses(directory: Path | None, sync: HostSync) -> list[tuple[int, float, bool]]:
    """Read the held-out losses that a resumed run has recorded.

    Collective over the run's processes: one `gather` of the losses as JSON, some hundred kilobytes for a long run.

    Args:
        directory: The run directory on the process that reads it; None on all others.
        sync: Host exchange between the processes.

    Returns:
        Step, loss, and whether the step's checkpoint exists, for every evaluation in order; the same on all processes.
    """
    records = [] if directory is None else read_metrics(directory)
    complete = {step_of(path) for path in all_steps(directory / FOLDER)} if directory else set()
    losses = [(record["step"], record["eval_loss"]) for record in records if "eval_loss" in record]
    # A non-finite loss is null in metrics.jsonl.
    drawable = [(step, loss if _drawable(loss) else math.nan, step in complete) for step, loss in losses]
    return [(step, loss, saved) for step, loss, saved in json.loads(sync.gather(json.dumps(drawable))[0])]


def usage(grid: Grid, flops: float, step_s: float) -> dict[str, float]:
    """Return a step's hardware utilization, for metrics.jsonl.

    Args:
        grid: The grid of devices.
        flops: Floating-point operations of a step, on all devices together.
        step_s: Seconds of the step.

    Returns:
        `mfu`, the share of the devices' peak, where the peak is known, and `device_bytes`, the peak memory of this
        process's first device in bytes, where the backend reports it.
    """
    devices, used = grid.mesh.devices, dict[str, float]()
    peak = peak_flops(devices.flat[0].device_kind)
    if peak is not None:
        used["mfu"] = flops / (step_s * grid.shape.devices * peak)
    local = [device for device in devices.flat if device.process_index == jax.process_index()]
    stats = local[0].memory_stats() if local else None
    if stats and "peak_bytes_in_use" in stats:
        used["device_bytes"] = stats["peak_bytes_in_use"]
    return used


class Samples:
    """Greedy continuations of fixed prompts during training, printed and written to samples.jsonl.

    Collective over the run's processes.

    Args:
        config: The checked configuration.
        shape: Sizes of the model.
        grid: The grid of devices.
        sync: Host exchange between the processes.
        run: The run, whose samples.jsonl is opened on rank 0.
        say: Printer of a line for people.

    Raises:
        UserError: The prompts cannot be used, or differ between processes.
    """

    def __init__(
        self,
        config: Config,
        shape: ModelShape,
        grid: Grid,
        sync: HostSync,
        *,
        run: RunFacts,
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
        self.log = JsonLines(SAMPLES, warn=say) if grid.rank == 0 else None
        if self.log is not None:
            self.log.start(run)

    def due(self, step: int) -> bool:
        """Return True if samples are due after a step."""
        return step % self._every == 0

    def write(self, step: int, model: nnx.Module) -> list[dict[str, object]]:
        """Generate, print and record the samples of a step; weights and cache are released afterwards.

        Args:
            step: The step, for the lines.
            model: The model with the weights to sample from.

        Returns:
            A row of prompt and text for each sample; empty if the samples could not be generated.
        """
        assert isinstance(model, Transformer)
        generator = self._updated(step, model)
        if generator is None:
            return []
        texts = ["" for _ in self._requests]
        try:
            for piece in write(generator, self._tokenizer, self._requests, Sampling(temperature=0)):
                texts[piece.request] += piece.text
        except UserError as error:  # non-finite scores, the same on every process, must not end the training
            self._say(f"warning: no samples of step {step}: {error}")
            return []
        finally:
            generator.release()
        for prompt, text in zip(self._prompts, texts, strict=True):
            begin, added = (json.dumps(part, ensure_ascii=False) for part in (prompt.line["prompt"][-_SHOWN:], text))
            self._say(f"step {step}: {begin} goes on {added}")
            if self.log is not None:
                self.log.write({**prompt.line, "step": step, "text": text})
        return [
            {"prompt": prompt.line["prompt"], "text": text} for prompt, text in zip(self._prompts, texts, strict=True)
        ]

    def close(self) -> None:
        """Close samples.jsonl."""
        if self.log is not None:
            self.log.finish()

    def _updated(self, step: int, model: Transformer) -> Generator | None:
        """Return the generator with a step's weights; None if a process has no memory for it."""
        if self._generator is not None:
            self._generator.update(model)
            return self._generator
        generator, fault = None, ""
        try:
            generator = self._generator_for(model)
        except UserError as error:
            fault = str(error)
        if faults := [text for text in self._sync.gather(fault) if text]:
            self._say(f"warning: no samples of step {step}: {faults[0]}")
            return None
        self._generator = generator
        return generator

    def _generator_for(self, model: Transformer) -> Generator:
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


def plot_loss(directory: Path, unigram_entropy: float | None) -> Path:
    """Draw loss.png from metrics.jsonl.

    Args:
        directory: The run directory.
        unigram_entropy: Entropy of the held-out text in nats per token, drawn as a line; None for a run without
            evaluations.

    Returns:
        The picture's path.
    """
    records = read_metrics(directory)
    train = [(r["step"], r["loss"]) for r in records if _drawable(r.get("loss"))]
    evaluations = [(r["step"], r["eval_loss"]) for r in records if _drawable(r.get("eval_loss"))]
    figure = new_figure(8, 4.5)
    axes = figure.add_subplot()
    if train:
        steps, losses = zip(*train, strict=True)
        axes.plot(steps, losses, color="tab:blue", alpha=0.3, linewidth=1, label="training loss")
        axes.plot(steps, _running_mean(losses), color="tab:blue", linewidth=1.8, label="running mean")
    if evaluations:
        # The last value goes into the legend, where it cannot overlap another number.
        label = f"held-out loss, {evaluations[-1][1]:.3f} at last"
        axes.plot(*zip(*evaluations, strict=True), "o-", color="tab:orange", markersize=4, label=label)
    if unigram_entropy is not None:
        label = f"unigram entropy of the held-out text, {unigram_entropy:.3f}"
        axes.axhline(unigram_entropy, color="gray", linestyle="--", linewidth=1, label=label)
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats a token)")
    axes.set_title(f"{directory.name}")
    axes.grid(alpha=0.25)
    if axes.lines:  # matplotlib warns about a legend without entries
        axes.legend(loc="best")
    path = directory / "loss.png"
    save_picture(figure, path)
    return path


def _drawable(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < _LARGEST


def _running_mean(values: tuple[float, ...]) -> list[float]:
    """Average each value with up to ten neighbours on either side."""
    # The window is symmetric and shrinks at the ends; a trailing mean would lag behind the loss.
    means, most = [], min(10, len(values) // 10)
    for at in range(len(values)):
        side = min(most, at, len(values) - 1 - at)
        means.append(sum(values[at - side : at + side + 1]) / (2 * side + 1))
    return means
