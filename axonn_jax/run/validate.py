"""Validation of a training configuration, without jax or a device."""

import contextlib
import importlib.util
import os
from dataclasses import asdict, replace
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING

from axonn_jax.core.adapters.config import IDENTITY, LoraConfig
from axonn_jax.core.adapters.config import check_shape as check_adaptable
from axonn_jax.core.checkpoint.manifest import all_steps, step_of
from axonn_jax.core.documents import look_at
from axonn_jax.core.engines.rules import RunSettings, check_rules
from axonn_jax.core.errors import UserError
from axonn_jax.core.models.block_comm import BlockComm
from axonn_jax.core.models.config import ModelShape
from axonn_jax.core.models.declared.segments import check_repeats, transformer_segments
from axonn_jax.core.models.presets import ModelConfig
from axonn_jax.files.data.corpora import Corpora, DataConfig
from axonn_jax.files.data.manifest import MANIFEST, TOKENIZER
from axonn_jax.files.huggingface.hub import commit_of, hub_name, resolve_path
from axonn_jax.files.huggingface.pretrained import FOLDER as PRETRAINED
from axonn_jax.files.huggingface.pretrained import check_shape, is_pretrained
from axonn_jax.pipe.stages.cut import check_pipeline
from axonn_jax.planning.declared.residual_comm import choose_residual_comm
from axonn_jax.run.config import CheckpointConfig, Config, LogConfig
from axonn_jax.run.config_file import read
from axonn_jax.run.tracking.tracker import tracker_class

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from axonn_jax.files.data.prompts import FixedPrompt

_OF_RUN = "the directory of a checkpoint (step_N) or of a run"
WEIGHTS = f"{_OF_RUN}, or a pretrained directory"
"""Description of accepted initial weights, for errors."""
_FROM = ("checkpoint.resume", "checkpoint.weights", "checkpoint.adapter")


def check(config: Config) -> Config:
    """Check a config, cheap checks first.

    Args:
        config: The config as it was read.

    Returns:
        The config with every model field, the run directory, the steps of `train.epochs`, the adapters' settings and
        the commit of weights on the Hub filled in.

    Raises:
        UserError: A value is out of range, contradicts another or the data, or names something unusable.
    """
    for name in ("data.path", "log.dir", *_FROM, "prune.mask_file", "train.sample_prompts"):
        look_at(name, attrgetter(name)(config))
    for name, paths in (("data.mix", config.data.mix), ("data.held_out", config.data.held_out.values())):
        for path in paths:
            look_at(name, path)
    config.grid.check_batch(config.train.global_batch, config.train.microbatches)
    for name, library in (("tensorboard", "tensorboardX"), ("wandb", "wandb"), ("mlflow", "mlflow")):
        if (value := getattr(config.log, name)) and importlib.util.find_spec(library) is None:
            none = "false" if value is True else "empty"
            raise UserError(f"log.{name}", value, f"{none}, or `pip install 'axonn_jax[{name}]'`")
    log = _check_log(config.log)
    goes_on = _goes_on(config.checkpoint, log)
    _check_checkpoint(config.checkpoint, log, goes_on=goes_on)
    config = replace(config, lora=_lora_of(config))
    if config.model.preset is not None or "vocab" in config.model.overrides:
        config.model.shape()  # reports a mistake in the model even if the data does not exist yet
    data = corpora_of(config.data)
    shape = config.model.shape(default_vocab=max(corpus.manifest.vocab for corpus in data.all))
    if shape.vocab < (used := max(corpus.manifest.used for corpus in data.all)):
        accepted = f"at least {used}, or data without token {used - 1}"
        raise UserError("model.vocab", shape.vocab, accepted)
    config, weights = _with_weights(config, log.dir, goes_on=goes_on)
    if weights is not None and not goes_on:
        _check_weights(weights, shape)
    if config.train.eval_every and not data.evaluated:
        empty = " and ".join(repr(str(corpus.manifest.path)) for corpus in data.trained)
        accepted = f"0, or data with a valid split; that of {empty} is empty (`prepare --holdout 0`)"
        raise UserError("train.eval_every", config.train.eval_every, accepted)
    data.check_seq_len(shape.seq_len)
    if config.train.epochs:
        steps = max(1, round(config.train.epochs * data.rows(shape.seq_len) / config.train.global_batch))
        config = replace(config, train=replace(config.train, steps=steps))
    if (traced := config.log.profiled) and traced[-1] > config.train.steps:
        raise UserError("log.profile", config.log.profile, f"at most train.steps, which is {config.train.steps}")
    shape.check_grid(config.grid, sequence_split=config.memory.sequence_parallel)
    residual_comm_of(config, shape)
    if config.tensor.scan_layers == "yes":
        check_repeats(shape.layers, shape.layer_period)
    settings = RunSettings(
        config.grid, config.memory, config.tensor, config.prune, config.lora, config.moe, config.train,
        experts=shape.experts > 0,
    )  # fmt: skip
    check_rules(settings)
    if not goes_on:  # a resumed run takes its masks from the checkpoint
        check_masks(config.prune.mask_file)
    check_lora(config, shape)
    config.goldfish.check()
    if config.goldfish.k and config.goldfish.h >= shape.seq_len:
        raise UserError("goldfish.h", config.goldfish.h, f"below model.seq_len, which is {shape.seq_len}")
    if config.prune.at_step >= config.train.steps:
        raise UserError("prune.at_step", config.prune.at_step, f"below train.steps, which is {config.train.steps}")
    if config.grid.pipe > 1:
        check_pipeline(config.grid.pipe, config.train.microbatches, config.pipeline, transformer_segments(shape))
    if (parts := config.tensor.sub_batches) and config.rows % parts:
        accepted = f"0 or a divisor of a device's {config.rows} sequences of a microbatch"
        raise UserError("tensor.sub_batches", parts, accepted)
    check_samples(config, shape)
    # Last, because the import runs arbitrary user code, which a wrong configuration should not get to.
    if config.log.tracker:
        tracker_class(config.log.tracker)  # only checked here; the run's first process makes an instance
    model = ModelConfig(preset=config.model.preset, attention=config.model.attention, **asdict(shape))
    return replace(config, model=model, log=log)


def _with_weights(config: Config, log_dir: str, *, goes_on: bool) -> tuple[Config, Path | None]:
    """Return the config with a Hub name pinned to its commit, and the directory of the initial weights, if needed."""
    # A resumed run keeps the commit that it began with: the name may point to a newer one by now.
    weights, run = config.checkpoint.weights, Path(log_dir) / "config.toml"
    if goes_on and hub_name(weights) is not None and run.is_file():
        with contextlib.suppress(UserError):
            previous = read(run).checkpoint.weights
            weights = previous if previous.partition("@")[0] == weights else weights
    needed = weights and (not goes_on or config.lora.adapts)
    folder = resolve_path(weights, "checkpoint.weights", WEIGHTS) if needed else None
    if folder is not None and hub_name(weights) is not None:
        weights = commit_of(folder)
    return replace(config, checkpoint=replace(config.checkpoint, weights=weights)), folder


def _check_weights(weights: Path, shape: ModelShape) -> None:
    """Raise ``UserError`` if initial weights do not fit the model, or the small files next to them are damaged."""
    from axonn_jax.files.data.tokenize import check_files
    from axonn_jax.files.huggingface.reader import Pretrained  # needs a library that other runs do without

    if is_pretrained(weights):
        check_shape(shape, weights, "checkpoint.weights")
        Pretrained(weights, "checkpoint.weights")
        check_files(weights, "checkpoint.weights")
        return
    run = weights.parent if step_of(weights) is not None else weights
    run = run.parent if run.name == "checkpoints" else run
    if (run / PRETRAINED).is_dir():
        check_files(run / PRETRAINED, "checkpoint.weights")


def residual_comm_of(config: Config, shape: ModelShape) -> BlockComm:
    """Return the communication of blocks that `tensor.residual_comm` asks for.

    Args:
        config: The configuration.
        shape: Sizes of the model.

    Raises:
        UserError: The model or the grid does not allow it.
    """
    comm, memory = config.tensor.residual_comm, config.memory
    return choose_residual_comm(comm, shape, config.grid, memory.activations, sequence_split=memory.sequence_parallel)


def check_samples(config: Config, shape: ModelShape) -> None:
    """Check that a run can generate the samples of `train.sample_every`.

    Args:
        config: The configuration.
        shape: Sizes of the model.

    Raises:
        UserError: One of the two settings is missing, or the prompts cannot be used.
    """
    every, path = config.train.sample_every, config.train.sample_prompts
    if bool(every) != bool(path):
        accepted = f"{'0' if every else 'at least 1'} where train.sample_prompts is {path!r}"
        raise UserError("train.sample_every", every, accepted)
    if every:
        samples_of(config, shape)


def samples_of(config: Config, shape: ModelShape) -> "tuple[Tokenizer, list[FixedPrompt]]":
    """Return a run's tokenizer and the prompts of `train.sample_prompts`; raise ``UserError`` for an unusable file."""
    from axonn_jax.files.data.prompts import fixed_prompts
    from axonn_jax.files.data.tokenize import load

    tokenizer = load(Path(config.data.tokenizer) / TOKENIZER)
    return tokenizer, fixed_prompts(Path(config.train.sample_prompts), tokenizer, shape, "train.sample_prompts")


def check_masks(path: str) -> None:
    """Raise ``UserError`` if the path of masks, unless empty, is not a file."""
    if path and not Path(path).is_file():
        raise UserError("prune.mask_file", path, "an .npz file of arrays of booleans by parameter")


def _lora_of(config: Config) -> LoraConfig:
    """Return the adapters' settings: those of `checkpoint.adapter`, if set, which [lora] must not contradict."""
    name, requested, field = config.checkpoint.adapter, config.lora, "checkpoint.adapter"
    if not name:
        return requested
    from axonn_jax.core.adapters.stored import adapters_in  # imports jax, a second
    from axonn_jax.core.checkpoint.restore import resolve_checkpoint
    from axonn_jax.core.distributed.host_sync import LocalSync
    from axonn_jax.files.adapters.peft import is_adapter, read_config

    if not Path(name).is_dir():
        raise UserError(field, name, "the directory of PEFT's files, of a run or of a checkpoint")
    if is_adapter(Path(name)):
        stored = read_config(Path(name), field)[0]
    elif adapters := adapters_in(resolve_checkpoint(Path(name), LocalSync(), lambda line: None, field), field):
        stored = adapters.config
    else:
        raise UserError(field, name, "adapters; a whole model is for checkpoint.weights")
    # An untouched [lora] takes the adapter's settings; dropout is the exception, as it only concerns this training run.
    for key in IDENTITY if requested != LoraConfig(dropout=requested.dropout) else ():
        value, expected = getattr(requested, key), getattr(stored, key)
        if {*value} != {*expected} if key == "targets" else value != expected:
            raise UserError(f"lora.{key}", value, f"{expected}, as in {name}, or [lora] left out")
    return replace(stored, dropout=requested.dropout or stored.dropout)


def check_lora(config: Config, shape: ModelShape) -> None:
    """Check that a run can train the adapters of [lora].

    Args:
        config: The configuration.
        shape: Sizes of the model.

    Raises:
        UserError: The settings do not fit the model, or the base or the adapter's files are missing.
    """
    config.lora.check()
    check_adaptable(shape, config.lora)
    if not config.lora.adapts:
        return
    if (adapter := Path(config.checkpoint.adapter)) != Path():
        from axonn_jax.files.adapters.peft import checked_files, is_adapter

        if is_adapter(adapter):  # `_lora_of` has read the adapters of a run or a checkpoint
            checked_files(adapter, shape, "checkpoint.adapter")
    # A resumed run needs the base too, since its checkpoints contain the adapters only.
    weights = config.checkpoint.weights
    if not weights or not (hub_name(weights) or Path(weights).is_dir()):
        accepted = "the directory of the base, a checkpoint or a pretrained one, as lora.rank is above 0"
        raise UserError("checkpoint.weights", weights, accepted)


def _goes_on(checkpoint: CheckpointConfig, log: LogConfig) -> bool:
    # Only the existence of a checkpoint counts; its content is checked when it is loaded.
    if checkpoint.resume == "auto":
        return bool(all_steps(Path(log.dir) / "checkpoints"))
    return checkpoint.resume != "never"


def corpora_of(data: DataConfig) -> Corpora:
    """Load the manifests of a run's training and evaluation data; raise ``UserError`` for unusable directories."""
    return Corpora.load(data.path, data.mix, data.held_out)


def _check_checkpoint(checkpoint: CheckpointConfig, log: LogConfig, *, goes_on: bool) -> None:
    if checkpoint.every and checkpoint.keep_every % checkpoint.every:
        accepted = f"a multiple of checkpoint.every, which is {checkpoint.every}"
        raise UserError("checkpoint.keep_every", checkpoint.keep_every, accepted)
    if not checkpoint.resume:
        raise UserError("checkpoint.resume", checkpoint.resume, "auto, never, or the path of a checkpoint")
    paths = {} if goes_on else {"checkpoint.weights": checkpoint.weights}
    if checkpoint.resume not in ("auto", "never"):
        paths["checkpoint.resume"] = checkpoint.resume
    for name in ("checkpoint.weights", "checkpoint.adapter"):
        begins = Path(value := getattr(checkpoint, name.removeprefix("checkpoint.")))
        run = begins.parent.parent if begins.parent.name == "checkpoints" else begins
        if value and run.resolve() == Path(log.dir).resolve():
            raise UserError("log.dir", log.dir, f"another directory than {name} = {value}")
    for name, path in paths.items():
        # A name on the Hub is downloaded only after the cheaper checks.
        downloads = name == "checkpoint.weights" and hub_name(path)
        if path and not downloads and not Path(path).is_dir():
            raise UserError(name, path, f"auto, never, or {_OF_RUN}" if name == "checkpoint.resume" else WEIGHTS)


def _check_log(log: LogConfig) -> LogConfig:
    if not log.dir:
        raise UserError("log.dir", log.dir, "the path of a directory that can be written")
    path = log.dir.replace("{name}", "run")  # only a config that did not come from a file still has it
    # Check the nearest existing parent instead of creating the directory: a run that cannot start leaves nothing.
    existing = Path(path)
    while not os.path.lexists(existing) and existing != existing.parent:
        existing = existing.parent
    if not existing.is_dir():
        reason = "is not a directory" if existing == Path(path) else f"{existing} is not a directory"
        raise UserError("log.dir", log.dir, f"a directory that can be written; {reason}")
    if existing == Path(path) and not (existing / "checkpoints").is_dir():
        data = "prepared data, or a checkpoint," if (existing / MANIFEST).is_file() else ""
        if content := "a model" if is_pretrained(existing) else data:
            raise UserError("log.dir", log.dir, f"a directory of its own; {content} is in this one")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise UserError("log.dir", log.dir, f"a directory that can be written; {existing} cannot")
    return replace(log, dir=path)
