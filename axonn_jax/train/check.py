"""Every check of a training configuration that needs neither jax nor a device."""

import importlib.util
import math
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from axonn_jax.data.manifest import SPLITS, Manifest
from axonn_jax.errors import UserError
from axonn_jax.grid import GridShape
from axonn_jax.memory.policies import Policies, read_policies
from axonn_jax.models.inner import PAPERS, Inner, choose_inner
from axonn_jax.models.pieces import Piece, transformer_pieces
from axonn_jax.models.shape import ModelShape
from axonn_jax.schedule.partition import Cost, explicit, partition
from axonn_jax.schedule.policies import check_policy
from axonn_jax.schedule.tasks import Layout
from axonn_jax.train.config import (
    CheckpointConfig,
    Config,
    DataConfig,
    Gather,
    LogConfig,
    ModelConfig,
    PipelineConfig,
    ScanLayers,
)

_INT32 = 2**31 - 1  # step counters live on the device as int32
_UINT32 = 2**32 - 1  # seeds of PRNG keys, without 64-bit mode


@dataclass(frozen=True)
class _Range:
    accepted: str
    low: float
    high: float = math.inf
    open_low: bool = False
    open_high: bool = False

    def check(self, name: str, value: float) -> None:
        above = value > self.low if self.open_low else value >= self.low
        below = value < self.high if self.open_high else value <= self.high
        if not (above and below):  # written so that NaN fails
            raise UserError(name, value, self.accepted)


_COUNT = _Range(f"an integer from 1 to {_INT32}", 1, _INT32)
_COUNT_OR_0 = _Range(f"an integer from 0 to {_INT32}", 0, _INT32)
_SEED = _Range(f"an integer from 0 to {_UINT32}", 0, _UINT32)
_POSITIVE = _Range("a finite number above 0", 0, math.inf, open_low=True, open_high=True)
_NOT_NEGATIVE = _Range("a finite number of at least 0", 0, math.inf, open_high=True)
_DECAY = _Range("a number of at least 0 and below 1", 0, 1, open_high=True)

_RANGES = {
    "model.norm_eps": _POSITIVE,
    "model.rope_theta": _POSITIVE,
    "model.init_std": _POSITIVE,
    "model.dropout": _Range("a probability of at least 0 and below 1", 0, 1, open_high=True),
    "data.seed": _SEED,
    "train.steps": _COUNT,
    "train.global_batch": _COUNT,
    "train.microbatches": _COUNT,
    "train.lr": _POSITIVE,
    "train.warmup": _COUNT_OR_0,
    "train.min_lr_ratio": _Range("a number from 0 to 1", 0, 1),
    "train.weight_decay": _NOT_NEGATIVE,
    "train.beta1": _DECAY,
    "train.beta2": _DECAY,
    "train.eps": _POSITIVE,
    "train.clip": _NOT_NEGATIVE,
    "train.eval_every": _COUNT_OR_0,
    "train.eval_batches": _COUNT,
    "train.seed": _SEED,
    "pipeline.virtual_stages": _COUNT,
    "pipeline.in_flight": _COUNT_OR_0,
    "pipeline.stall_timeout": _POSITIVE,
    "memory.bucket": _COUNT,
    "overlap.streams": _COUNT_OR_0,
    "checkpoint.every": _COUNT_OR_0,
    "checkpoint.keep": _COUNT,
    "checkpoint.keep_every": _COUNT_OR_0,
    "log.every": _COUNT,
}


def check(config: Config) -> Config:
    """Checks the config, cheap checks first; returns it with every model field and the run directory filled in.

    Raises:
        UserError: a value is out of range, contradicts another or the data, or names something unusable.
    """
    for name, allowed in _RANGES.items():
        table, key = name.split(".")
        value = getattr(getattr(config, table), key)
        if value is not None:
            allowed.check(name, value)
    if config.train.warmup > config.train.steps:
        raise UserError("train.warmup", config.train.warmup, f"at most train.steps, which is {config.train.steps}")
    config.grid.check_batch(config.train.global_batch, config.train.microbatches)
    if config.log.tensorboard and importlib.util.find_spec("tensorboardX") is None:
        raise UserError("log.tensorboard", True, "false, or `pip install axonn_jax[tensorboard]`")
    policies = read_policies(config.memory.activations)
    log = _check_log(config.log)
    _check_checkpoint(config.checkpoint)
    if config.model.preset is not None or config.model.vocab is not None:
        config.model.shape()  # a mistake in the model is reported even where the data is not there yet
    manifest = _load(config.data)
    shape = config.model.shape(default_vocab=manifest.vocab)
    _check_data(shape, manifest)
    config.grid.check_model(shape, sequence_parallel=config.memory.sequence_parallel)
    inner_of(config, shape)
    if config.grid.pipe > 1:
        check_not_scanned(config.train.scan_layers)
        check_gather(config.memory.gather)
        check_pipeline(config.grid.pipe, config.train.microbatches, config.pipeline, transformer_pieces(shape))
        policies.check_pipelined()
    policies.check(shape.layers)
    check_scan(config.train.scan_layers, config.memory.offload, policies)
    check_streams(config)
    model = ModelConfig(preset=config.model.preset, attention=config.model.attention, **asdict(shape))
    return replace(config, model=model, log=log)


def inner_of(config: Config, shape: ModelShape) -> Inner:
    """How inner features are split; raises ``UserError`` where they cannot be as `train.inner_features` says."""
    policy, split = read_policies(config.memory.activations).uniform or "full", config.memory.sequence_parallel
    return choose_inner(config.train.inner_features, shape, config.grid, policy, sequence_parallel=split)


def check_fits(model: Any, grid: GridShape) -> None:
    """Raises ``UserError`` where a model that tells its sizes does not divide over the grid as it is laid out."""
    shape = getattr(model, "shape", None)
    if shape is not None:
        split = getattr(model, "sequence_parallel", False)
        grid.check_model(shape, sequence_parallel=split)
        getattr(model, "inner", PAPERS).check(shape, grid, sequence_parallel=split)


def check_streams(config: Config) -> None:
    """Raises ``UserError`` where a device's rows of a microbatch do not divide into the streams asked for."""
    streams, train = config.overlap.streams, config.train
    rows = train.global_batch // train.microbatches // config.grid.batch_shards
    if streams and rows % streams and config.grid.pipe == 1:
        raise UserError("overlap.streams", streams, f"0 or a divisor of a device's {rows} rows of a microbatch")


def check_not_scanned(scan_layers: ScanLayers) -> None:
    """Raises ``UserError`` where a pipeline is asked to scan layers.

    Its programs are cut out of one traced function equation by equation, and a loop is a single one.
    """
    if scan_layers == "yes":
        raise UserError("train.scan_layers", scan_layers, "auto or no where grid.pipe is above 1")


def check_gather(gather: Gather) -> None:
    """Raises ``UserError`` where a pipeline is asked to keep gathered weights.

    Its forward and backward passes are programs of their own, and each gathers what it reads.
    """
    if gather != "layer":
        raise UserError("memory.gather", gather, "layer where grid.pipe is above 1")


def check_scan(scan_layers: ScanLayers, offload: str, policies: Policies) -> ScanLayers:
    """What to ask for where optimizer state is in host memory, or layers differ in their activation policies.

    Buckets in host memory are of the layers' own parameters, and one body of a loop computes all layers alike. Raises
    ``UserError`` where either is asked for beside scanned layers.
    """
    if offload != "none" and scan_layers == "yes":
        raise UserError("train.scan_layers", scan_layers, f"auto or no where memory.offload is {offload}")
    if policies.uniform is None and scan_layers == "yes":
        accepted = f"auto or no where memory.activations differs by layer, as in {policies.text!r}"
        raise UserError("train.scan_layers", scan_layers, accepted)
    return "no" if offload != "none" or policies.uniform is None else scan_layers


def check_pipeline(
    pipe: int, microbatches: int, pipeline: PipelineConfig, pieces: Sequence[Piece]
) -> tuple[Layout, list[range]]:
    """Returns the pipeline's sizes and the pieces of every virtual stage.

    Raises:
        UserError: the policy cannot run so, or the model does not split so.
    """
    layout = Layout(pipe, microbatches, pipeline.virtual_stages)
    check_policy(pipeline.policy, layout)
    if pipeline.split:
        words = pipeline.split.split(",")
        if not all(word.strip().isdecimal() and len(word) < 10 for word in words):
            raise UserError("pipeline.split", pipeline.split, 'numbers of pieces with commas, such as "9,8"')
        return layout, explicit([int(word) for word in words], len(pieces), layout.stages)
    costs = [Cost(piece.name, piece.flops, 2 * piece.flops, piece.params) for piece in pieces]
    return layout, partition(costs, pipe, pipeline.virtual_stages)


def _load(data: DataConfig) -> Manifest:
    if not data.path:
        raise UserError("data.path", data.path, "a directory written by `axonn-jax prepare`")
    manifest = Manifest.load(data.path)
    manifest.check_tokenizer()  # small, and the run's directory gets a copy
    return manifest


def _check_data(shape: ModelShape, manifest: Manifest) -> None:
    if shape.vocab < manifest.vocab:
        raise UserError(
            "model.vocab", shape.vocab, f"at least the prepared data's vocabulary, which is {manifest.vocab}"
        )
    for name in SPLITS:
        tokens = manifest.splits[name].tokens
        if tokens < shape.seq_len + 1:  # a sequence and the token behind it
            raise UserError(
                "model.seq_len",
                shape.seq_len,
                f"at most {tokens - 1}, one less than the tokens of the data's {name} split",
            )


def _check_checkpoint(checkpoint: CheckpointConfig) -> None:
    if checkpoint.every and checkpoint.keep_every % checkpoint.every:
        raise UserError(
            "checkpoint.keep_every",
            checkpoint.keep_every,
            f"a multiple of checkpoint.every, which is {checkpoint.every}",
        )
    if not checkpoint.resume:
        raise UserError("checkpoint.resume", checkpoint.resume, "auto, never, or the path of a checkpoint")
    named = {"checkpoint.weights": checkpoint.weights}
    if checkpoint.resume not in ("auto", "never"):
        named["checkpoint.resume"] = checkpoint.resume
    for name, path in named.items():
        if path and not Path(path).is_dir():
            words = "auto, never, or " if name == "checkpoint.resume" else ""
            raise UserError(name, path, f"{words}the directory of a checkpoint (step_N) or of a run")


def _check_log(log: LogConfig) -> LogConfig:
    """Nothing is created here: a run directory should not appear for a run that cannot start."""
    if not log.dir:
        raise UserError("log.dir", log.dir, "the path of a directory that can be written")
    path = log.dir.replace("{name}", "run")  # only a config that did not come from a file still has it
    existing = Path(path)
    while not os.path.lexists(existing) and existing != existing.parent:
        existing = existing.parent
    if not existing.is_dir():
        what = "is not a directory" if existing == Path(path) else f"{existing} is not a directory"
        raise UserError("log.dir", log.dir, f"a directory that can be written; {what}")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise UserError("log.dir", log.dir, f"a directory that can be written; {existing} cannot")
    return replace(log, dir=path)
