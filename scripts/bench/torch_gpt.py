"""The GPT of all benchmarks in plain PyTorch, its stages for a pipeline, and this package's weights in it."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from axonn_jax.models.config import ModelShape


def linear(shape: ModelShape, inputs: int, outputs: int, std: float) -> nn.Linear:
    """A linear layer as this package initialises it."""
    layer = nn.Linear(inputs, outputs, bias=shape.bias == "all")
    nn.init.normal_(layer.weight, std=std)
    if shape.bias == "all":
        nn.init.zeros_(layer.bias)
    return layer


class Block(nn.Module):
    """Pre-norm block as in GPT-2."""

    def __init__(self, shape: ModelShape):
        super().__init__()
        h, std, self.heads = shape.hidden, shape.init_std, shape.heads
        self.attention_norm, self.mlp_norm = (nn.LayerNorm(h, eps=shape.norm_eps) for _ in range(2))
        self.qkv, self.up = linear(shape, h, 3 * h, std), linear(shape, h, shape.ffn, std)
        out_std = std / (2 * shape.layers) ** 0.5
        self.out, self.down = linear(shape, h, h, out_std), linear(shape, shape.ffn, h, out_std)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, seq, hidden] -> same."""
        batch, seq, h = x.shape
        q, k, v = (
            a.view(batch, seq, self.heads, -1).transpose(1, 2) for a in self.qkv(self.attention_norm(x)).split(h, 2)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, seq, h))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x)), approximate="tanh"))


class GPT(nn.Module):
    """GPT with learned positions and tied embeddings; the residual stream is of a dtype, blocks may be recomputed."""

    def __init__(self, shape: ModelShape, *, recompute: bool = False, stream: torch.dtype = torch.float32):
        super().__init__()
        self.table, self.positions = (nn.Embedding(n, shape.hidden) for n in (shape.vocab, shape.seq_len))
        for table in (self.table, self.positions):
            nn.init.normal_(table.weight, std=shape.init_std)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.hidden, eps=shape.norm_eps)
        self.recompute, self.stream = recompute, stream

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Mean loss of [batch, seq + 1] token ids."""
        x = (self.table(tokens[:, :-1]) + self.positions.weight).to(self.stream)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        logits = F.linear(self.norm(x), self.table.weight)
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
    heads, state = model.blocks[0].heads, {}
    for name, value in weights.items():
        home, _, leaf = name.replace("attention.", "").replace("mlp.", "").rpartition(".")
        a = np.asarray(value)
        if home.endswith("qkv"):
            a = np.moveaxis(a.reshape(*a.shape[:-1], heads, 3, -1), -2, -3).reshape(a.shape)
        theirs = f"{'table' if home == 'embedding' else home}.{_LEAVES[leaf]}"
        state[theirs] = torch.tensor(a.T if leaf == "kernel" else a)
    model.load_state_dict(state)  # strict: every weight has its place, and there is no other
    return model
