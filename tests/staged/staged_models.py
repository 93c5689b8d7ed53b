"""Models as other people write them, with their batches: lists, skips, two towers, statistics, experts, Linen."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen, nnx

import axonn_jax as ax

ROWS, SEQ, VOCAB, WIDTH = 16, 8, 32, 16


class Block(nnx.Module):
    """A block of a transformer, with dropout."""

    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, WIDTH, decode=False, rngs=rngs)
        self.up, self.down = nnx.Linear(WIDTH, 32, rngs=rngs), nnx.Linear(32, WIDTH, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x, mask):
        x = x + self.dropout(self.attention(self.norm(x), mask=mask))
        return x + self.down(nnx.gelu(self.up(x)))


class Language(nnx.Module):
    """A language model whose head is the table of its embedding."""

    def __init__(self, rngs, layers=3):
        self.table = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.positions = nnx.Param(jnp.zeros((SEQ, WIDTH)))
        self.layers = nnx.List([Block(rngs) for _ in range(layers)])
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)

    def __call__(self, tokens):
        x, mask = self.table(tokens) + self.positions, nnx.make_causal_mask(tokens)
        for layer in self.layers:
            x = layer(x, mask)
        return self.table.attend(self.norm(x))


def next_token_loss(model, batch):
    logits = model(batch["inputs"])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
    return losses.mean(), {"right": jnp.mean(jnp.argmax(logits, -1) == batch["targets"])}


def texts(count, seed=0):
    rng = np.random.default_rng(seed)
    ids = [rng.integers(0, VOCAB, (ROWS, SEQ + 1)).astype(np.int32) for _ in range(count)]
    return [{"inputs": each[:, :-1], "targets": each[:, 1:]} for each in ids]


class Experts(nnx.Module):
    """A block whose router has a loss that adds up over the blocks."""

    def __init__(self, rngs):
        self.norm, self.router = nnx.RMSNorm(WIDTH, rngs=rngs), nnx.Linear(WIDTH, 4, rngs=rngs)
        self.up = nnx.Param(jax.random.normal(rngs.params(), (4, WIDTH, 24)) * 0.1)
        self.down = nnx.Param(jax.random.normal(rngs.params(), (4, 24, WIDTH)) * 0.1)

    def __call__(self, x):
        h = self.norm(x)
        shares = jax.nn.softmax(self.router(h))
        _, chosen = jax.lax.top_k(shares, 2)
        shares = jax.nn.one_hot(chosen, 4).sum(-2) * shares
        outs = jnp.einsum("bteh,ehi->btei", nnx.silu(jnp.einsum("bti,eih->bteh", h, self.up[...])), self.down[...])
        return x + jnp.einsum("bte,btei->bti", shares, outs), jnp.mean(jnp.sum(shares**2, -1))


class Mixture(nnx.Module):
    def __init__(self, rngs):
        self.table = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Experts(rngs) for _ in range(3)])
        self.head = nnx.Linear(WIDTH, VOCAB, rngs=rngs)

    def __call__(self, tokens):
        x, balance = self.table(tokens), 0.0
        for block in self.blocks:
            x, part = block(x)
            balance = balance + part
        return self.head(x), balance


def balanced_loss(model, batch):
    logits, balance = model(batch["inputs"])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
    return losses.mean() + 0.1 * balance, {"balance": balance}


class Unet(nnx.Module):
    """Skips from every way down to the way up of its size, and a time that all of them read."""

    def __init__(self, rngs):
        self.time, self.first = nnx.Linear(4, 8, rngs=rngs), nnx.Conv(3, 8, (3, 3), rngs=rngs)
        self.down = nnx.List([nnx.Conv(8, 8, (3, 3), strides=2, rngs=rngs) for _ in range(2)])
        self.shift = nnx.List([nnx.Linear(8, 8, rngs=rngs) for _ in range(2)])
        self.up = nnx.List([nnx.ConvTranspose(8, 8, (2, 2), strides=(2, 2), rngs=rngs) for _ in range(2)])
        self.join = nnx.List([nnx.Conv(16, 8, (3, 3), rngs=rngs) for _ in range(2)])
        self.last = nnx.Conv(8, 3, (3, 3), rngs=rngs)

    def __call__(self, x, t):
        time = nnx.silu(self.time(jnp.stack([jnp.sin(t * 2.0**k) for k in range(4)], -1)))
        h, skips = self.first(x), []
        for down, shift in zip(self.down, self.shift, strict=True):
            skips.append(h)
            h = nnx.silu(down(h) + shift(time)[:, None, None])
        for up, join in zip(self.up, self.join, strict=True):
            h = nnx.silu(join(jnp.concatenate([up(h), skips.pop()], -1)))
        return self.last(h)


def noise_loss(model, batch, key):
    x = batch["image"]
    time_key, noise_key = jax.random.split(key)
    t, noise = jax.random.uniform(time_key, (x.shape[0],)), jax.random.normal(noise_key, x.shape)
    at = t[:, None, None, None]
    return jnp.mean((model(x * (1 - at) + noise * at, t) - noise) ** 2)


class Vision(nnx.Module):
    """Convolutions with statistics of the batch."""

    def __init__(self, rngs):
        self.features = nnx.List([])
        for into, out in ((3, 8), (8, 8)):
            self.features.append(nnx.Conv(into, out, (3, 3), rngs=rngs))
            self.features.append(nnx.BatchNorm(out, rngs=rngs))
        self.head = nnx.Linear(8 * 4, 10, rngs=rngs)

    def __call__(self, x):
        for at in range(0, 4, 2):
            x = nnx.max_pool(nnx.relu(self.features[at + 1](self.features[at](x))), (2, 2), strides=(2, 2))
        return self.head(x.reshape(len(x), -1))


def label_loss(model, batch):
    return optax.softmax_cross_entropy_with_integer_labels(model(batch["image"]), batch["label"]).mean()


def pictures(count, seed=0):
    rng = np.random.default_rng(seed)
    return [
        {"image": rng.normal(size=(ROWS, 8, 8, 3)).astype(np.float32), "label": rng.integers(0, 10, ROWS)}
        for _ in range(count)
    ]


class Layer(nnx.Module):
    """A layer of an encoder, or of a decoder that looks at one."""

    def __init__(self, rngs, *, looks=False):
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.itself = nnx.MultiHeadAttention(2, WIDTH, decode=False, rngs=rngs)
        if looks:
            self.across = nnx.MultiHeadAttention(2, WIDTH, decode=False, rngs=rngs)
        self.out = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x, mask, seen=None):
        x = x + self.itself(self.norm(x), mask=mask)
        x = x if seen is None else x + self.across(x, seen)
        return x + self.out(nnx.gelu(x))


class Translation(nnx.Module):
    """An encoder, and a decoder whose layers all read what the encoder returns."""

    def __init__(self, rngs):
        self.table = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.encoder = nnx.List([Layer(rngs) for _ in range(2)])
        self.decoder = nnx.List([Layer(rngs, looks=True) for _ in range(2)])

    def __call__(self, source, target):
        x, y = self.table(source), self.table(target)
        for layer in self.encoder:
            x = layer(x, nnx.make_attention_mask(source > 0, source > 0))
        for layer in self.decoder:
            y = layer(y, nnx.make_causal_mask(target), x)
        return self.table.attend(y)


def counted(batch):
    return jnp.sum(batch["targets"] > 7)


def masked_loss(model, batch):
    weights = (batch["targets"] > 7).astype(jnp.float32)
    logits = model(batch["inputs"][:, ::-1], batch["inputs"])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
    return jnp.sum(losses * weights) / jnp.sum(weights), {"targets": ax.total(jnp.sum(weights))}


class LinenBlock(linen.Module):
    @linen.compact
    def __call__(self, x, mask):
        x = x + linen.MultiHeadDotProductAttention(2)(linen.LayerNorm()(x), mask=mask)
        return x + linen.Dense(WIDTH)(linen.gelu(linen.Dense(32)(x)))


class LinenLanguage(linen.Module):
    @linen.compact
    def __call__(self, tokens):
        table = linen.Embed(VOCAB, WIDTH, name="table")
        x, mask = table(tokens), linen.make_causal_mask(tokens)
        for number in range(3):
            x = LinenBlock(name=f"block_{number}")(x, mask)
        return table.attend(x)


def linen_loss(params, batch):
    logits = LinenLanguage().apply(params, batch["inputs"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()


def linen_params():
    return LinenLanguage().init(jax.random.key(0), np.zeros((1, SEQ), np.int32))


MODELS = {
    "language": (lambda: Language(nnx.Rngs(0)), next_token_loss, texts, None),
    "mixture": (lambda: Mixture(nnx.Rngs(0)), balanced_loss, texts, None),
    "unet": (lambda: Unet(nnx.Rngs(0)), noise_loss, pictures, None),
    "vision": (lambda: Vision(nnx.Rngs(0)), label_loss, pictures, None),
    "translation": (lambda: Translation(nnx.Rngs(0)), masked_loss, texts, counted),
    "linen": (linen_params, linen_loss, texts, None),
}
"""By name: a function that makes the model, its loss, its batches, and the weight of a batch."""
