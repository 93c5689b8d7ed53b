"""Sizes of a decoder-only transformer: parameters and FLOPs by formula, without jax."""

from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Literal, get_args, get_origin

from axonn_jax.errors import UserError
from axonn_jax.grid import GridShape, divides, divisors

Positions = Literal["learned", "rope"]
Norm = Literal["layernorm", "rmsnorm"]
Mlp = Literal["gelu", "swiglu"]


MOST = MappingProxyType(
    {
        "layers": 10_000,
        "hidden": 2**20,
        "heads": 2**16,
        "kv_heads": 2**16,
        "ffn": 2**22,
        "vocab": 2**24,
        "seq_len": 2**27,
    }
)
"""Largest sizes: ten times or more those of any published model, and checked in seconds."""


@dataclass(frozen=True)
class ModelShape:
    """Every size and choice that defines a decoder-only transformer.

    Raises ``UserError`` on construction when a field is out of range or two fields contradict each other.
    """

    layers: int
    """Number of transformer blocks."""
    hidden: int
    """Width of the residual stream (features a token)."""
    heads: int
    """Number of query heads; divides `hidden`."""
    kv_heads: int
    """Number of key/value heads; divides `heads` (equal to it: multi-head, fewer: grouped-query)."""
    ffn: int
    """Width of the feed-forward layer."""
    vocab: int
    """Size of the vocabulary (rows of the embedding table)."""
    seq_len: int
    """Longest sequence in tokens."""
    positions: Positions = "learned"
    """How a token knows its place: a learned table, or rotary embeddings of queries and keys."""
    norm: Norm = "layernorm"
    """Normalisation in front of each half of a block."""
    mlp: Mlp = "gelu"
    """Feed-forward: two matmuls around GELU (tanh form), or the gated three-matmul SwiGLU."""
    bias: bool = True
    """Whether linear layers have biases."""
    tied: bool = True
    """Whether the output projection is the embedding table."""
    dropout: float = 0.0
    """Dropout on the embedding and on both branches of a block (not on attention weights)."""
    norm_eps: float = 1e-5
    """Added to the variance under the square root of a norm."""
    rope_theta: float = 10_000.0
    """Base of the rotary frequencies."""
    init_std: float = 0.02
    """Standard deviation of initial weights; output layers of a block take it over sqrt(2 layers)."""

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            if get_origin(f.type) is Literal and value not in get_args(f.type):
                raise UserError(f"model.{f.name}", value, "one of " + ", ".join(get_args(f.type)))
            if f.type is int and not 1 <= value <= MOST[f.name]:
                raise UserError(f"model.{f.name}", value, f"an integer of at least 1 and at most {MOST[f.name]:,}")
        for name in ("norm_eps", "rope_theta", "init_std"):
            if not getattr(self, name) > 0:
                raise UserError(f"model.{name}", getattr(self, name), "a number above 0")
        if self.hidden % self.heads:
            raise UserError("model.heads", self.heads, _divisors("a divisor of hidden", self.hidden, self.heads))
        if self.heads % self.kv_heads:
            raise UserError("model.kv_heads", self.kv_heads, _divisors("a divisor of heads", self.heads, self.kv_heads))
        if not 0.0 <= self.dropout < 1.0:
            raise UserError("model.dropout", self.dropout, "a probability of at least 0 and below 1")
        if self.positions == "rope" and self.head_dim % 2:
            raise UserError(
                "model.heads",
                self.heads,
                f"rotary positions need an even hidden/heads, this is {self.head_dim}",
            )

    def check_grid(self, grid: GridShape, *, sequence_split: bool = False) -> None:
        """Raises ``UserError`` unless every parameter and activation of the model divides over the grid.

        A weight's input dim splits over its input axis and once more over `z`, its output dim over the output
        axis, with `x` and `y` swapping roles in alternate layers (DESIGN section 4).
        """
        x, y, z = grid.x, grid.y, grid.z
        divides("model.hidden", self.hidden, x * z, "x*z")
        divides("model.kv_heads", self.kv_heads, y, "y", axis="grid.y", legal_axis=True)
        divides("model.heads", self.heads, y, "y", axis="grid.y", legal_axis=True)
        divides("heads * head_dim (model.hidden)", self.heads * self.head_dim, y * z, "y*z")
        divides("model.ffn", self.ffn, y * z, "y*z")
        if self.positions == "learned":
            divides("model.seq_len", self.seq_len, z, "z")
        if sequence_split:
            divides("model.seq_len", self.seq_len, y, "y (memory.sequence_parallel)", axis="grid.y", legal_axis=True)

    @property
    def head_dim(self) -> int:
        """Features of one head."""
        return self.hidden // self.heads

    @property
    def qkv_width(self) -> int:
        """Columns of the fused query, key and value projection."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    def padded_vocab(self, multiple: int) -> int:
        """Rows of a table that divides into so many parts: the vocabulary, and zeros up to the next multiple."""
        return -(-self.vocab // multiple) * multiple

    def layer_matmul_params(self) -> int:
        """Entries of one block's weight matrices, biases and norms left out."""
        mlp_matrices = 3 if self.mlp == "swiglu" else 2
        return self.hidden * (self.qkv_width + self.heads * self.head_dim + mlp_matrices * self.ffn)

    def layer_params(self) -> int:
        """Parameters of one block."""
        biases = self.qkv_width + 2 * self.hidden + self.ffn * (2 if self.mlp == "swiglu" else 1)
        return self.layer_matmul_params() + 2 * self._norm_params() + (biases if self.bias else 0)

    def embedding_params(self) -> int:
        """Parameters in front of the first block: the token table and, if learned, the positions."""
        return self.hidden * (self.vocab + (self.seq_len if self.positions == "learned" else 0))

    def head_params(self) -> int:
        """Parameters behind the last block: the final norm and, if not tied, the output projection."""
        return self._norm_params() + (0 if self.tied else self.hidden * self.vocab)

    def params(self) -> int:
        """All parameters of the model."""
        return self.embedding_params() + self.layers * self.layer_params() + self.head_params()

    def _norm_params(self) -> int:
        return self.hidden * (2 if self.norm == "layernorm" else 1)

    def layer_forward_flops(self, batch: int, seq_len: int | None = None) -> int:
        """FLOPs of one block's matmuls for `batch` sequences; attention counted in full, as published."""
        s = seq_len or self.seq_len
        return batch * s * (2 * self.layer_matmul_params() + 4 * s * self.heads * self.head_dim)

    def head_forward_flops(self, batch: int, seq_len: int | None = None) -> int:
        """FLOPs of the projection onto the vocabulary for `batch` sequences."""
        return 2 * batch * (seq_len or self.seq_len) * self.hidden * self.vocab

    def step_flops(self, batch: int, *, recompute: bool = False, seq_len: int | None = None) -> int:
        """FLOPs of one training step over `batch` sequences (backward counts twice the forward).

        With `recompute` the blocks run forward once more. For a GPT (ffn = 4 hidden) this is the published
        F = 96 B S L H^2 (1 + S/(6H) + V/(16 L H)), and with 72 in place of 96 without (papers: Megatron-LM,
        AxoNN IPDPS 22, SC 24).
        """
        layers = self.layers * self.layer_forward_flops(batch, seq_len)
        return layers * (4 if recompute else 3) + 3 * self.head_forward_flops(batch, seq_len)


def _divisors(rule: str, of: int, near: int) -> str:
    closest = min(divisors(of), key=lambda d: (abs(d - near), d))
    return f"{rule} ({of}); the nearest is {closest}"
