"""An ordinary Flax NNX training script; `--grid.x 2 --grid.z 2` and the like shard it: `python flax_script.py -h`.

What sharding takes are the four lines that mention `ax` or `grid`; the model, the loss and the step know nothing of it.
The text is the sources of Python's own library, read byte by byte.
"""

import argparse
import pathlib
import sysconfig

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import axonn_jax as ax

VOCAB, SEQ, BATCH = 128, 64, 16


class Attention(nnx.Module):
    def __init__(self, hidden: int, heads: int, rngs: nnx.Rngs):
        self.heads = heads
        self.query, self.key, self.value, self.out = (nnx.Linear(hidden, hidden, rngs=rngs) for _ in range(4))

    def __call__(self, x):
        q, k, v = (f(x).reshape(*x.shape[:2], self.heads, -1) for f in (self.query, self.key, self.value))
        return self.out(nnx.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape))


class Block(nnx.Module):
    def __init__(self, hidden: int, heads: int, dropout: float, rngs: nnx.Rngs):
        self.norm_1, self.attention = nnx.LayerNorm(hidden, rngs=rngs), Attention(hidden, heads, rngs)
        self.norm_2 = nnx.LayerNorm(hidden, rngs=rngs)
        self.up, self.down = nnx.Linear(hidden, 4 * hidden, rngs=rngs), nnx.Linear(4 * hidden, hidden, rngs=rngs)
        self.dropout = nnx.Dropout(dropout, rngs=rngs)

    def __call__(self, x):
        x = x + self.dropout(self.attention(self.norm_1(x)))
        return x + self.dropout(self.down(nnx.gelu(self.up(self.norm_2(x)))))


class Transformer(nnx.Module):
    def __init__(self, hidden: int, heads: int, layers: int, rngs: nnx.Rngs, dropout: float = 0.1):
        self.tokens = nnx.Embed(VOCAB, hidden, rngs=rngs)
        self.positions = nnx.Embed(SEQ, hidden, rngs=rngs)
        self.blocks = nnx.List([Block(hidden, heads, dropout, rngs) for _ in range(layers)])
        self.norm = nnx.LayerNorm(hidden, rngs=rngs)
        self.head = nnx.Linear(hidden, VOCAB, use_bias=False, rngs=rngs)

    def __call__(self, tokens):
        x = self.tokens(tokens) + self.positions(jnp.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def make_model(dropout: float = 0.1) -> Transformer:
    return Transformer(64, 4, 2, nnx.Rngs(0), dropout)


def loss_of(model, text):
    return optax.softmax_cross_entropy_with_integer_labels(model(text[:, :-1]), text[:, 1:]).mean()


@nnx.jit
def train_step(model, optimizer, text):
    loss, grads = nnx.value_and_grad(loss_of)(model, text)
    optimizer.update(model, grads)
    return loss


def batches(steps: int):
    stdlib = pathlib.Path(sysconfig.get_paths()["stdlib"])
    text = b"".join(path.read_bytes() for path in sorted(stdlib.glob("[a-c]*.py")))
    ids = np.minimum(np.frombuffer(text, np.uint8), VOCAB - 1).astype(np.int32)
    draw = np.random.default_rng(0)
    for starts in draw.integers(0, len(ids) - SEQ - 1, (steps, BATCH)):
        yield np.stack([ids[start : start + SEQ + 1] for start in starts])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    for axis in ("data", "z", "y", "x"):
        parser.add_argument(f"--grid.{axis}", dest=axis, type=int, default=1)
    args = vars(parser.parse_args())
    steps = args.pop("steps")

    grid = ax.init(**args)
    model = make_model()
    model = ax.parallelize(model, grid, call=lambda model: model(jnp.zeros((BATCH, SEQ), jnp.int32)))
    print(ax.sharding_report(model))
    optimizer = nnx.Optimizer(model, optax.adamw(3e-3), wrt=nnx.Param)
    bounded = ax.in_flight()
    for step, text in enumerate(batches(steps), 1):
        loss = bounded(train_step(model, optimizer, grid.shard_batch(text)))
        if step == 1 or step % 10 == 0:
            print(f"step {step}  loss {float(jax.device_get(loss)):.4f}")


if __name__ == "__main__":
    main()
