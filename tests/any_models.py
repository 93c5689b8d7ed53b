"""Small models of a stranger's kind, batches and plain loops, for the trainer of any Flax model."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen, nnx

VOCAB, SEQ, ROWS, WIDTH = 64, 8, 16, 32


class Block(nnx.Module):
    def __init__(self, rngs):
        self.norm, self.norm2 = nnx.LayerNorm(WIDTH, rngs=rngs), nnx.RMSNorm(WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(4, WIDTH, decode=False, rngs=rngs)
        self.up, self.down = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs), nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        x = x + self.attention(self.norm(x), mask=nnx.make_causal_mask(x[..., 0]))
        return x + self.down(nnx.gelu(self.up(self.norm2(x))))


class Language(nnx.Module):
    """A tied model with a parameter of its own."""

    def __init__(self, rngs):
        self.embed, self.block = nnx.Embed(VOCAB, WIDTH, rngs=rngs), Block(rngs)
        self.gain = nnx.Param(jnp.ones(WIDTH))

    def __call__(self, ids):
        return self.embed.attend(self.block(self.embed(ids)) * self.gain)


def cross_entropy(logits, targets):
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), targets)


def language_loss(model, batch):
    return cross_entropy(model(batch["ids"]), batch["targets"]).mean()


def masked_loss(model, batch):
    """Of targets above 0 the mean, and the share that is right."""
    logits, weights = model(batch["ids"]), (batch["targets"] > 0).astype(jnp.float32)
    right = jnp.where(jnp.argmax(logits, -1) == batch["targets"], weights, 0)
    losses = cross_entropy(logits, batch["targets"]) * weights
    return losses.sum() / weights.sum(), {"right": right.sum() / weights.sum()}


def texts(count, seed=0):
    """Batches of which many targets are masked."""
    rng, found = np.random.default_rng(seed), []
    for _ in range(count):
        ids = rng.integers(1, VOCAB, (ROWS, SEQ)).astype(np.int32)
        targets = np.where(np.arange(SEQ) < rng.integers(1, SEQ + 1, (ROWS, 1)), np.roll(ids, -1, 1), 0)
        found.append({"ids": ids, "targets": targets.astype(np.int32)})
    return found


class Pictures(nnx.Module):
    def __init__(self, rngs):
        self.conv, self.norm = nnx.Conv(3, 8, (3, 3), rngs=rngs), nnx.BatchNorm(8, rngs=rngs)
        self.head = nnx.Linear(8, 4, rngs=rngs)

    def __call__(self, x):
        return self.head(nnx.relu(self.norm(self.conv(x))).mean((1, 2)))


def pictures_loss(model, batch):
    return cross_entropy(model(batch[0]), batch[1]).mean()


def pictures(count, seed=0):
    rng = np.random.default_rng(seed)
    images = (rng.normal(size=(count, ROWS, 4, 4, 3)) + 0.5).astype(np.float32)
    return list(zip(images, rng.integers(0, 4, (count, ROWS)), strict=True))


class LinenPictures(linen.Module):
    @linen.compact
    def __call__(self, x):
        x = linen.BatchNorm(use_running_average=False)(linen.Conv(8, (3, 3))(x))
        return linen.Dense(4)(linen.relu(x).mean((1, 2)))


def linen_loss(variables, batch):
    logits, updates = LinenPictures().apply(variables, batch[0], mutable=["batch_stats"])
    return cross_entropy(logits, batch[1]).mean(), updates


def plain(model, loss, optimizer, batches):
    """Losses, and what comes with them, of a loop as Flax's documentation has it."""
    state, found = nnx.Optimizer(model, optimizer, wrt=nnx.Param), []

    @nnx.jit
    def step(model, state, batch):
        result, grads = nnx.value_and_grad(lambda m, b: _pair(loss(m, b)), has_aux=True)(model, batch)
        state.update(model, grads)
        return result

    with jax.numpy_dtype_promotion("standard"):  # as users have it
        for batch in batches:
            found.append(jax.tree.map(float, step(model, state, batch)))
    return found


def _pair(result):
    return result if isinstance(result, tuple) else (result, {})
