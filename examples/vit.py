"""A small vision transformer in plain Flax NNX on a grid: `python vit.py --grid.y 2 --grid.x 2`.

It learns to tell the direction of noisy stripes, drawn as it goes.
"""

import argparse

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import axonn_jax as ax

SIDE, PATCH, CLASSES, BATCH = 32, 8, 8, 16


class Block(nnx.Module):
    def __init__(self, hidden: int, heads: int, rngs: nnx.Rngs):
        self.norm_1 = nnx.LayerNorm(hidden, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(heads, hidden, decode=False, rngs=rngs)
        self.norm_2 = nnx.LayerNorm(hidden, rngs=rngs)
        self.mlp = nnx.Sequential(
            nnx.Linear(hidden, 4 * hidden, rngs=rngs), nnx.gelu, nnx.Linear(4 * hidden, hidden, rngs=rngs)
        )

    def __call__(self, x):
        x = x + self.attention(self.norm_1(x))
        return x + self.mlp(self.norm_2(x))


class ViT(nnx.Module):
    def __init__(self, hidden: int, heads: int, layers: int, rngs: nnx.Rngs):
        self.patches = nnx.Conv(1, hidden, (PATCH, PATCH), strides=PATCH, padding="VALID", rngs=rngs)
        self.positions = nnx.Param(0.02 * rngs.params.normal((1, (SIDE // PATCH) ** 2 + 1, hidden)))
        self.summary = nnx.Param(jnp.zeros((1, 1, hidden)))
        self.blocks = nnx.List([Block(hidden, heads, rngs) for _ in range(layers)])
        self.norm = nnx.LayerNorm(hidden, rngs=rngs)
        self.head = nnx.Linear(hidden, CLASSES, rngs=rngs)

    def __call__(self, images):
        x = self.patches(images)
        x = x.reshape(x.shape[0], -1, x.shape[-1])
        summary = jnp.broadcast_to(self.summary[...], (x.shape[0], 1, x.shape[-1]))
        x = jnp.concatenate([summary, x], 1) + self.positions[...]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, 0])


def make_model() -> ViT:
    return ViT(32, 4, 2, nnx.Rngs(0))


def loss_of(model, batch):
    return optax.softmax_cross_entropy_with_integer_labels(model(batch["image"]), batch["label"]).mean()


@nnx.jit
def train_step(model, optimizer, batch):
    loss, grads = nnx.value_and_grad(loss_of)(model, batch)
    optimizer.update(model, grads)
    return loss


def batches(steps: int):
    draw = np.random.default_rng(0)
    across, down = np.meshgrid(np.arange(SIDE), np.arange(SIDE))
    for _ in range(steps):
        label = draw.integers(0, CLASSES, BATCH, dtype=np.int32)
        angle = (np.pi * label / CLASSES)[:, None, None]
        phase = draw.uniform(0, 2 * np.pi, (BATCH, 1, 1))
        image = np.sin((np.cos(angle) * across + np.sin(angle) * down) * 0.8 + phase)
        image = (image + 0.3 * draw.standard_normal(image.shape)).astype(np.float32)
        yield {"image": image[..., None], "label": label}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    for axis in ("data", "z", "y", "x"):
        parser.add_argument(f"--grid.{axis}", dest=axis, type=int, default=1)
    args = vars(parser.parse_args())
    steps = args.pop("steps")

    grid = ax.init(**args)
    model = ax.parallelize(make_model(), grid, call=lambda model: model(jnp.zeros((BATCH, SIDE, SIDE, 1))))
    print(ax.sharding_report(model))
    optimizer = nnx.Optimizer(model, optax.adamw(2e-3), wrt=nnx.Param)
    bounded = ax.in_flight()
    for step, batch in enumerate(batches(steps), 1):
        loss = bounded(train_step(model, optimizer, grid.shard_batch(batch)))
        if step == 1 or step % 10 == 0:
            print(f"step {step}  loss {float(loss):.4f}")


if __name__ == "__main__":
    main()
