"""The model of a run: named sizes from the literature, and the `[model]` table that changes them; without jax."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from axonn_jax.documents import TOML_BYTES, parse_toml
from axonn_jax.errors import NOT_GIVEN, UserError, nearest, typed_arguments
from axonn_jax.models.config import ModelShape
from axonn_jax.options import AttentionKernel, Settings, typed

T = TypeVar("T")


@cache
def _presets() -> Mapping[str, ModelShape]:
    """Return the models of presets.toml by name, in the order of the file."""
    values: dict[str, dict[str, Any]] = {}
    text = Path(__file__).with_name("presets.toml").read_text(encoding="utf-8")
    for family in parse_toml(text).values():
        for name, own in family.pop("models").items():
            values[name] = values.get(own.pop("like", ""), {}) | family | own
    return {name: ModelShape(**{"kv_heads": of["heads"], "ffn": 4 * of["hidden"]} | of) for name, of in values.items()}


def preset_names() -> tuple[str, ...]:
    """Return the names that `preset` knows, in order of family and size."""
    return tuple(_presets())


@typed_arguments
def preset(name: str, **changes: object) -> ModelShape:
    """Return the named model's sizes, with any fields of `ModelShape` changed.

    Raises:
        UserError: The name is unknown; the message has the nearest known one.
    """
    if name not in _presets():
        names = preset_names()
        raise UserError("model.preset", name, "one of " + ", ".join(names) + nearest(name, names))
    shape = _presets()[name]
    return replace(shape, **changes) if changes else shape  # type: ignore[arg-type]


OF_EXPERTS = ("experts_", "expert_", "moe_", "shared_", "router")
"""Prefixes of the fields that only models with experts have."""


def _with_sizes(cls: type[T]) -> type[T]:
    """Return a table with all fields of `ModelShape` too, None where they are left out, behind its first one."""
    hints = get_type_hints(ModelShape, include_extras=True)
    first, *others = cls.__annotations__.items()
    cls.__annotations__ = dict([first, *((f.name, hints[f.name] | None) for f in fields(ModelShape)), *others])
    for f in fields(ModelShape):
        setattr(cls, f.name, field(default=None, metadata={"of": ModelShape}))
    return cls


@dataclass(frozen=True)
@_with_sizes
class ModelConfig(Settings):
    """The model: a preset, a preset with some sizes changed, or all sizes."""

    preset: str | None = None
    """Name of a published model (docs/train.md lists them); the fields below change its sizes."""
    attention: AttentionKernel = "auto"
    """The form of attention: cudnn (NVIDIA GPUs in half precision), splash (TPUs, needs `tokamax`), blocked (anywhere,
    without whole arrays of scores), xla (with them), or auto: cudnn or splash where they can be had, else blocked; on
    accelerators a run's first lines say which, and why."""

    table = "model"

    @property
    def given(self) -> dict[str, Any]:
        """The fields of `ModelShape` that are not left out."""
        sizes = {f.name: getattr(self, f.name) for f in fields(ModelShape)}
        return {name: value for name, value in sizes.items() if value is not None}

    def shape(self, default_vocab: int | None = None) -> ModelShape:
        """Return the model's sizes; `default_vocab` is used where neither `vocab` nor a preset gives one.

        Raises:
            UserError: the preset is unknown, a required field is missing, or a size is not possible.
        """
        given = self.given
        if self.preset is not None:
            base = preset(self.preset)
            # Sizes that follow from another one in the preset keep following it.
            if base.kv_heads == base.heads and "heads" in given:
                given.setdefault("kv_heads", given["heads"])
            if base.ffn == 4 * base.hidden and "hidden" in given:
                given.setdefault("ffn", 4 * given["hidden"])
            return _without_unused(replace(base, **given), given)
        if default_vocab is not None:
            given.setdefault("vocab", default_vocab)
        required = ("layers", "hidden", "heads", "vocab", "seq_len")
        missing = [name for name in required if name not in given]
        if len(missing) >= 4:
            accepted = f"a preset ({', '.join(preset_names())}), or model.layers, hidden, heads and seq_len"
            raise UserError("model.preset", NOT_GIVEN, accepted)
        if missing:
            names = ", ".join(f"model.{name}" for name in missing)
            raise UserError(names, NOT_GIVEN, "required where model.preset is left out; an integer of at least 1")
        given.setdefault("kv_heads", given["heads"])
        given.setdefault("ffn", 4 * given["hidden"])
        return _without_unused(ModelShape(**given), given)


def table_of(shape: ModelShape) -> dict[str, Any]:
    """Return every value of the table that gives a shape; of experts none where there are none."""
    return {name: value for name, value in asdict(shape).items() if shape.experts or not name.startswith(OF_EXPERTS)}


def shape_in(run: Mapping[str, Any]) -> ModelShape | None:
    """Return the sizes that a checkpoint keeps of its run, in `model` or in `config`, a TOML text; None without both.

    Raises ``ValueError`` for sizes that no model has.
    """
    table, text = run.get("model"), run.get("config")
    if table is None and isinstance(text, str):
        if len(text) > TOML_BYTES:
            raise ValueError(f"config = {len(text):,} characters, more than the {TOML_BYTES:,} that are read")
        table = parse_toml(text).get("model")
    if isinstance(table, dict) and isinstance(bias := table.get("bias"), bool):  # as earlier versions wrote
        table = table | {"bias": "all" if bias else "none"}
    return None if table is None else typed(ModelConfig, table, "model").shape()


def _without_unused(shape: ModelShape, given: dict[str, Any]) -> ModelShape:
    """The shape; raises ``UserError`` where something of experts is given that it has none of."""
    unused = {f.name: f.default for f in fields(shape) if not shape.experts and f.name.startswith(OF_EXPERTS)}
    for name, default in (unused | {"expert_ffn": shape.ffn} if unused else unused).items():
        if given.get(name, default) != default:
            raise UserError(f"model.{name}", given[name], "left out in a model without model.experts")
    return shape
