"""Sizes of a decoder-only transformer; no jax."""

from dataclasses import dataclass
from functools import cached_property
from math import gcd, lcm
from typing import Annotated

from axonn_jax.core.errors import UserError
from axonn_jax.core.experts.shape import ExpertShape
from axonn_jax.core.grid import GridShape, divides, divisors
from axonn_jax.core.models.declared.transformer import describe_single_device
from axonn_jax.core.ops.costs import forward_flops, matmul_flops, parameters
from axonn_jax.core.options import (
    DERIVED,
    Bias,
    Count,
    CountOrZero,
    DerivedSize,
    Mlp,
    Norm,
    NotNegative,
    Positions,
    Positive,
    Probability,
    Range,
    RopeScaling,
    Router,
    Settings,
    mlp_inputs,
)
from axonn_jax.core.tensor.kernel_choice import AttentionRule


def _size(most: int, least: int = 1) -> Range:
    # At least ten times the size of any published model, yet small enough that all checks take seconds.
    return Range(f"an integer of at least {least} and at most {most:,}", least, most)


MOST_LAYERS = 10_000
Layers = Annotated[int, _size(MOST_LAYERS)]
Width = Annotated[int, _size(2**20)]
Heads = Annotated[int, _size(2**16)]
Tokens = Annotated[int, _size(2**27)]
TokensOrZero = Annotated[int, _size(2**27, 0)]


@dataclass(frozen=True)
class ModelShape(Settings):
    """Every size and choice that defines a decoder-only transformer.

    Raises ``UserError`` on construction when a field is out of range or two fields contradict each other.
    """

    layers: Layers
    """Number of transformer blocks. Required without a preset."""
    hidden: Width
    """Width of the residual stream (features a token). Required without a preset."""
    heads: Heads
    """Number of query heads; divides `hidden` unless `head_dim` is given. Required without a preset."""
    kv_heads: Heads
    """Number of key/value heads; divides `heads`. Default: as many as `heads`, or the preset's."""
    ffn: Annotated[int, _size(2**22)]
    """Width of the feed-forward layer. Default: 4 `hidden`, or the preset's."""
    vocab: Annotated[int, _size(2**24)]
    """Size of the vocabulary, above the largest token of the data. Default: the preset's, else the tokenizer's."""
    seq_len: Tokens
    """Tokens a sequence. Required without a preset."""
    positions: Positions = "learned"
    """Positions of tokens: a learned table, or rotary embeddings of queries and keys."""
    norm: Norm = "layernorm"
    """Normalisation in front of each half of a block; rmsnorm_1p multiplies by 1 + its weight (Gemma)."""
    mlp: Mlp = "gelu"
    """Feed-forward: two matmuls around GELU (tanh form) or squared ReLU (relu2), or three, gated by SiLU (swiglu) or
    GELU (geglu)."""
    bias: Bias = "all"
    """Linear layers with biases: all, qkv (those to queries, keys and values), none."""
    tied: bool = True
    """Use the embedding table as the output projection."""
    dropout: Probability = 0.0
    """Dropout on the embedding and on both branches of a block (not on attention weights)."""
    norm_eps: Positive = 1e-5
    """Added to the variance under the square root of a norm."""
    rope_theta: Positive = 10_000.0
    """Base of the rotary frequencies."""
    init_std: Positive = 0.02
    """Standard deviation of initial weights; output layers of a block take it over sqrt(2 layers)."""
    head_dim: Heads = DERIVED
    """Features of one head. Default: hidden / heads, or the preset's."""
    qk_norm: bool = False
    """Apply an RMSNorm to each head's queries and keys before they are rotated (Qwen3)."""
    embedding_scale: bool = False
    """Multiply embeddings by sqrt(hidden) (Gemma)."""
    window: TokensOrZero = 0
    """Tokens seen by a token: the last ones, itself included; 0: all."""
    window_period: Annotated[int, _size(MOST_LAYERS, 0)] = 0
    """Number of layers of which the last has no window (Gemma 2: 2); 0: all have it."""
    attention_cap: NotNegative = 0.0
    """Soft cap of attention's scores, which become cap tanh(score / cap) (Gemma 2); 0: none."""
    logits_cap: NotNegative = 0.0
    """Soft cap of logits (Gemma 2); 0: none."""
    score_dim: Heads = DERIVED
    """Number by whose root attention's scores are divided, where positions are rotary. Default: `head_dim`, or the
    preset's."""
    post_norms: bool = False
    """Normalise the result of each half of a block too (Gemma 2)."""
    rope_scaling: RopeScaling = "none"
    """Scaling of rotary frequencies for sequences longer than those of the first training (`models.rope`)."""
    rope_factor: Positive = 1.0
    """Factor of the scaling."""
    rope_low_freq_factor: Positive = 1.0
    """llama3: turns in `rope_original_seq_len` below which a frequency is divided by the whole factor."""
    rope_high_freq_factor: Positive = 4.0
    """llama3: turns above which a frequency stays."""
    rope_original_seq_len: TokensOrZero = 0
    """llama3, yarn: tokens of the sequences trained on first."""
    rope_beta_fast: Positive = 32.0
    """yarn: turns in `rope_original_seq_len` above which a frequency stays."""
    rope_beta_slow: Positive = 1.0
    """yarn: turns below which a frequency is divided by the whole factor."""
    rope_attention_factor: NotNegative = 0.0
    """Factor on rotated queries and keys (yarn); 0: 0.1 ln(rope_factor) + 1."""

    experts: Annotated[int, _size(2**16, 0)] = 0
    """Feed-forward layers in the place of one, of which each token takes a few; 0: one for all tokens."""
    experts_per_token: Count = 2
    """Number of experts that each token chooses."""
    expert_ffn: Annotated[int, _size(2**22)] = DERIVED
    """Width of an expert. Default: `ffn`, or the preset's."""
    moe_every: Count = 1
    """Interval of blocks with experts; the others have one feed-forward layer."""
    moe_first: CountOrZero = 0
    """First block with experts, counted from 0."""
    shared_experts: Annotated[int, _size(2**10, 0)] = 0
    """Experts that every token takes."""
    router: Router = "softmax"
    """Function of the router's scores: their softmax over all experts, or each score's sigmoid (DeepSeek-V3)."""
    router_norm: bool = True
    """Make the weights of a token's choices add up to 1."""
    router_scale: Positive = 1.0
    """Factor on the weights of a token's choices."""
    router_groups: Count = 1
    """sigmoid: groups of experts, of which a token first chooses some by the sum of each one's best two."""
    router_groups_kept: Count = 1
    """Number of groups that a token chooses."""

    table = "model"

    def __post_init__(self) -> None:
        if isinstance(self.bias, bool):
            object.__setattr__(self, "bias", "all" if self.bias else "none")
        super().__post_init__()
        if derived := isinstance(self.head_dim, DerivedSize):
            object.__setattr__(self, "head_dim", DerivedSize(self.hidden // self.heads))
        if isinstance(self.score_dim, DerivedSize):
            object.__setattr__(self, "score_dim", DerivedSize(self.head_dim))
        if isinstance(self.expert_ffn, DerivedSize):
            object.__setattr__(self, "expert_ffn", DerivedSize(self.ffn))
        if self.window_period and (self.window_period == 1 or not self.window):
            raise UserError("model.window_period", self.window_period, "at least 2, with model.window above 0")
        if self.positions != "rope" and self.score_dim != self.head_dim:
            raise UserError("model.score_dim", self.score_dim, f"left out where positions are {self.positions}")
        if self.post_norms and self.experts:
            raise UserError("model.post_norms", True, "false in a model with model.experts")
        if derived and self.hidden % self.heads:
            raise UserError("model.heads", self.heads, _divisors("a divisor of hidden", self.hidden, self.heads))
        if self.heads % self.kv_heads:
            raise UserError("model.kv_heads", self.kv_heads, _divisors("a divisor of heads", self.heads, self.kv_heads))
        if self.positions == "rope" and self.head_dim % 2:
            if not derived:
                raise UserError("model.head_dim", self.head_dim, "an even number, which rotary positions need")
            accepted = f"rotary positions need an even hidden/heads, this is {self.head_dim}"
            raise UserError("model.heads", self.heads, accepted)
        if self.rope_scaling != "none":
            self._check_scaling()
        if self.moe is not None:
            self.moe.check()
            if not self.routed_layers:
                raise UserError("model.moe_first", self.moe_first, f"an integer below model.layers = {self.layers}")

    def _check_scaling(self) -> None:
        if self.positions != "rope":
            raise UserError("model.rope_scaling", self.rope_scaling, f"none where positions are {self.positions}")
        if self.rope_scaling != "linear" and not self.rope_original_seq_len:
            accepted = f"the tokens of the sequences trained on first, which {self.rope_scaling} needs"
            raise UserError("model.rope_original_seq_len", self.rope_original_seq_len, accepted)
        for low, high in (("rope_low_freq_factor", "rope_high_freq_factor"), ("rope_beta_slow", "rope_beta_fast")):
            least, most = getattr(self, low), getattr(self, high)
            if not least < most:
                raise UserError(f"model.{high}", most, f"a number above model.{low} = {least}")

    def check_grid(self, grid: GridShape, *, sequence_split: bool = False) -> None:
        """Raise ``UserError`` unless all parameters and activations divide over the grid."""
        x, y, z = grid.x, grid.y, grid.z
        attended, experts = self.heads * self.head_dim, self.expert_ffn if self.experts else 0
        # Sizes that several rules constrain: an error proposes no single size then, but the legal sizes of the axis.
        over_y, over_yz = gcd(self.kv_heads, self.ffn, experts), gcd(attended, self.ffn, experts)
        over_z = gcd(over_yz, self.seq_len if self.positions == "learned" else 0)
        over_xz = gcd(self.hidden, experts, over_z if z > 1 else 0)
        divides("model.hidden", self.hidden, x * z, "x*z", axis="x*z", common_size=over_xz)
        divides("model.kv_heads", self.kv_heads, y, "y", axis="grid.y", common_size=over_y)
        divides("model.heads", self.heads, y, "y", axis="grid.y", common_size=over_y)
        divides("heads * head_dim (model.hidden)", attended, y * z, "y*z", axis="y*z", common_size=over_yz)
        divides("model.ffn", self.ffn, y * z, "y*z", axis="y*z", common_size=over_yz)
        if self.positions == "learned":
            divides("model.seq_len", self.seq_len, z, "z")
        if sequence_split:
            divides("model.seq_len", self.seq_len, y, "y (memory.sequence_parallel)", axis="grid.y")
        if self.moe is not None:
            self.moe.check_grid(grid, self.seq_len)
        elif grid.expert > 1:
            raise UserError("grid.expert", grid.expert, "1 for a model without experts; grid.data splits the batch too")

    @cached_property
    def moe(self) -> ExpertShape | None:
        """Sizes of the experts; None in a dense model."""
        if not self.experts:
            return None
        router_options = {name: getattr(self, f"router_{name}") for name in ("norm", "scale", "groups", "groups_kept")}
        return ExpertShape(
            self.experts, self.experts_per_token, self.expert_ffn, self.moe_every, self.moe_first,
            self.shared_experts, self.router, **router_options,
        )  # fmt: skip

    def experts_of(self, layer: int) -> ExpertShape | None:
        """Return the experts of a layer; None if it has a dense feed-forward layer."""
        return self.moe if self.moe is not None and self.moe.is_routed(layer) else None

    @cached_property
    def routed_layers(self) -> int:
        """Number of layers with experts."""
        return 0 if self.moe is None else len(range(self.moe_first, self.layers, self.moe_every))

    def attention_rule(self, layer: int) -> AttentionRule:
        """Return the rule of a layer's attention; the first layer's has every feature that any layer's has."""
        has_window = not self.window_period or (layer + 1) % self.window_period
        return AttentionRule(self.window if has_window else 0, self.attention_cap)

    @property
    def layer_period(self) -> int:
        """Period, in layers, after which kinds of layers repeat."""
        return lcm(1 if self.moe is None else self.moe.every, self.window_period or 1)

    @property
    def mlp_inputs(self) -> int:
        """Number of matmuls into the feed-forward layer: 1, or 2 with a gate."""
        return mlp_inputs(self.mlp)

    @property
    def qkv_width(self) -> int:
        """Width of the fused query, key and value projection."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    def padded_vocab(self, multiple: int) -> int:
        """Return the vocabulary rounded up to a multiple."""
        return -(-self.vocab // multiple) * multiple

    def params(self, *, active: bool = False) -> int:
        """Return the number of parameters.

        Args:
            active: True to count only as many of a layer's routed experts as a token chooses.
        """
        total = 0
        for layer in describe_single_device(self):
            routed = sum(p.elements for p in layer.params if "expert" in p.axes)
            total += layer.count * parameters(layer)
            if active and self.moe is not None:
                total -= layer.count * (routed - routed // self.experts * self.experts_per_token)
        return total

    def layer_kinds(self) -> list[tuple[int, int]]:
        """Return a representative block of each kind, with experts and dense, and the number of such blocks."""
        routed = self.routed_layers
        dense = next((layer for layer in range(self.layers) if self.experts_of(layer) is None), 0)
        kinds = ((self.moe_first, routed), (dense, self.layers - routed))
        return [(layer, count) for layer, count in kinds if count]

    def step_flops(self, batch: int, *, recompute: bool = False, frozen: bool = False) -> int:
        """Return the FLOPs of a training step over `batch` sequences; the backward pass counts twice the forward.

        `recompute` adds another forward pass of the blocks; `frozen` omits weight gradients. For a GPT (ffn = 4 hidden)
        this is the published F = 96 B S L H^2 (1 + S/(6H) + V/(16 L H)), or 72 instead of 96 without recomputation
        (Megatron-LM, AxoNN IPDPS 22, SC 24), which counts attention without its causal half.
        """
        blocks, outside, matmuls = self._forward_flops
        return batch * ((4 if recompute else 3) * blocks + 3 * outside - (matmuls if frozen else 0))

    @cached_property
    def _forward_flops(self) -> tuple[int, int, int]:
        # Of one sequence: FLOPs of the blocks, of everything else, and of the matmuls with weights in both.
        flops, matmuls = {True: 0, False: 0}, 0
        for layer in describe_single_device(self):
            flops[layer.in_block] += layer.count * round(forward_flops(layer, self.seq_len))
            matmuls += layer.count * round(matmul_flops(layer))
        return flops[True], flops[False], matmuls


def _divisors(rule: str, of: int, near: int) -> str:
    closest = min(divisors(of), key=lambda d: (abs(d - near), d))
    return f"{rule} ({of}); the nearest is {closest}"
