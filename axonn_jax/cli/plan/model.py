"""The model that `plan` and `simulate` are asked about: a published one, or that of a file or directory."""

from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import NamedTuple

from axonn_jax.data.corpora import DataConfig
from axonn_jax.data.manifest import MANIFEST, Manifest
from axonn_jax.errors import NOT_GIVEN, UserError
from axonn_jax.experts.shape import MoeConfig
from axonn_jax.grid import GridShape
from axonn_jax.models.config import ModelShape
from axonn_jax.models.huggingface.pretrained import is_pretrained, shape_of
from axonn_jax.models.presets import preset, preset_names
from axonn_jax.train.config import Config
from axonn_jax.train.config_file import read
from axonn_jax.train.rules import Chosen, check_rules

CONFIG = "config.toml"
"""File of a run directory."""


class NamedModel(NamedTuple):
    """A model, and what else its configuration says of a training step."""

    shape: ModelShape
    words: str
    """Words of `axonn-jax train` that name the model."""
    batch: int | None = None
    """Sequences a step; None without a configuration."""
    density: float = 1.0
    moe: MoeConfig = MoeConfig()
    config: Config = Config(data=DataConfig())
    """The configuration, whose settings the command begins with."""

    @property
    def pipes(self) -> bool:
        """False where settings of the configuration are refused in a pipeline."""
        own = self.config
        with suppress(UserError):
            check_rules(Chosen(GridShape(pipe=2), tensor=own.tensor, prune=own.prune, train=own.train))
            return True
        return False

    @property
    def state(self) -> str:
        """The configuration's optimizer state where it is not what a plan counts."""
        train = self.config.train
        named = [] if train.optimizer in ("adamw", "adam") else [f"train.optimizer = {train.optimizer}"]
        return " and ".join([*named, *([f"train.ema = {train.ema:g}"] if train.ema else [])])


def named_model(name: str) -> NamedModel:
    """Return the model of a preset's name, a configuration (.toml), a run directory or one in Hugging Face's layout.

    Raises:
        UserError: there is no such model, or it is one of adapters.
    """
    path = Path(name)
    if path.is_dir() and is_pretrained(path):
        shape = shape_of(path, "--model")
        default = {f.name: f.default for f in fields(ModelShape)} | {"kv_heads": shape.heads, "ffn": 4 * shape.hidden}
        own = {key: value for key, default in default.items() if (value := getattr(shape, key)) != default}
        own |= {"layers": shape.layers, "hidden": shape.hidden, "heads": shape.heads, "seq_len": shape.seq_len}
        sizes = " ".join(f"--model.{key} {str(value).lower()}" for key, value in own.items())
        return NamedModel(shape, f"CONFIG.toml --checkpoint.weights {name} {sizes}")
    if not path.is_dir() and not (path.suffix == ".toml" and path.exists()):
        if name in preset_names():
            return NamedModel(preset(name), f"CONFIG.toml --model.preset {name}")
        try:
            preset(name)
        except UserError as error:
            accepted = (
                f"a configuration (.toml), the directory of a run or of a Hugging Face model, or {error.accepted}"
            )
            raise UserError("--model", name, accepted) from None
    file = path / CONFIG if path.is_dir() else path
    if path.is_dir() and not file.is_file():
        raise UserError("--model", name, f"a directory with {CONFIG} (a run) or config.json (a Hugging Face model)")
    config = read(file)
    if config.lora.adapts:
        raise UserError("--model", name, "a configuration without [lora]: a plan counts all weights as trained")
    places = [Path(place) for place in (config.data.path, *config.data.mix) if place]
    known = next((place for place in places if (place / MANIFEST).is_file()), None)
    if known is None and config.model.preset is None and "vocab" not in config.model.given:
        raise UserError("model.vocab", NOT_GIVEN, f"given in {file}, or its data prepared, whose vocabulary it is")
    shape = config.model.shape(default_vocab=Manifest.load(known).vocab if known else None)
    return NamedModel(shape, str(file), config.train.global_batch, config.prune.density, config.moe, config)
