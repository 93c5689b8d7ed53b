"""Typed fields of a config.json, and conversion of rotary, window, score and expert settings in both directions."""

from collections.abc import Mapping
from typing import Any, Literal

from axonn_jax.core.errors import UserError, nearest
from axonn_jax.core.models.config import MOST_LAYERS, ModelShape

Config = Mapping[str, Any]
Windows = Literal["none", "always", "chosen", "switched", "alternating"]
"""How a family describes a sliding window: never; always by `sliding_window`; only with `use_sliding_window`, which
`max_window_layers` may restrict (chosen) or not (switched); or in alternating layers, starting with the first."""
CAPS: Mapping[str, tuple[str, float]] = {
    "attn_logit_softcapping": ("attention_cap", 50.0),
    "final_logit_softcapping": ("logits_cap", 30.0),
}
"""Field of `ModelShape` for each cap, and Gemma 2's default if it is absent."""
_DIVISOR = "query_pre_attn_scalar"
_FULL, _SLIDING = "full_attention", "sliding_attention"
_SAME = "nothing else is supported"
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Fields that hold the number of experts in any family."""

# Fields of each kind of `rope_scaling`, which are ours without the prefix `rope_`, with defaults (None: required).
_SCALINGS: Mapping[str, Mapping[str, float | None]] = {
    "none": {},
    "linear": {"factor": None},
    "llama3": {"factor": None, "low_freq_factor": None, "high_freq_factor": None},
    "yarn": {"factor": None, "beta_fast": 32.0, "beta_slow": 1.0, "attention_factor": 0.0},  # 0: from the factor
}
_ORIGINAL = "original_max_position_embeddings"
_HAVE_ORIGINAL = ("llama3", "yarn")


def only(config: Config, key: str, *values: object, of: str = "config") -> None:
    """Raise ``UserError`` unless the field is absent, null or one of the supported values."""
    value = config.get(key)  # many files write null for the default, which is supported
    if value is not None and not any(value == choice and type(value) is type(choice) for choice in values):
        accepted = " or ".join(repr(choice) if isinstance(choice, str) else str(choice).lower() for choice in values)
        raise UserError(f"{of}.{key}", value, f"{accepted or 'absent'}; nothing else is supported")


def integer(config: Config, key: str, default: int | None = None, *, least: int = 1, of: str = "config") -> int:
    """Return an integer of at least `least`, or the default if absent or null; raises ``UserError`` otherwise."""
    value = config.get(key)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise UserError(f"{of}.{key}", value, f"an integer of at least {least}")
    return value


def number(config: Config, key: str, default: float | None, of: str = "config") -> float:
    """Return a number above 0, or the default if the field is absent or null; raises ``UserError`` otherwise."""
    value = config.get(key)
    value = default if value is None else value
    if not isinstance(value, int | float) or isinstance(value, bool) or not (value > 0 or value == default):
        raise UserError(f"{of}.{key}", value, "a number above 0")
    try:
        return float(value)
    except OverflowError:
        raise UserError(f"{of}.{key}", value, "a number of ordinary size") from None


def flag(config: Config, key: str, default: bool) -> bool:
    """Return a boolean, or the default if the field is absent; raises ``UserError`` otherwise."""
    value = config.get(key, default)
    if not isinstance(value, bool):
        raise UserError(f"config.{key}", value, "true or false")
    return value


def rope_fields(config: Config, seq_len: int) -> dict[str, object]:
    """Return the rotary fields of `ModelShape`, from transformers 5's `rope_parameters` or the older pair of fields."""
    only(config, "partial_rotary_factor", 1.0, 1)
    # transformers prefers the older field if a config has both.
    key = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    rope, of = config.get(key) or {}, f"config.{key}"
    if not isinstance(rope, Mapping):
        raise UserError(of, rope, "an object")
    if any(isinstance(value, Mapping) for value in rope.values()):
        raise UserError(of, rope, "one set of numbers; rotary positions that differ by layer are not computed")
    name = "type" if "rope_type" not in rope and "type" in rope else "rope_type"
    kind = rope.get(name) or "default"
    kind = "none" if kind == "default" else kind
    if kind not in _SCALINGS:
        kinds = ["default", *list(_SCALINGS)[1:]]
        hint = nearest(kind, kinds) if isinstance(kind, str) else ""
        raise UserError(f"{of}.{name}", kind, f"one of {', '.join(kinds)}{hint}")
    expected = {"rope_type", "type", "rope_theta", "partial_rotary_factor", *_SCALINGS[kind]}
    only(rope, "partial_rotary_factor", 1.0, 1, of=of)
    if kind in _HAVE_ORIGINAL:
        expected |= {_ORIGINAL}
    if kind == "yarn":
        only(rope, "truncate", True, of=of)
        expected |= {"truncate"}
    for extra in sorted(map(str, rope.keys() - expected)):
        only(rope, extra, of=of)
    fields: dict[str, object] = {
        "rope_theta": number(rope, "rope_theta", number(config, "rope_theta", 10_000.0), of),
        "rope_scaling": kind,
    }
    fields |= {f"rope_{name}": number(rope, name, default, of) for name, default in _SCALINGS[kind].items()}
    if kind in _HAVE_ORIGINAL:  # in transformers a top-level field overrides the nested one
        source, source_name = (config, "config") if config.get(_ORIGINAL) is not None else (rope, of)
        fields["rope_original_seq_len"] = integer(source, _ORIGINAL, seq_len, of=source_name)
    return fields


def rope_config(shape: ModelShape) -> dict[str, object]:
    """Return the older pair of fields, `rope_theta` and `rope_scaling`, which transformers 4 and 5 both read."""
    kind, scaling = shape.rope_scaling, dict[str, object]()
    if kind != "none":
        parameters = {name: getattr(shape, f"rope_{name}") for name in _SCALINGS[kind]}
        scaling = {"rope_type": kind} | {name: value for name, value in parameters.items() if value}
        if kind in _HAVE_ORIGINAL:
            scaling[_ORIGINAL] = shape.rope_original_seq_len
    return {"rope_theta": shape.rope_theta, "rope_scaling": scaling or None}


def window_of(config: Config, windows: Windows) -> int:
    """Return the window of the layers that have one, in tokens; 0: no window."""
    if windows == "none":
        return 0
    layers, types = min(integer(config, "num_hidden_layers"), MOST_LAYERS), config.get("layer_types")
    if windows == "alternating":
        if types not in (None, [_FULL if layer % 2 else _SLIDING for layer in range(layers)]):
            raise UserError("config.layer_types", types, f"{_SLIDING} and {_FULL} by turns; {_SAME}")
        return integer(config, "sliding_window", None if "sliding_window" in config else 4096)
    uses = windows == "always" or flag(config, "use_sliding_window", False)
    size = integer(config, "sliding_window", 4096) if uses and config.get("sliding_window", 4096) is not None else 0
    if types is not None:
        if not isinstance(types, list) or not types or any(kind != types[0] for kind in types):
            raise UserError("config.layer_types", types, f"all alike: a window that differs by layer; {_SAME}")
        if types[0] not in (_FULL, _SLIDING):
            raise UserError("config.layer_types", types[0], f"{_FULL} or {_SLIDING}; {_SAME}")
        return size if types[0] == _SLIDING or windows == "always" else 0
    if windows == "switched" and size:
        only(config, "max_window_layers", 0)  # transformers 4.51 honors it, later versions ignore it
    if windows == "chosen" and size:
        first = integer(config, "max_window_layers", 28, least=0)
        if 0 < first < layers:
            raise UserError("config.max_window_layers", first, f"0, or num_hidden_layers = {layers}; {_SAME}")
        return 0 if first else size
    return size


def window_config(shape: ModelShape, windows: Windows) -> dict[str, object]:
    """Return the window fields of config.json."""
    window = shape.window
    config: dict[str, object] = {} if windows == "none" else {"sliding_window": window or None}
    if windows in ("switched", "chosen"):
        first = 0 if window or windows == "switched" else shape.layers
        config |= {"use_sliding_window": bool(window), "max_window_layers": first}
    return config


def score_fields(config: Config, head_dim: int) -> dict[str, object]:
    """Return the score fields of `ModelShape`: the soft caps (null: none) and the divisor."""
    fields: dict[str, object] = {
        ours: 0.0 if key in config and config[key] is None else number(config, key, default)
        for key, (ours, default) in CAPS.items()
    }
    divisor = integer(config, _DIVISOR, 256)
    return fields if divisor == head_dim else fields | {"score_dim": divisor}


def score_config(shape: ModelShape) -> dict[str, object]:
    """Return the score fields of config.json."""
    return {key: getattr(shape, ours) or None for key, (ours, _) in CAPS.items()} | {_DIVISOR: shape.score_dim}


def expert_fields(config: Config, *, expert_width: bool) -> dict[str, object]:
    """Return the expert fields of `ModelShape`.

    Args:
        config: Content of config.json.
        expert_width: True for Qwen3-MoE, whose experts have a configurable width; False for Mixtral.

    Raises:
        UserError: Fields contradict each other, or layers with experts are not evenly spaced.
    """
    # `router_aux_loss_coef` is not read: the balance loss is a choice of the training run, not of the model.
    if not expert_width:
        only(config, "router_jitter_noise", 0.0, 0)
        return {"experts": _count(config, 8), "experts_per_token": integer(config, "num_experts_per_tok", 2)}
    every, first = _layers_with_experts(config)
    return {
        "experts": _count(config, 128),
        "experts_per_token": integer(config, "num_experts_per_tok", 8),
        "expert_ffn": integer(config, "moe_intermediate_size", 768),
        "moe_every": every,
        "moe_first": first,
        "router_norm": flag(config, "norm_topk_prob", False),
    }


def _count(config: Config, default: int) -> int:
    # transformers 4 and 5 use different names for it; a config with both must agree.
    present = [key for key in EXPERT_COUNTS[:2] if config.get(key) is not None]
    if len(present) == 2 and config[present[0]] != config[present[1]]:
        accepted = f"config.{present[1]} = {config[present[1]]!r}, or left out"
        raise UserError(f"config.{present[0]}", config[present[0]], accepted)
    return integer(config, present[0], default) if present else default


def _layers_with_experts(config: Config) -> tuple[int, int]:
    layers = min(integer(config, "num_hidden_layers"), MOST_LAYERS)
    step, dense = integer(config, "decoder_sparse_step", 1), config.get("mlp_only_layers") or []
    if step > layers:
        raise UserError("config.decoder_sparse_step", step, f"at most num_hidden_layers = {layers}")
    if not isinstance(dense, list) or len(dense) > layers or any(type(layer) is not int for layer in dense):
        raise UserError("config.mlp_only_layers", dense, f"a list of at most {layers} layers, counted from 0")
    if not dense:
        return step, step - 1
    routed = [layer for layer in range(step - 1, layers, step) if layer not in {*dense}]
    if routed:
        every, first = routed[1] - routed[0] if len(routed) > 1 else layers, routed[0]
        if routed == list(range(first, layers, every)):
            return every, first
    accepted = "a list that leaves experts in layers first, first + every, first + 2 every and so on; nothing else"
    raise UserError("config.mlp_only_layers", dense, f"{accepted} is supported")


def expert_config(shape: ModelShape, *, expert_width: bool) -> Mapping[str, object]:
    """Return the expert fields of config.json, Qwen3-MoE's if `expert_width`, else Mixtral's."""
    common = {"num_experts_per_tok": shape.experts_per_token}
    if not expert_width:  # Mixtral has experts in every layer, so `intermediate_size` is their width
        sizes = {"num_local_experts": shape.experts, "intermediate_size": shape.expert_ffn}
        return common | sizes | {"router_jitter_noise": 0.0}
    regular = shape.moe_first == shape.moe_every - 1
    dense = [] if regular else [layer for layer in range(shape.layers) if shape.experts_of(layer) is None]
    return common | {
        "num_experts": shape.experts,
        "moe_intermediate_size": shape.expert_ffn,
        "norm_topk_prob": shape.router_norm,
        "decoder_sparse_step": shape.moe_every if regular else 1,
        "mlp_only_layers": dense,
    }
