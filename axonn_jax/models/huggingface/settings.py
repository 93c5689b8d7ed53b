"""Settings of a config.json: values of the right kind, the one value that is supported, rotary positions both ways."""

from collections.abc import Mapping
from typing import Any

from axonn_jax.errors import UserError, nearest
from axonn_jax.models.config import ModelShape

Config = Mapping[str, Any]

# Of each kind of scaling: the field in `rope_scaling`, ours, and the default (None: it must be there).
_FIELDS: Mapping[str, tuple[tuple[str, str, float | None], ...]] = {
    "none": (),
    "linear": (("factor", "rope_factor", None),),
    "llama3": (
        ("factor", "rope_factor", None),
        ("low_freq_factor", "rope_low_freq_factor", None),
        ("high_freq_factor", "rope_high_freq_factor", None),
    ),
    "yarn": (
        ("factor", "rope_factor", None),
        ("beta_fast", "rope_beta_fast", 32.0),
        ("beta_slow", "rope_beta_slow", 1.0),
        ("attention_factor", "rope_attention_factor", 0.0),  # 0: from the factor
    ),
}
_ORIGINAL = "original_max_position_embeddings"
_HAVE_ORIGINAL = ("llama3", "yarn")


def only(config: Config, key: str, *values: object, of: str = "config") -> None:
    """Raise ``UserError`` unless the field is absent, null or one of the values that are supported."""
    given = config.get(key)  # null is how many files say "the default", which is a supported value
    if given is not None and not any(given == value and type(given) is type(value) for value in values):
        accepted = " or ".join(repr(value) if isinstance(value, str) else str(value).lower() for value in values)
        raise UserError(f"{of}.{key}", given, f"{accepted or 'absent'}; nothing else is supported")


def whole(config: Config, key: str, default: int | None = None, *, least: int = 1) -> int:
    """A whole number of at least 1; the default where the field is absent or null. Raises ``UserError``."""
    value = config.get(key)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise UserError(f"config.{key}", value, f"an integer of at least {least}")
    return value


def number(config: Config, key: str, default: float | None, of: str = "config") -> float:
    """A number above 0; the default where the field is absent or null. Raises ``UserError``."""
    value = config.get(key)
    value = default if value is None else value
    if not isinstance(value, int | float) or isinstance(value, bool) or not (value > 0 or value == default):
        raise UserError(f"{of}.{key}", value, "a number above 0")
    try:
        return float(value)
    except OverflowError:
        raise UserError(f"{of}.{key}", value, "a number of ordinary size") from None


def flag(config: Config, key: str, default: bool) -> bool:
    """True or false. Raises ``UserError``."""
    value = config.get(key, default)
    if not isinstance(value, bool):
        raise UserError(f"config.{key}", value, "true or false")
    return value


def rope_fields(config: Config, seq_len: int) -> dict[str, Any]:
    """The fields of `ModelShape` about rotary positions, from transformers 5's `rope_parameters` or the older pair."""
    only(config, "partial_rotary_factor", 1.0, 1)
    key = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"  # of two, transformers takes the older
    rope, of = config.get(key) or {}, f"config.{key}"
    if not isinstance(rope, Mapping):
        raise UserError(of, rope, "an object")
    if any(isinstance(value, Mapping) for value in rope.values()):
        raise UserError(of, rope, "one set of numbers; rotary positions that differ by layer are not computed")
    name = "type" if "rope_type" not in rope and "type" in rope else "rope_type"
    kind = rope.get(name) or "default"
    kind = "none" if kind == "default" else kind
    if kind not in _FIELDS:
        known = ["default", *list(_FIELDS)[1:]]
        hint = nearest(kind, known) if isinstance(kind, str) else ""
        raise UserError(f"{of}.{name}", kind, f"one of {', '.join(known)}{hint}")
    expected = {"rope_type", "type", "rope_theta", "partial_rotary_factor", *(theirs for theirs, _, _ in _FIELDS[kind])}
    only(rope, "partial_rotary_factor", 1.0, 1, of=of)
    if kind in _HAVE_ORIGINAL:
        expected |= {_ORIGINAL}
    if kind == "yarn":
        only(rope, "truncate", True, of=of)
        expected |= {"truncate"}
    for extra in sorted(map(str, rope.keys() - expected)):
        only(rope, extra, of=of)
    fields: dict[str, Any] = {
        "rope_theta": number(rope, "rope_theta", number(config, "rope_theta", 10_000.0), of),
        "rope_scaling": kind,
    }
    for theirs, ours, default in _FIELDS[kind]:
        fields[ours] = number(rope, theirs, default, of)
    if kind in _HAVE_ORIGINAL:  # transformers lets a field beside it win
        at, named = (config, "config") if config.get(_ORIGINAL) is not None else (rope, of)
        value = at.get(_ORIGINAL)
        if value is not None and (type(value) is not int or value < 1):
            raise UserError(f"{named}.{_ORIGINAL}", value, "an integer of at least 1")
        fields["rope_original_seq_len"] = seq_len if value is None else value
    return fields


def rope_config(shape: ModelShape) -> dict[str, Any]:
    """The older pair of fields, which transformers 4 and 5 both read."""
    scaling: dict[str, Any] | None = None
    if shape.rope_scaling != "none":
        scaling = {"rope_type": shape.rope_scaling}
        for theirs, ours, _ in _FIELDS[shape.rope_scaling]:
            if theirs != "attention_factor" or getattr(shape, ours):
                scaling[theirs] = getattr(shape, ours)
        if shape.rope_scaling in _HAVE_ORIGINAL:
            scaling[_ORIGINAL] = shape.rope_original_seq_len
    return {"rope_theta": shape.rope_theta, "rope_scaling": scaling}
