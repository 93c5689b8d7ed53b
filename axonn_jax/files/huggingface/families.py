"""Families of Hugging Face models: conversion between config.json and `ModelShape`."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from axonn_jax.core.errors import UserError, nearest
from axonn_jax.core.models.config import ModelShape
from axonn_jax.files.huggingface.settings import (
    CAPS,
    EXPERT_COUNTS,
    Config,
    Windows,
    expert_config,
    expert_fields,
    flag,
    integer,
    number,
    only,
    rope_config,
    rope_fields,
    score_config,
    score_fields,
    window_config,
    window_of,
)

Layout = Literal["gpt2", "llama", "mixtral", "qwen3_moe"]
"""Naming scheme and layout of tensors, shared by several families."""

_GPT2 = {"positions": "learned", "norm": "layernorm", "mlp": "gelu", "bias": "all", "qk_norm": False}
_LLAMA = {"positions": "rope", "norm": "rmsnorm", "mlp": "swiglu", "bias": "none", "qk_norm": False}
# Fields of `ModelShape` to their names in config.json.
_GPT2_KEYS = {
    "layers": "n_layer", "hidden": "n_embd", "heads": "n_head", "ffn": "n_inner", "seq_len": "n_positions",
    "vocab": "vocab_size", "norm_eps": "layer_norm_epsilon",
}  # fmt: skip
_KEYS = {
    "layers": "num_hidden_layers", "hidden": "hidden_size", "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads", "head_dim": "head_dim", "ffn": "intermediate_size",
    "seq_len": "max_position_embeddings", "vocab": "vocab_size", "norm_eps": "rms_norm_eps",
}  # fmt: skip


@dataclass(frozen=True)
class Family:
    """Architecture in transformers: its fixed traits, and its defaults for fields missing in a config."""

    architecture: str
    traits: Mapping[str, object]
    """Fields of `ModelShape` common to all models of the family, except those of rotary positions."""
    tied: bool = False
    """Default of `tie_word_embeddings`."""
    kv_heads: int | None = None
    """Default of `num_key_value_heads`; None: the number of heads."""
    head_dim: int | None = None
    """Default of `head_dim`; None: `hidden_size / num_attention_heads`."""
    activations: tuple[str, ...] = ("silu",)
    window: Windows = "none"
    """Form in which config.json describes a sliding window."""
    fixed: Mapping[str, object] = field(default_factory=dict)
    """Fields of config.json and the only value of each that is supported."""
    experts: bool = False
    """True if blocks have experts."""
    biased: bool = False
    """True if `attention_bias` and `mlp_bias` decide whether linear layers have biases."""
    capped: bool = False
    """True if scores and logits have soft caps, and scores a configurable divisor."""
    defaults: Mapping[str, object] = field(default_factory=dict)
    """Defaults of other fields."""


_NO_BIAS = {"attention_bias": False}
_PLAIN = {"embedding_scale": False, "post_norms": False, "window_period": 0}
_UNCAPPED = {"attention_cap": 0.0, "logits_cap": 0.0}
_GEMMA = _LLAMA | {"norm": "rmsnorm_1p", "mlp": "geglu", "embedding_scale": True}
_GEMMA_FIXED = _NO_BIAS | {"hidden_activation": "gelu_pytorch_tanh", "use_bidirectional_attention": False}
_ROUTED = {"shared_experts": 0, "router": "softmax", "router_scale": 1.0}
FAMILIES: Mapping[str, Family] = {
    "gpt2": Family(
        "GPT2LMHeadModel",
        _GPT2,
        tied=True,
        activations=("gelu_new", "gelu_pytorch_tanh"),
        fixed={"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False},
    ),
    "llama": Family("LlamaForCausalLM", _LLAMA, biased=True),
    "arcee": Family(
        "ArceeForCausalLM",
        _LLAMA | {"mlp": "relu2"},
        activations=("relu2",),
        biased=True,
        defaults={"hidden_act": "relu2", "rms_norm_eps": 1e-5},
    ),
    "mistral": Family("MistralForCausalLM", _LLAMA, kv_heads=8, window="always", fixed=_NO_BIAS),
    "qwen2": Family("Qwen2ForCausalLM", _LLAMA | {"bias": "qkv"}, kv_heads=32, window="chosen"),
    "qwen3": Family(
        "Qwen3ForCausalLM", _LLAMA | {"qk_norm": True}, kv_heads=32, head_dim=128, window="chosen", fixed=_NO_BIAS
    ),
    "gemma": Family(
        "GemmaForCausalLM",
        _GEMMA,
        tied=True,
        kv_heads=16,
        head_dim=256,
        activations=("gelu_pytorch_tanh", "gelu"),  # the first releases say gelu but mean the tanh form
        fixed=_GEMMA_FIXED,
    ),
    "gemma2": Family(
        "Gemma2ForCausalLM",
        _GEMMA | {"post_norms": True, "window_period": 2},
        tied=True,
        kv_heads=4,
        head_dim=256,
        activations=("gelu_pytorch_tanh",),
        window="alternating",
        fixed=_GEMMA_FIXED,
        capped=True,
    ),
    "mixtral": Family(
        "MixtralForCausalLM",
        _LLAMA | _ROUTED | {"moe_every": 1, "router_norm": True},
        kv_heads=8,
        window="always",
        fixed=_NO_BIAS,
        experts=True,
        defaults={"rope_theta": 1e6, "rms_norm_eps": 1e-5, "sliding_window": None},
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        _LLAMA | _ROUTED | {"qk_norm": True},
        kv_heads=4,
        window="switched",
        fixed=_NO_BIAS,
        experts=True,
    ),
}
_NEVER = ("quantization_config", "per_layer_config")


def shape_from_config(config: Config) -> ModelShape:
    """Return the model sizes that a Hugging Face ``config.json`` of one of the `FAMILIES` describes.

    Raises:
        UserError: The config asks for something that this package's transformer does not compute; names the field.
    """
    # Dropout stays 0 whatever the config says: it is a choice of the training run, not of the model.
    name = config.get("model_type")
    if not isinstance(name, str) or name not in FAMILIES:
        hint = nearest(name, FAMILIES) if isinstance(name, str) else ""
        raise UserError("config.model_type", name, f"one of {', '.join(FAMILIES)}{hint}")
    for key in () if FAMILIES[name].experts else EXPERT_COUNTS:
        if config.get(key):
            raise UserError(f"config.{key}", config[key], f"absent: a {name} has no experts")
    for key in _NEVER if FAMILIES[name].capped else (*_NEVER, *CAPS):
        only(config, key)
    if not flag(config, "is_causal", True):
        raise UserError("config.is_causal", False, "true or absent: a token that sees later ones is not computed")
    only(config, "is_encoder_decoder", False)
    only(config, "add_cross_attention", False)
    family, keys = FAMILIES[name], _GPT2_KEYS if name == "gpt2" else _KEYS
    config = {**config, **{key: value for key, value in family.defaults.items() if config.get(key) is None}}
    only(config, "activation_function" if name == "gpt2" else "hidden_act", *family.activations)
    for key, value in family.fixed.items():
        only(config, key, value)
    fields: dict[str, Any] = {ours: integer(config, keys[ours]) for ours in ("layers", "hidden", "heads", "seq_len")}
    if name == "gpt2":
        fields |= {"kv_heads": fields["heads"], "ffn": integer(config, "n_inner", 4 * fields["hidden"])}
    else:
        fields |= _llama_fields(config, family, fields["hidden"], fields["heads"], fields["seq_len"])
    return ModelShape(
        vocab=integer(config, "vocab_size"),
        tied=flag(config, "tie_word_embeddings", family.tied),
        norm_eps=number(config, keys["norm_eps"], 1e-5 if name == "gpt2" else 1e-6),
        init_std=number(config, "initializer_range", 0.02),
        **{**family.traits, **fields},
    )


def _llama_fields(config: Config, family: Family, hidden: int, heads: int, seq_len: int) -> dict[str, object]:
    missing = heads if family.kv_heads is None or "num_key_value_heads" in config else family.kv_heads
    fields: dict[str, Any] = {
        "kv_heads": integer(config, "num_key_value_heads", missing),
        "ffn": integer(config, "intermediate_size"),
        **rope_fields(config, seq_len),
        "window": window_of(config, family.window),
    }
    if config.get("head_dim") is not None or ("head_dim" not in config and family.head_dim is not None):
        fields["head_dim"] = integer(config, "head_dim", family.head_dim)
    if family.experts:
        fields |= expert_fields(config, expert_width=family is FAMILIES["qwen3_moe"])
    if family.biased:
        fields["bias"] = _llama_bias(config)
    if family.capped:
        fields |= score_fields(config, fields.get("head_dim", hidden // heads))
    return fields


def _llama_bias(config: Config) -> str:
    attention, mlp = flag(config, "attention_bias", False), flag(config, "mlp_bias", False)
    if attention != mlp:
        key = "attention_bias" if attention else "mlp_bias"
        raise UserError(f"config.{key}", True, "false, or true for attention and MLP both")
    return "all" if attention else "none"


def family_of(shape: ModelShape) -> str:
    """Return the model type to export a model of these sizes as; raises ``UserError`` if no family fits."""
    for name, family in FAMILIES.items():
        plain = _PLAIN if family.capped else _PLAIN | {"score_dim": shape.head_dim} | _UNCAPPED
        traits: dict[str, object] = {**plain, **family.traits}
        if family.biased and shape.bias == "all":
            traits["bias"] = "all"
        # The first family that fits wins: without a window, a Mistral is exported as a Llama.
        if bool(shape.experts) != family.experts:
            continue
        if not all(getattr(shape, trait) == value for trait, value in traits.items()):
            continue
        if name == "gpt2" and shape.kv_heads != shape.heads:
            raise UserError("model.kv_heads", shape.kv_heads, f"heads = {shape.heads} for a GPT-2")
        irregular_head_dim = shape.heads * shape.head_dim != shape.hidden
        if (name == "gpt2" and irregular_head_dim) or (name in ("llama", "gemma2") and shape.hidden % shape.heads):
            continue
        if shape.window and family.window == "none":
            continue
        return name
    routed = [*_ROUTED, "moe_every", "router_norm"] if shape.experts else []
    keys = [*_LLAMA, *_PLAIN, *_UNCAPPED, *(["window"] if shape.window else []), *routed]
    traits_of_shape = " ".join(f"{key}={getattr(shape, key)}" for key in keys)
    candidates = {name: family.traits for name, family in FAMILIES.items() if family.experts == bool(shape.experts)}
    accepted = "; ".join(f"{name}: {' '.join(map(str, traits.values()))}" for name, traits in candidates.items())
    raise UserError("model", traits_of_shape, f"what a family of transformers has ({accepted})")


def layout_of(shape: ModelShape) -> Layout:
    """Return the tensor layout of a model's family; raises ``UserError`` for a shape of no known family."""
    layouts: Mapping[str, Layout] = {"gpt2": "gpt2", "mixtral": "mixtral", "qwen3_moe": "qwen3_moe"}
    return layouts.get(family_of(shape), "llama")


def config_from_shape(shape: ModelShape, dtype: str, end: int | None, begin: int | None = None) -> dict[str, object]:
    """Return the content of a config.json that transformers 4 and 5 read.

    Args:
        shape: Sizes of the model.
        dtype: Dtype of the tensors, by its name in config.json.
        end: Token id that ends a text.
        begin: Token id that begins a text; by default `end`.

    Raises:
        UserError: The shape belongs to no known family.
    """
    name = family_of(shape)
    config: dict[str, object] = {
        "architectures": [FAMILIES[name].architecture],
        "model_type": name,
        "torch_dtype": dtype,
        "vocab_size": shape.vocab,
        "tie_word_embeddings": shape.tied,
        "initializer_range": shape.init_std,
        "bos_token_id": end if begin is None else begin,
        "eos_token_id": end,
    }
    family, keys = FAMILIES[name], _GPT2_KEYS if name == "gpt2" else _KEYS
    config |= {theirs: getattr(shape, ours) for ours, theirs in keys.items()}
    if name == "gpt2":
        dropped = {"embd_pdrop": shape.dropout, "resid_pdrop": shape.dropout, "attn_pdrop": 0.0}
        return config | {"activation_function": family.activations[0]} | dropped
    config |= {"hidden_act": family.activations[0], **family.fixed}
    if family.biased:
        config |= {"attention_bias": shape.bias == "all", "mlp_bias": shape.bias == "all"}
    if family.experts:
        config |= expert_config(shape, expert_width=family is FAMILIES["qwen3_moe"])
    if family.capped:
        config |= score_config(shape)
    return config | window_config(shape, family.window) | rope_config(shape)
