"""The model and the batch that `plan` and `simulate` are asked about.

A model is a published one, or that of a file or directory; a batch a number of tokens: 16777216, 16.8M, 4Mi or 512K.
"""

import shlex
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from fractions import Fraction
from math import floor
from pathlib import Path
from typing import NamedTuple

from axonn_jax.adapters.config import check_shape
from axonn_jax.data.manifest import MANIFEST, Manifest
from axonn_jax.errors import NOT_GIVEN, UserError
from axonn_jax.grid import GridShape
from axonn_jax.models.config import ModelShape
from axonn_jax.models.huggingface.pretrained import is_pretrained, shape_of
from axonn_jax.models.presets import preset, preset_names
from axonn_jax.options import amount
from axonn_jax.planner.space import SearchSpace
from axonn_jax.train.config import Config
from axonn_jax.train.config_file import loads, read, split_argv
from axonn_jax.train.rules import Chosen, check_rules

CONFIG = "config.toml"
"""File of a run directory."""
_TOKENS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "ki": 2**10, "mi": 2**20}
_MOST_SEQUENCES = 2**31 - 1  # as train.global_batch
_CHOSEN = {
    "train.microbatches": "--microbatch fixes the sequences of one", "pipeline.in_flight": "memory decides it",
    "pipeline.split": "stages are balanced",
}  # fmt: skip
"""Settings that a plan chooses, with a hint."""


class NamedModel(NamedTuple):
    """A model, and the configuration of the step that trains it."""

    shape: ModelShape
    words: str
    """Words of `axonn-jax train` that name the model and its settings."""
    config: Config
    batch: int | None
    """Sequences a step; None where neither a configuration nor a flag says."""
    packed: bool = False
    """True if its data is packed rows."""
    batched: bool = False
    """True if the words say the sequences of a step."""

    def check(self, pipe: int = 1, offload: bool = False) -> None:
        """Raise ``UserError`` where settings of the configuration are refused beside these choices, or each other."""
        own = self.config
        memory = replace(own.memory, offload="optimizer" if offload else "none", reshard_after="forward")
        rest = (own.tensor, own.prune, own.lora, own.moe, own.train)
        check_rules(Chosen(GridShape(pipe=pipe), memory, *rest, experts=self.shape.experts > 0))

    def takes(self, pipe: int = 1, offload: bool = False) -> bool:
        """Return False where `check` raises."""
        with suppress(UserError):
            self.check(pipe, offload)
            return True
        return False

    def within(self, space: SearchSpace) -> SearchSpace:
        """Return the part of a search that the configuration's settings allow; raise ``UserError`` where none is."""
        ways = [offload for offload in space.offload if self.takes(offload=offload)] or space.offload[:1]
        pipes = space.virtual_stages[0] > 1  # one is asked for
        self.check(space.axes.get("pipe", 2 if pipes else 1), ways[0])
        alone = {} if self.takes(2, ways[0]) else {"pipe": 1}
        return replace(space, axes={**alone, **space.axes}, offload=tuple(ways))


def named_model(name: str, settings: Sequence[str] = ()) -> NamedModel:
    """Return the model of a preset's name, a configuration (.toml), a run directory or one in Hugging Face's layout.

    Args:
        name: Name or path.
        settings: Words of `axonn-jax train` that change the configuration, as `--lora.rank 16`.

    Raises:
        UserError: there is no such model, a setting is wrong, or a plan chooses it.
    """
    path, words, flags = Path(name), shlex.join(settings), split_argv(settings)[1]
    for key, value in flags:
        if key in _CHOSEN:
            raise UserError(f"--{key}", value, f"left out, as a plan chooses it: {_CHOSEN[key]}")
    said = {key for key, _ in flags}
    if path.is_dir() and is_pretrained(path):
        shape = shape_of(path, "--model")
        default = {f.name: f.default for f in fields(ModelShape)} | {"kv_heads": shape.heads, "ffn": 4 * shape.hidden}
        own = {key: value for key, default in default.items() if (value := getattr(shape, key)) != default}
        own |= {"layers": shape.layers, "hidden": shape.hidden, "heads": shape.heads, "seq_len": shape.seq_len}
        sizes = " ".join(f"--model.{key} {str(value).lower()}" for key, value in own.items())
        config = loads("", [*split_argv(sizes.split())[1], *flags])
        return _named(config, f"CONFIG.toml --checkpoint.weights {shlex.quote(name)} {sizes} {words}", name, said)
    if not path.is_dir() and not (path.suffix == ".toml" and path.exists()):
        if name not in preset_names():
            try:
                preset(name)
            except UserError as error:
                kinds = "a configuration (.toml), the directory of a run or of a Hugging Face model"
                raise UserError("--model", name, f"{kinds}, or {error.accepted}") from None
        if other := dict(flags).get("model.preset"):
            raise UserError("--model.preset", other, "left out, as --model names a preset")
        config = loads("", [("model.preset", name), *flags])
        return _named(config, f"CONFIG.toml --model.preset {name} {words}", name, said)
    file = path / CONFIG if path.is_dir() else path
    if path.is_dir() and not file.is_file():
        raise UserError("--model", name, f"a directory with {CONFIG} (a run) or config.json (a Hugging Face model)")
    return _named(read(file, flags), f"{shlex.quote(str(file))} {words}", str(file), said, own=True)


def _named(config: Config, words: str, source: str, said: Collection[str], own: bool = False) -> NamedModel:
    """Return the model of a configuration, whose batch counts if it is `said` in the words, or the configuration its
    `own`; data must be there if it is said."""
    config.lora.check()
    places = [Path(place) for place in (config.data.path, *config.data.mix) if place]
    here = bool({"data.path", "data.mix"} & {*said})
    known = [Manifest.load(place) for place in places if here or (place / MANIFEST).is_file()]
    data, batched = known[0] if known else None, "train.global_batch" in said
    if data is None and config.model.preset is None and "vocab" not in config.model.given:
        raise UserError("model.vocab", NOT_GIVEN, f"given in {source}, or its data prepared, whose vocabulary it is")
    shape = config.model.shape(default_vocab=data.vocab if data else None)
    check_shape(shape, config.lora)
    batch = config.train.global_batch if batched or own else None
    return NamedModel(shape, words.rstrip(), config, batch, data is not None and data.packed, batched)


def sequences(text: str, seq: int) -> int:
    """Sequences of a batch given in tokens: exactly, or rounded such as `16.8M`.

    A rounded number stands for the batch near it with the most factors of two, as grids divide it: 16.8M at 2,048 is
    8,192 sequences. K and M may be powers of two: 512K is 524,288 tokens, 256 sequences. Raises ``UserError`` where
    there is no whole number of sequences.
    """
    accepted = "tokens a step, such as 16777216, 4Mi or 16.8M"
    tokens, slack = amount("--batch-tokens", text, _TOKENS, accepted)
    if tokens > _MOST_SEQUENCES * seq:
        raise UserError("--batch-tokens", text, f"at most {_MOST_SEQUENCES:,} sequences of {seq} tokens")
    binary = {"k": Fraction(2**10, 10**3), "m": Fraction(2**20, 10**6)}.get(text.strip()[-1:].lower(), Fraction(1))
    numbers = [_most_even((tokens - slack) * factor / seq, (tokens + slack) * factor / seq) for factor in (1, binary)]
    if not any(numbers):
        near = max(1, round(tokens / seq)) * seq
        raise UserError("--batch-tokens", text, f"a multiple of the sequence length, {seq}; nearest: {near}")
    return max(numbers, key=lambda number: number & -number)


def _most_even(low: Fraction, high: Fraction) -> int:
    """Return the whole number above 0 with the most factors of two in a range, 0 where there is none."""
    first, last, step = -floor(-low), floor(high), 1
    if first > last or last < 1:
        return 0
    while (last // (2 * step)) * 2 * step >= max(first, 1):
        step *= 2
    return last // step * step
