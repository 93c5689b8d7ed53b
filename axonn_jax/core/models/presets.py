"""Model presets from the literature, and the `[model]` table that selects and changes them; no jax."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from axonn_jax.core.documents import parse_toml
from axonn_jax.core.errors import UNSET, UserError, nearest, typed_arguments
from axonn_jax.core.models.config import ModelShape
from axonn_jax.core.options import AttentionKernel, Settings, typed

T = TypeVar("T")


@cache
def _presets() -> Mapping[str, ModelShape]:
    # A model's values override its family's, which override those of the model that `like` names.
    values: dict[str, dict[str, Any]] = {}
    text = Path(__file__).with_name("presets.toml").read_text(encoding="utf-8")
    for family in parse_toml(text).values():
        for name, model_sizes in family.pop("models").items():
            values[name] = values.get(model_sizes.pop("like", ""), {}) | family | model_sizes
    return {
        name: ModelShape(**{"kv_heads": sizes["heads"], "ffn": 4 * sizes["hidden"]} | sizes)
        for name, sizes in values.items()
    }


def preset_names() -> tuple[str, ...]:
    """Return the names of all presets, ordered by family and size."""
    return tuple(_presets())


@typed_arguments
def preset(name: str, **changes: object) -> ModelShape:
    """Return the sizes of a preset, with any fields of `ModelShape` replaced by `changes`.

    Raises:
        UserError: The name is unknown; the message suggests the nearest one.
    """
    if name not in _presets():
        names = preset_names()
        raise UserError("model.preset", name, "one of " + ", ".join(names) + nearest(name, names))
    shape = _presets()[name]
    return replace(shape, **changes) if changes else shape  # type: ignore[arg-type]


OF_EXPERTS = ("experts_", "expert_", "moe_", "shared_", "router")
"""Prefixes of the fields that apply only to models with experts."""


def _with_sizes(cls: type[T]) -> type[T]:
    # Adds the fields of `ModelShape` to the table, so that sizes, types and help texts are written once. All default to
    # None: a size that the user leaves out comes from the preset.
    hints = get_type_hints(ModelShape, include_extras=True)
    first_hint, *other_hints = cls.__annotations__.items()
    cls.__annotations__ = dict(
        [first_hint, *((f.name, hints[f.name] | None) for f in fields(ModelShape)), *other_hints]
    )
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
    def overrides(self) -> dict[str, Any]:
        """Fields of `ModelShape` that the user has set."""
        sizes = {f.name: getattr(self, f.name) for f in fields(ModelShape)}
        return {name: value for name, value in sizes.items() if value is not None}

    def shape(self, default_vocab: int | None = None) -> ModelShape:
        """Return the model's sizes.

        Args:
            default_vocab: Vocabulary if neither `vocab` nor a preset sets one.

        Raises:
            UserError: The preset is unknown, a required field is missing, or a size is invalid.
        """
        sizes = self.overrides
        if self.preset is not None:
            base = preset(self.preset)
            # Derived sizes of the preset stay derived: with more heads, multi-head attention stays multi-head.
            if base.kv_heads == base.heads and "heads" in sizes:
                sizes.setdefault("kv_heads", sizes["heads"])
            if base.ffn == 4 * base.hidden and "hidden" in sizes:
                sizes.setdefault("ffn", 4 * sizes["hidden"])
            return _without_unused(replace(base, **sizes), sizes)
        if default_vocab is not None:
            sizes.setdefault("vocab", default_vocab)
        required = ("layers", "hidden", "heads", "vocab", "seq_len")
        missing = [name for name in required if name not in sizes]
        if len(missing) >= 4:
            accepted = f"a preset ({', '.join(preset_names())}), or model.layers, hidden, heads and seq_len"
            raise UserError("model.preset", UNSET, accepted)
        if missing:
            names = ", ".join(f"model.{name}" for name in missing)
            raise UserError(names, UNSET, "required where model.preset is left out; an integer of at least 1")
        sizes.setdefault("kv_heads", sizes["heads"])
        sizes.setdefault("ffn", 4 * sizes["hidden"])
        return _without_unused(ModelShape(**sizes), sizes)


def table_of(shape: ModelShape) -> dict[str, object]:
    """Return the `[model]` table that describes a shape, without expert fields if it has no experts."""
    return {name: value for name, value in asdict(shape).items() if shape.experts or not name.startswith(OF_EXPERTS)}


def shape_in(run: Mapping[str, object]) -> ModelShape | None:
    """Return the model sizes in the table `model` of a checkpoint's run metadata or of a configuration; None without.

    Raises:
        ValueError: The sizes are not valid.
    """
    table = run.get("model")
    return None if table is None else typed(ModelConfig, table, "model").shape()


def _without_unused(shape: ModelShape, sizes: dict[str, object]) -> ModelShape:
    # Reject expert settings in a dense model rather than ignore them.
    unused = {f.name: f.default for f in fields(shape) if not shape.experts and f.name.startswith(OF_EXPERTS)}
    for name, default in (unused | {"expert_ffn": shape.ffn} if unused else unused).items():
        if sizes.get(name, default) != default:
            raise UserError(f"model.{name}", sizes[name], "left out in a model without model.experts")
    return shape
