"""Models of the survey in plain Flax NNX, with the file's weights, and layouts for automatic partitioning."""

from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import PartitionSpec as P
from surveying.contestant import Job


class Attention(nnx.Module):
    """Causal attention; the columns of `qkv` are ordered by head."""

    def __init__(self, hidden: int, heads: int, rngs: nnx.Rngs):
        self.heads = heads
        self.qkv, self.out = nnx.Linear(hidden, 3 * hidden, rngs=rngs), nnx.Linear(hidden, hidden, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[batch, seq, hidden] -> same."""
        parts = self.qkv(x).reshape(*x.shape[:2], self.heads, 3, -1)
        q, k, v = (parts[..., i, :] for i in range(3))
        return self.out(nnx.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape))


class Mlp(nnx.Module):
    """Feed-forward layer with GELU."""

    def __init__(self, hidden: int, rngs: nnx.Rngs):
        self.up, self.down = nnx.Linear(hidden, 4 * hidden, rngs=rngs), nnx.Linear(4 * hidden, hidden, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[batch, seq, hidden] -> same."""
        return self.down(nnx.gelu(self.up(x)))


class Block(nnx.Module):
    """Pre-norm block."""

    def __init__(self, hidden: int, heads: int, rngs: nnx.Rngs):
        self.attention_norm = nnx.LayerNorm(hidden, epsilon=1e-5, rngs=rngs)
        self.mlp_norm = nnx.LayerNorm(hidden, epsilon=1e-5, rngs=rngs)
        self.attention, self.mlp = Attention(hidden, heads, rngs), Mlp(hidden, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[batch, seq, hidden] -> same."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class GPT(nnx.Module):
    """GPT with learned positions and tied embeddings."""

    def __init__(self, shape: Any, rngs: nnx.Rngs):
        self.embedding = nnx.Embed(shape.vocab, shape.hidden, rngs=rngs)
        self.positions = nnx.Embed(shape.seq_len, shape.hidden, rngs=rngs)
        self.blocks = nnx.List([Block(shape.hidden, shape.heads, rngs) for _ in range(shape.layers)])
        self.norm = nnx.LayerNorm(shape.hidden, epsilon=1e-5, rngs=rngs)

    def __call__(self, ids: jax.Array) -> jax.Array:
        """[batch, seq] -> logits."""
        x = self.embedding(ids) + self.positions(jnp.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.embedding.attend(self.norm(x))


class VGG(nnx.Module):
    """Eight convolutions in four groups with a pooling behind each, and two dense layers."""

    def __init__(self, rngs: nnx.Rngs):
        widths = (1, 16, 16, 32, 32, 64, 64, 64, 64)
        self.convolutions = nnx.List([nnx.Conv(i, o, (3, 3), rngs=rngs) for i, o in pairwise(widths)])
        self.dense = nnx.List([nnx.Linear(256, 128, rngs=rngs), nnx.Linear(128, 10, rngs=rngs)])

    def __call__(self, images: jax.Array) -> jax.Array:
        """[batch, 32, 32, 1] -> logits."""
        x = images
        for number, convolution in enumerate(self.convolutions):
            x = nnx.relu(convolution(x))
            x = nnx.max_pool(x, (2, 2), (2, 2)) if number % 2 else x
        return self.dense[1](nnx.relu(self.dense[0](x.reshape(len(x), -1))))


def loss_of(model: Any, batch: Any) -> jax.Array:
    """Mean cross-entropy of token ids [rows, seq + 1] or of images."""
    images = isinstance(batch, dict)
    inputs, targets = (batch["image"], batch["label"]) if images else (batch[:, :-1], batch[:, 1:])
    return optax.softmax_cross_entropy_with_integer_labels(model(inputs), targets).mean()


_NAMES = {"embedding.embedding": "embedding.table", "positions.embedding": "positions.table"}


def model_of(job: Job) -> nnx.Module:
    """The workload's model, with the file's weights; of the image task the file is written where it is missing."""
    rngs, path = nnx.Rngs(job.data.seed), job.data.weights()
    model: nnx.Module = GPT(job.workload.shape(), rngs) if job.workload.is_language else VGG(rngs)
    flat = nnx.to_flat_state(nnx.state(model, nnx.Param))
    if not path.exists():
        np.savez(path, **{".".join(map(str, name)): np.asarray(value.get_value()) for name, value in flat})
    kept = np.load(path)
    for name, value in flat:
        key = ".".join(map(str, name))
        if job.workload.is_language:
            key = _NAMES.get(key, key)
            key = key.removesuffix("bias") + "shift" if "norm" in key and key.endswith("bias") else key
        value.set_value(jnp.asarray(kept[key]))
    return model


def layouts(values: Any, layout: str) -> Any:
    """Partition specs of the parameters: whole, split over the longest dimension, or by heads and features."""

    def spec(path: Any, value: Any) -> P:
        name = jax.tree_util.keystr(path)
        if layout == "data":
            return P()
        if layout == "fsdp":
            longest = max(range(value.ndim), key=lambda i: value.shape[i])
            even = value.ndim and value.shape[longest] % 2 == 0
            return P(*["d" if i == longest else None for i in range(value.ndim)]) if even else P()
        if "qkv" in name or "'up'" in name:
            return P(None, "d") if value.ndim == 2 else P("d")
        split = "'embedding'" in name and "positions" not in name
        return P("d", None) if value.ndim == 2 and (split or "'out'" in name or "'down'" in name) else P()

    return jax.tree.map_with_path(spec, values)
