"""The model of a run: named sizes from the literature, and the `[model]` table that changes them; without jax."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

from axonn_jax.documents import TOML_BYTES, parse_toml
from axonn_jax.errors import NOT_GIVEN, UserError, nearest
from axonn_jax.models.config import ModelShape
from axonn_jax.options import (
    AttentionKernel,
    Bias,
    Mlp,
    Norm,
    NotNegativeOrNone,
    Positions,
    PositiveOrNone,
    ProbabilityOrNone,
    RopeScaling,
    Router,
    typed,
)


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


@dataclass(frozen=True)
class ModelConfig:
    """The model: a preset, a preset with some sizes changed, or all sizes."""

    preset: str | None = None
    """Name of a published model (docs/train.md lists them); the fields below change its sizes."""
    layers: int | None = None
    """Number of transformer blocks. Required without a preset."""
    hidden: int | None = None
    """Width of the residual stream (features a token). Required without a preset."""
    heads: int | None = None
    """Number of query heads; divides `hidden` unless `head_dim` is given. Required without a preset."""
    kv_heads: int | None = None
    """Number of key/value heads; divides `heads`. Default: as many as `heads`, or the preset's."""
    ffn: int | None = None
    """Width of the feed-forward layer. Default: 4 `hidden`, or the preset's."""
    vocab: int | None = None
    """Size of the vocabulary, above the largest token of the data. Default: the preset's, else the tokenizer's."""
    seq_len: int | None = None
    """Tokens a sequence. Required without a preset."""
    positions: Positions | None = None
    """Positions of tokens: a learned table, or rotary embeddings. Default: learned, or the preset's."""
    norm: Norm | None = None
    """Normalisation in front of each half of a block; rmsnorm_1p multiplies by 1 + its weight (Gemma). Default:
    layernorm, or the preset's."""
    mlp: Mlp | None = None
    """Feed-forward: two matmuls around GELU or squared ReLU (relu2), or three, gated by SiLU (swiglu) or GELU (geglu).
    Default: gelu, or the preset's."""
    bias: Bias | None = None
    """Linear layers with biases: all, qkv (those to queries, keys and values), none. Default: all, or the preset's."""
    tied: bool | None = None
    """Use the embedding table as the output projection. Default: true, or the preset's."""
    dropout: ProbabilityOrNone = None
    """Dropout on the embedding and on both branches of a block. Default: 0."""
    norm_eps: PositiveOrNone = None
    """Added to the variance under the square root of a norm. Default: 1e-5."""
    rope_theta: PositiveOrNone = None
    """Base of the rotary frequencies. Default: 10000, or the preset's."""
    init_std: PositiveOrNone = None
    """Standard deviation of initial weights. Default: 0.02."""
    head_dim: int | None = None
    """Features of one head. Default: hidden / heads, or the preset's."""
    qk_norm: bool | None = None
    """Apply an RMSNorm to each head's queries and keys before they are rotated (Qwen3). Default: false."""
    embedding_scale: bool | None = None
    """Multiply embeddings by sqrt(hidden) (Gemma). Default: false."""
    window: int | None = None
    """Tokens seen by a token: the last ones, itself included. Default or 0: all."""
    window_period: int | None = None
    """Number of layers of which the last has no window (Gemma 2: 2). Default or 0: all have it."""
    attention_cap: NotNegativeOrNone = None
    """Soft cap of attention's scores, which become cap tanh(score / cap) (Gemma 2). Default or 0: none."""
    logits_cap: NotNegativeOrNone = None
    """Soft cap of logits (Gemma 2). Default or 0: none."""
    score_dim: int | None = None
    """Number by whose root attention's scores are divided. Default: `head_dim`, or the preset's."""
    post_norms: bool | None = None
    """Normalise the result of each half of a block too (Gemma 2). Default: false."""
    rope_scaling: RopeScaling | None = None
    """Scaling of rotary frequencies for sequences longer than those of the first training. Default: none."""
    rope_factor: PositiveOrNone = None
    """Factor of the scaling. Default: 1."""
    rope_low_freq_factor: PositiveOrNone = None
    """llama3: turns in `rope_original_seq_len` below which a frequency is divided by the whole factor. Default: 1."""
    rope_high_freq_factor: PositiveOrNone = None
    """llama3: turns above which a frequency stays. Default: 4."""
    rope_original_seq_len: int | None = None
    """llama3, yarn: tokens of the sequences trained on first."""
    rope_beta_fast: PositiveOrNone = None
    """yarn: turns above which a frequency stays. Default: 32."""
    rope_beta_slow: PositiveOrNone = None
    """yarn: turns below which a frequency is divided by the whole factor. Default: 1."""
    rope_attention_factor: NotNegativeOrNone = None
    """Factor on rotated queries and keys (yarn). Default, or 0: 0.1 ln(rope_factor) + 1."""
    experts: int | None = None
    """Feed-forward layers in the place of one, of which each token takes a few. Default: one, or the preset's."""
    experts_per_token: int | None = None
    """Number of experts that each token chooses. Default: 2, or the preset's."""
    expert_ffn: int | None = None
    """Width of an expert. Default: `ffn`, or the preset's."""
    moe_every: int | None = None
    """Interval of blocks with experts; the others have one feed-forward layer. Default: 1."""
    moe_first: int | None = None
    """First layer with experts, counted from 0. Default: 0."""
    shared_experts: int | None = None
    """Experts that every token takes. Default: 0."""
    router: Router | None = None
    """Function of the router's scores: their softmax over all experts, or each score's sigmoid (DeepSeek-V3). Default:
    softmax."""
    router_norm: bool | None = None
    """Make the weights of a token's choices add up to 1. Default: true."""
    router_scale: PositiveOrNone = None
    """Factor on the weights of a token's choices. Default: 1."""
    router_groups: int | None = None
    """sigmoid: groups of experts, of which a token first chooses some by the sum of their best two. Default: 1."""
    router_groups_kept: int | None = None
    """Number of groups that a token chooses. Default: 1."""
    attention: AttentionKernel = "auto"
    """The form of attention: cudnn (NVIDIA GPUs in half precision), splash (TPUs, needs `tokamax`), blocked (anywhere,
    without whole arrays of scores), xla (with them), or auto: cudnn or splash where they can be had, else blocked; on
    accelerators a run's first lines say which, and why."""

    def shape(self, default_vocab: int | None = None) -> ModelShape:
        """Return the model's sizes; `default_vocab` is used where neither `vocab` nor a preset gives one.

        Raises:
            UserError: the preset is unknown, a required field is missing, or a size is not possible.
        """
        given: dict[str, Any] = {
            f.name: getattr(self, f.name)
            for f in fields(self)
            if f.name not in ("preset", "attention") and getattr(self, f.name) is not None
        }
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
