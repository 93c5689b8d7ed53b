"""Settings of a config.json about experts: which layers have some, how many and how tokens choose, both ways."""

from collections.abc import Mapping
from typing import Any

from axonn_jax.errors import UserError
from axonn_jax.models.config import ModelShape
from axonn_jax.models.huggingface.settings import Config, flag, only, whole

EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Fields that say how many experts there are, in whichever family."""


def expert_fields(config: Config, layers: int, *, own_width: bool) -> dict[str, Any]:
    """The fields of `ModelShape` about experts: Qwen3-MoE's, whose experts have a width of their own, or Mixtral's.

    How strongly loads are evened out (`router_aux_loss_coef`) is a choice of the training run, not of the model.
    Raises ``UserError`` for fields that contradict each other, and for layers with experts in no regular distance.
    """
    if not own_width:
        only(config, "router_jitter_noise", 0.0, 0)
        return {"experts": _count(config, 8), "experts_per_token": whole(config, "num_experts_per_tok", 2)}
    every, first = _layers_with_experts(config, layers)
    return {
        "experts": _count(config, 128),
        "experts_per_token": whole(config, "num_experts_per_tok", 8),
        "expert_ffn": whole(config, "moe_intermediate_size", 768),
        "moe_every": every,
        "moe_first": first,
        "router_norm": flag(config, "norm_topk_prob", False),
    }


def _count(config: Config, default: int) -> int:
    """Transformers 4 and 5 call it by either name; where both are there they say the same."""
    given = [key for key in EXPERT_COUNTS[:2] if config.get(key) is not None]
    if len(given) == 2 and config[given[0]] != config[given[1]]:
        accepted = f"config.{given[1]} = {config[given[1]]!r}, or left out"
        raise UserError(f"config.{given[0]}", config[given[0]], accepted)
    return whole(config, given[0], default) if given else default


def _layers_with_experts(config: Config, layers: int) -> tuple[int, int]:
    """Return the period of the layers with experts, and the first of them, counted from 0."""
    step, dense = whole(config, "decoder_sparse_step", 1), config.get("mlp_only_layers") or []
    if step > layers:
        raise UserError("config.decoder_sparse_step", step, f"at most num_hidden_layers = {layers}")
    if not isinstance(dense, list) or any(type(layer) is not int for layer in dense):
        raise UserError("config.mlp_only_layers", dense, "a list of layers, counted from 0")
    if not dense:
        return step, step - 1
    routed = [layer for layer in range(step - 1, layers, step) if layer not in set(dense)]
    if routed:
        every, first = routed[1] - routed[0] if len(routed) > 1 else layers, routed[0]
        if routed == list(range(first, layers, every)):
            return every, first
    accepted = "a list that leaves experts in layers first, first + every, first + 2 every and so on; nothing else"
    raise UserError("config.mlp_only_layers", dense, f"{accepted} is supported")


def expert_config(shape: ModelShape, *, own_width: bool) -> Mapping[str, Any]:
    """The fields of config.json about a model's experts; with `own_width` Qwen3-MoE's, else Mixtral's."""
    moe = shape.moe
    assert moe is not None
    if not own_width:  # no layer is without experts: the width of those does not matter
        return {
            "num_local_experts": moe.experts,
            "num_experts_per_tok": moe.per_token,
            "intermediate_size": moe.ffn,
            "router_jitter_noise": 0.0,
        }
    regular = moe.first == moe.every - 1
    dense = [] if regular else [layer for layer in range(shape.layers) if not moe.is_routed(layer)]
    return {
        "num_experts": moe.experts,
        "num_experts_per_tok": moe.per_token,
        "moe_intermediate_size": moe.ffn,
        "norm_topk_prob": moe.norm,
        "decoder_sparse_step": moe.every if regular else 1,
        "mlp_only_layers": dense,
    }
