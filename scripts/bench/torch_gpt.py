"""The benchmarks' model in PyTorch: a GPT that starts from axonn_jax's weights."""

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from workers import Task


class Block(nn.Module):
    """Pre-norm block as in GPT-2."""

    def __init__(self, task: Task):
        super().__init__()
        h, self.heads = task.hidden, task.heads
        self.attention_norm, self.mlp_norm = nn.LayerNorm(h), nn.LayerNorm(h)
        self.qkv, self.out = nn.Linear(h, 3 * h), nn.Linear(h, h)
        self.up, self.down = nn.Linear(h, 4 * h), nn.Linear(4 * h, h)

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
    """GPT with learned positions and tied embeddings."""

    def __init__(self, task: Task):
        super().__init__()
        self.table, self.positions = nn.Embedding(task.vocab, task.hidden), nn.Embedding(task.seq_len, task.hidden)
        self.blocks = nn.ModuleList(Block(task) for _ in range(task.layers))
        self.norm = nn.LayerNorm(task.hidden)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Mean loss of [batch, seq + 1] token ids."""
        x = self.table(tokens[:, :-1]) + self.positions.weight
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.table.weight)
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def load(model: GPT, path: str, task: Task) -> None:
    """Takes over axonn_jax's weights, so that both train the same model; its QKV columns are ordered by head."""
    ours = {name: torch.from_numpy(value) for name, value in np.load(path).items()}

    def qkv(a: torch.Tensor) -> torch.Tensor:
        return a.reshape(*a.shape[:-1], task.heads, 3, -1).movedim(-2, -3).reshape(a.shape)

    def linear(module: nn.Linear, name: str) -> None:
        order = qkv if name.endswith("qkv") else (lambda a: a)
        module.weight.copy_(order(ours[f"{name}.kernel"]).T)
        module.bias.copy_(order(ours[f"{name}.bias"]))

    def norm(module: nn.LayerNorm, name: str) -> None:
        module.weight.copy_(ours[f"{name}.scale"])
        module.bias.copy_(ours[f"{name}.shift"])

    with torch.no_grad():
        model.table.weight.copy_(ours["embedding.table"])
        model.positions.weight.copy_(ours["positions.table"])
        norm(model.norm, "norm")
        for i, block in enumerate(model.blocks):
            norm(block.attention_norm, f"blocks.{i}.attention_norm")
            norm(block.mlp_norm, f"blocks.{i}.mlp_norm")
            linear(block.qkv, f"blocks.{i}.attention.qkv")
            linear(block.out, f"blocks.{i}.attention.out")
            linear(block.up, f"blocks.{i}.mlp.up")
            linear(block.down, f"blocks.{i}.mlp.down")
