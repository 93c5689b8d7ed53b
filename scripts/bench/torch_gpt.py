"""The GPT of all benchmarks in plain PyTorch, its stages for a pipeline, and this package's weights in it."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from axonn_jax.core.models.config import ModelShape


def linear(shape: ModelShape, inputs: int, outputs: int, std: float) -> nn.Linear:
    """A linear layer as this package initialises it."""
    layer = nn.Linear(inputs, outputs, bias=shape.bias == "all")
    nn.init.normal_(layer.weight, std=std)
    if shape.bias == "all":
        nn.init.zeros_(layer.bias)
    return layer


class Block(nn.Module):
    """Pre-norm block as in GPT-2; queries, keys and values in layers `apart` can be split by columns."""

    def __init__(self, shape: ModelShape, apart: bool):
        super().__init__()
        h, std, self.width, self.apart = shape.hidden, shape.init_std, shape.head_dim, apart
        self.attention_norm, self.mlp_norm = (nn.LayerNorm(h, eps=shape.norm_eps) for _ in range(2))
        if apart:
            self.query, self.key, self.value = (linear(shape, h, h, std) for _ in range(3))
        else:
            self.qkv = linear(shape, h, 3 * h, std)
        self.up = linear(shape, h, shape.ffn, std)
        out_std = std / (2 * shape.layers) ** 0.5
        self.out, self.down = linear(shape, h, h, out_std), linear(shape, shape.ffn, h, out_std)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, seq, hidden] -> same."""
        h = self.attention_norm(x)
        parts = (self.query(h), self.key(h), self.value(h)) if self.apart else self.qkv(h).chunk(3, 2)
        q, k, v = (a.unflatten(-1, (-1, self.width)).transpose(1, 2) for a in parts)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x)), approximate="tanh"))


class GPT(nn.Module):
    """GPT with learned positions and tied embeddings; the residual stream is of a dtype, blocks may be recomputed.

    With layers `apart` the head is a layer too, whose weight is to be tied to the table's.
    """

    def __init__(
        self,
        shape: ModelShape,
        *,
        recompute: bool = False,
        stream: torch.dtype = torch.float32,
        apart: bool = False,
    ):
        super().__init__()
        self.table, self.positions = (nn.Embedding(n, shape.hidden) for n in (shape.vocab, shape.seq_len))
        for table in (self.table, self.positions):
            nn.init.normal_(table.weight, std=shape.init_std)
        self.blocks = nn.ModuleList(Block(shape, apart) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.hidden, eps=shape.norm_eps)
        self.recompute, self.stream = recompute, stream
        self.head = nn.Linear(shape.hidden, shape.vocab, bias=False) if apart else None

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Mean loss of [batch, seq + 1] token ids."""
        x = (self.table(tokens[:, :-1]) + self.positions.weight).to(self.stream)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        logits = F.linear(self.norm(x), self.table.weight) if self.head is None else self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


class Stage(nn.Module):
    """A run of the model's blocks, with the embedding before the first and the head after the last."""

    def __init__(self, model: GPT, begin: int, end: int):
        super().__init__()
        self.first, self.last = begin == 0, end == len(model.blocks)
        self.blocks = model.blocks[begin:end]
        if self.first or self.last:
            self.table = model.table
        if self.first:
            self.positions = model.positions
        if self.last:
            self.norm = model.norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, seq] token ids, or [batch, seq, hidden] -> [batch, seq, hidden], or logits."""
        if self.first:
            x = self.table(x) + self.positions.weight
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.table.weight) if self.last else x


_LEAVES = {"kernel": "weight", "table": "weight", "scale": "weight", "bias": "bias", "shift": "bias"}


def load(model: GPT, weights: Mapping[str, Any]) -> GPT:
    """Takes over this package's weights, so that both train the same model; its QKV columns are ordered by head."""
    first, state = model.blocks[0], {}
    for name, value in weights.items():
        home, _, leaf = name.replace("attention.", "").replace("mlp.", "").rpartition(".")
        a, theirs = np.asarray(value), f"{'table' if home == 'embedding' else home}.{_LEAVES[leaf]}"
        if home.endswith("qkv"):
            a = np.moveaxis(a.reshape(*a.shape[:-1], -1, 3, first.width), -2, -3).reshape(a.shape)
        value = torch.tensor(a.T if leaf == "kernel" else a)
        if home.endswith("qkv") and first.apart:
            names = (theirs.replace("qkv", part) for part in ("query", "key", "value"))
            state |= dict(zip(names, value.chunk(3), strict=True))
        else:
            state[theirs] = value
    if model.head is not None:
        state["head.weight"] = state["table.weight"]
    model.load_state_dict(state)  # strict: every weight has its place, and there is no other
    return model
