"""Settings of attention in a config.json: windows, caps, the divisor of scores; both ways."""

from collections.abc import Mapping
from typing import Any, Literal

from axonn_jax.errors import UserError
from axonn_jax.models.config import ModelShape
from axonn_jax.models.huggingface.settings import Config, flag, number, only, whole

Windows = Literal["none", "always", "chosen", "switched", "alternating"]
"""Presence of a sliding window: never, as `sliding_window` says, only with `use_sliding_window`, which
`max_window_layers` may then restrict (chosen) or not (switched), or in every other layer, from the first on."""
CAPS: Mapping[str, tuple[str, float]] = {
    "attn_logit_softcapping": ("attention_cap", 50.0),
    "final_logit_softcapping": ("logits_cap", 30.0),
}
"""Field of `ModelShape` for each cap, and the value of one that is absent from a Gemma 2."""
_DIVISOR = "query_pre_attn_scalar"
_FULL, _SLIDING = "full_attention", "sliding_attention"
_SAME = "nothing else is supported"


def window_of(config: Config, windows: Windows) -> int:
    """Return the window of all layers that have one; 0: none."""
    if windows == "none":
        return 0
    layers, types = whole(config, "num_hidden_layers"), config.get("layer_types")
    if windows == "alternating":
        if types not in (None, [_FULL if layer % 2 else _SLIDING for layer in range(layers)]):
            raise UserError("config.layer_types", types, f"{_SLIDING} and {_FULL} by turns; {_SAME}")
        return whole(config, "sliding_window", None if "sliding_window" in config else 4096)
    uses = windows == "always" or flag(config, "use_sliding_window", False)
    given = config.get("sliding_window", 4096)
    size = whole(config, "sliding_window") if uses and "sliding_window" in config and given is not None else given
    size = size if uses and size is not None else 0
    if types is not None:
        if not isinstance(types, list) or not types or any(kind != types[0] for kind in types):
            raise UserError("config.layer_types", types, f"all alike: a window that differs by layer; {_SAME}")
        if types[0] not in (_FULL, _SLIDING):
            raise UserError("config.layer_types", types[0], f"{_FULL} or {_SLIDING}; {_SAME}")
        return size if types[0] == _SLIDING or windows == "always" else 0
    if windows == "switched" and size:
        only(config, "max_window_layers", 0)  # transformers 4.51 obeys it, later ones do not
    if windows == "chosen" and size:
        first = whole(config, "max_window_layers", 28, least=0)
        if 0 < first < layers:
            raise UserError("config.max_window_layers", first, f"0, or num_hidden_layers = {layers}; {_SAME}")
        return 0 if first else size
    return int(size)


def window_config(shape: ModelShape, windows: Windows) -> dict[str, Any]:
    """Return the fields of config.json about windows."""
    window = shape.window
    config: dict[str, Any] = {} if windows == "none" else {"sliding_window": window or None}
    if windows == "switched":
        config |= {"use_sliding_window": bool(window), "max_window_layers": 0}
    if windows == "chosen":
        config |= {"use_sliding_window": bool(window), "max_window_layers": 0 if window else shape.layers}
    return config


def score_fields(config: Config, head_dim: int) -> dict[str, Any]:
    """Return the fields of `ModelShape` about scores: caps, of which null is none, and the divisor."""
    fields: dict[str, Any] = {
        ours: 0.0 if key in config and config[key] is None else number(config, key, default)
        for key, (ours, default) in CAPS.items()
    }
    divisor = whole(config, _DIVISOR, 256)
    return fields if divisor == head_dim else fields | {"score_dim": divisor}


def score_config(shape: ModelShape) -> dict[str, Any]:
    """Return the fields of config.json about scores."""
    return {key: getattr(shape, ours) or None for key, (ours, _) in CAPS.items()} | {_DIVISOR: shape.score_dim}
