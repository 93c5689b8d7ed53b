"""Model and batch of `plan` and `simulate`: a preset, a configuration or a directory, and a number of tokens."""

import shlex
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from fractions import Fraction
from math import floor
from pathlib import Path
from typing import NamedTuple

from axonn_jax.core.adapters.config import check_shape
from axonn_jax.core.engines.rules import RunSettings, check_rules
from axonn_jax.core.errors import UNSET, UserError
from axonn_jax.core.grid import GridShape
from axonn_jax.core.models.config import ModelShape
from axonn_jax.core.models.presets import preset, preset_names
from axonn_jax.core.options import amount
from axonn_jax.files.data.manifest import MANIFEST, Manifest
from axonn_jax.files.huggingface.pretrained import is_pretrained, shape_of
from axonn_jax.planning.space import SearchSpace
from axonn_jax.run.config import Config
from axonn_jax.run.config_file import loads, read, split_argv

CONFIG = "config.toml"
"""Configuration file of a run directory."""
_TOKENS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "ki": 2**10, "mi": 2**20}
_MAX_SEQUENCES = 2**31 - 1  # the limit of train.global_batch
_PLANNED_SETTINGS = {
    "train.microbatches": "--microbatch fixes the sequences of one", "pipeline.in_flight": "memory decides it",
    "pipeline.split": "stages are balanced",
}  # fmt: skip
"""Settings that a plan decides, with a hint for the error message."""


class NamedModel(NamedTuple):
    """Model, and the configuration of the step that trains it."""

    shape: ModelShape
    words: str
    """Words of `axonn-jax train` that name the model and its settings."""
    config: Config
    batch: int | None
    """Sequences a step; None if neither a configuration nor a flag sets them."""
    packed: bool = False
    """True if the data are packed rows."""
    batched: bool = False
    """True if the words set the sequences of a step."""

    def check(self, pipe: int = 1, offload: bool = False) -> None:
        """Raise ``UserError`` if settings of the configuration contradict these choices or each other."""
        user_config = self.config
        memory = replace(user_config.memory, offload="optimizer" if offload else "none", reshard_after="forward")
        tables = (user_config.tensor, user_config.prune, user_config.lora, user_config.moe, user_config.train)
        check_rules(RunSettings(GridShape(pipe=pipe), memory, *tables, experts=self.shape.experts > 0))

    def takes(self, pipe: int = 1, offload: bool = False) -> bool:
        """Return False if `check` raises."""
        with suppress(UserError):
            self.check(pipe, offload)
            return True
        return False

    def within(self, space: SearchSpace) -> SearchSpace:
        """Restrict a search to what the configuration allows; raise ``UserError`` if nothing remains."""
        offloads = [offload for offload in space.offload if self.takes(offload=offload)] or space.offload[:1]
        pipelined = space.virtual_stages[0] > 1  # more than one virtual stage requires a pipeline
        self.check(space.axes.get("pipe", 2 if pipelined else 1), offloads[0])
        # Settings that no pipeline supports restrict the search instead of refusing it.
        stage_limit = {} if self.takes(2, offloads[0]) else {"pipe": 1}
        return replace(space, axes={**stage_limit, **space.axes}, offload=tuple(offloads))


def resolve_model(name: str, settings: Sequence[str] = ()) -> NamedModel:
    """Return the model of a preset, a configuration (.toml), a run directory or a Hugging Face directory.

    Args:
        name: Name or path.
        settings: Words of `axonn-jax train` that change the configuration, such as `--lora.rank 16`.

    Raises:
        UserError: There is no such model, or a setting is wrong or decided by the plan.
    """
    path, words, flags = Path(name), shlex.join(settings), split_argv(settings)[1]
    for key, value in flags:
        if key in _PLANNED_SETTINGS:
            raise UserError(f"--{key}", value, f"left out, as a plan chooses it: {_PLANNED_SETTINGS[key]}")
    set_keys = {key for key, _ in flags}
    if path.is_dir() and is_pretrained(path):
        shape = shape_of(path, "--model")
        # Sizes at their defaults would only lengthen the command.
        default = {f.name: f.default for f in fields(ModelShape)} | {"kv_heads": shape.heads, "ffn": 4 * shape.hidden}
        sizes = {key: value for key, default in default.items() if (value := getattr(shape, key)) != default}
        sizes |= {"layers": shape.layers, "hidden": shape.hidden, "heads": shape.heads, "seq_len": shape.seq_len}
        size_words = " ".join(f"--model.{key} {str(value).lower()}" for key, value in sizes.items())
        config = loads("", [*split_argv(size_words.split())[1], *flags])
        return _from_config(
            config, f"CONFIG.toml --checkpoint.weights {shlex.quote(name)} {size_words} {words}", name, set_keys
        )
    if not path.is_dir() and not (path.suffix == ".toml" and path.exists()):
        if name not in preset_names():
            try:
                preset(name)
            except UserError as error:
                kinds = "a configuration (.toml), the directory of a run or of a Hugging Face model"
                raise UserError("--model", name, f"{kinds}, or {error.accepted}") from None
        if other_preset := dict(flags).get("model.preset"):
            raise UserError("--model.preset", other_preset, "left out, as --model names a preset")
        config = loads("", [("model.preset", name), *flags])
        return _from_config(config, f"CONFIG.toml --model.preset {name} {words}", name, set_keys)
    file = path / CONFIG if path.is_dir() else path
    if path.is_dir() and not file.is_file():
        raise UserError("--model", name, f"a directory with {CONFIG} (a run) or config.json (a Hugging Face model)")
    return _from_config(read(file, flags), f"{shlex.quote(str(file))} {words}", str(file), set_keys, use_batch=True)


def _from_config(
    config: Config, words: str, source: str, set_keys: Collection[str], use_batch: bool = False
) -> NamedModel:
    config.lora.check()
    folders = [Path(folder) for folder in (config.data.path, *config.data.mix) if folder]
    required = bool({"data.path", "data.mix"} & {*set_keys})
    # A configuration's data may not be prepared yet, but data that a flag names must exist.
    manifests = [Manifest.load(folder) for folder in folders if required or (folder / MANIFEST).is_file()]
    data, batched = manifests[0] if manifests else None, "train.global_batch" in set_keys
    if data is None and config.model.preset is None and "vocab" not in config.model.overrides:
        raise UserError("model.vocab", UNSET, f"given in {source}, or its data prepared, whose vocabulary it is")
    shape = config.model.shape(default_vocab=data.vocab if data else None)
    check_shape(shape, config.lora)
    batch = config.train.global_batch if batched or use_batch else None
    return NamedModel(shape, words.rstrip(), config, batch, data is not None and data.packed, batched)


def sequences(text: str, seq: int) -> int:
    """Return the sequences of a batch in tokens, which may be rounded, such as `16.8M`.

    A rounded number stands for the nearby batch with the most factors of two, since grids divide it: 16.8M at 2,048
    tokens is 8,192 sequences. K and M may be powers of two: 512K is 524,288 tokens.

    Args:
        text: Number of tokens, such as 16777216, 16.8M, 4Mi or 512K.
        seq: Tokens of a sequence.

    Raises:
        UserError: The tokens are no whole number of sequences.
    """
    accepted = "tokens a step, such as 16777216, 4Mi or 16.8M"
    tokens, slack = amount("--batch-tokens", text, _TOKENS, accepted)
    if tokens > _MAX_SEQUENCES * seq:
        raise UserError("--batch-tokens", text, f"at most {_MAX_SEQUENCES:,} sequences of {seq} tokens")
    binary = {"k": Fraction(2**10, 10**3), "m": Fraction(2**20, 10**6)}.get(text.strip()[-1:].lower(), Fraction(1))
    numbers = [_most_even((tokens - slack) * factor / seq, (tokens + slack) * factor / seq) for factor in (1, binary)]
    if not any(numbers):
        near = max(1, round(tokens / seq)) * seq
        raise UserError("--batch-tokens", text, f"a multiple of the sequence length, {seq}; nearest: {near}")
    return max(numbers, key=lambda number: number & -number)


def _most_even(low: Fraction, high: Fraction) -> int:
    # The positive integer of a range with the most factors of two; 0 if the range has none.
    first, last, step = -floor(-low), floor(high), 1
    if first > last or last < 1:
        return 0
    while (last // (2 * step)) * 2 * step >= max(first, 1):
        step *= 2
    return last // step * step
