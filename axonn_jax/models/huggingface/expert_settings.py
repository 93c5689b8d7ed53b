"""Settings of experts in a config.json, both ways."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from axonn_jax.errors import UserError
from axonn_jax.models.config import ModelShape
from axonn_jax.models.huggingface.settings import Config, flag, only, whole


class _Names(NamedTuple):
    experts: tuple[str, ...]
    """Their number; what files of one version or another call it."""
    ffn: str
    defaults: tuple[int, int, int]
    """Experts, those of a token, and their width, where config.json leaves them out."""


_NAMES: Mapping[str, _Names] = {
    "mixtral": _Names(("num_local_experts",), "intermediate_size", (8, 2, 14336)),
    "qwen3_moe": _Names(("num_experts", "num_local_experts"), "moe_intermediate_size", (128, 8, 768)),
}
_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "num_shared_experts", "n_shared_experts")


def check_no_others(config: Config) -> None:
    """Raises ``UserError`` for a field that would give the model experts that are not computed."""
    known = _NAMES[family].experts if (family := str(config["model_type"])) in _NAMES else ()
    for key in _COUNTS:
        if key not in known and config.get(key):
            raise UserError(f"config.{key}", config[key], f"absent; models with experts: {', '.join(_NAMES)}")


def expert_fields(config: Config) -> dict[str, Any]:
    """The fields of `ModelShape` about experts. Raises ``UserError`` for what is not computed."""
    family = str(config["model_type"])
    if family not in _NAMES:
        return {}
    names = _NAMES[family]
    experts, per_token, ffn = names.defaults
    counted = next((key for key in names.experts if config.get(key) is not None), names.experts[0])
    fields: dict[str, Any] = {
        "experts": whole(config, counted, experts),
        "experts_per_token": whole(config, "num_experts_per_tok", per_token),
        "expert_ffn": whole(config, names.ffn, ffn),
    }
    if family == "mixtral":
        only(config, "router_jitter_noise", 0.0, 0)
        return fields
    every = whole(config, "decoder_sparse_step", 1)
    if config.get("mlp_only_layers"):
        accepted = "an empty list: dense layers by decoder_sparse_step alone are computed"
        raise UserError("config.mlp_only_layers", config["mlp_only_layers"], accepted)
    return fields | {"moe_every": every, "moe_first": every - 1, "router_norm": flag(config, "norm_topk_prob", False)}


def has_experts(family: str, shape: ModelShape) -> bool:
    """Returns whether a model of a family can have the experts of a shape."""
    moe = shape.moe
    if moe is None or family not in _NAMES:
        return moe is None and family not in _NAMES
    plain = moe.router == "softmax" and moe.scale == 1.0 and not moe.shared and moe.groups == 1
    if family == "mixtral":
        return plain and moe.norm and moe.every == 1
    return plain and moe.first == moe.every - 1


def expert_config(shape: ModelShape, family: str) -> dict[str, Any]:
    """The fields of config.json about experts."""
    moe = shape.moe
    if moe is None:
        return {}
    names = _NAMES[family]
    config: dict[str, Any] = {
        names.experts[0]: moe.experts,
        "num_experts_per_tok": moe.per_token,
        names.ffn: moe.ffn,
        "output_router_logits": False,
    }
    if family == "qwen3_moe":
        config |= {"decoder_sparse_step": moe.every, "mlp_only_layers": [], "norm_topk_prob": moe.norm}
    return config
