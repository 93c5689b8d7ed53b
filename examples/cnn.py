"""A small residual CNN with batch norm in plain Flax NNX on a grid: `python cnn.py --grid.data 2 --grid.x 2`.

It learns to tell discs, squares, crosses and rings, drawn as it goes. Channels are split as features are.
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import axonn_jax as ax

SIDE, CLASSES, BATCH = 16, 4, 16


class Block(nnx.Module):
    def __init__(self, channels: int, rngs: nnx.Rngs):
        self.conv_1 = nnx.Conv(channels, 2 * channels, (3, 3), use_bias=False, rngs=rngs)
        self.norm_1 = nnx.BatchNorm(2 * channels, momentum=0.9, rngs=rngs)
        self.conv_2 = nnx.Conv(2 * channels, channels, (3, 3), use_bias=False, rngs=rngs)
        self.norm_2 = nnx.BatchNorm(channels, momentum=0.9, rngs=rngs)

    def __call__(self, x):
        return nnx.relu(x + self.norm_2(self.conv_2(nnx.relu(self.norm_1(self.conv_1(x))))))


class CNN(nnx.Module):
    def __init__(self, channels: int, blocks: int, rngs: nnx.Rngs):
        self.stem = nnx.Conv(3, channels, (3, 3), strides=2, rngs=rngs)
        self.norm = nnx.BatchNorm(channels, momentum=0.9, rngs=rngs)
        self.blocks = nnx.List([Block(channels, rngs) for _ in range(blocks)])
        self.head = nnx.Linear(channels, CLASSES, rngs=rngs)

    def __call__(self, images):
        x = nnx.relu(self.norm(self.stem(images)))
        for block in self.blocks:
            x = block(x)
        return self.head(jnp.mean(x, (1, 2)))


def make_model() -> CNN:
    return CNN(16, 2, nnx.Rngs(0))


def loss_of(model, batch):
    return optax.softmax_cross_entropy_with_integer_labels(model(batch["image"]), batch["label"]).mean()


@nnx.jit
def train_step(model, optimizer, batch):
    loss, grads = nnx.value_and_grad(loss_of)(model, batch)
    optimizer.update(model, grads)
    return loss


@nnx.jit
def accuracy(model, batch):
    return jnp.mean(jnp.argmax(model(batch["image"]), -1) == batch["label"])


def batches(steps: int, seed: int = 0):
    draw = np.random.default_rng(seed)
    place = np.arange(SIDE) - SIDE / 2
    for _ in range(steps):
        label = draw.integers(0, CLASSES, BATCH, dtype=np.int32)
        across, down = (place[None, None, :] + draw.uniform(-2, 2, (BATCH, 1, 1)), place[None, :, None])
        radius = draw.uniform(3, 5, (BATCH, 1, 1))
        far, near = np.maximum(abs(across), abs(down)), np.minimum(abs(across), abs(down))
        round_ = np.hypot(across, down)
        ring = (round_ < radius) & (round_ > radius - 2)
        shapes = np.stack([round_ < radius, far < radius, (far < radius) & (near < 1.5), ring])
        image = shapes[label, np.arange(BATCH)][..., None] * draw.uniform(0.5, 1, (BATCH, 1, 1, 3))
        image = (image + 0.2 * draw.standard_normal(image.shape)).astype(np.float32)
        yield {"image": image, "label": label}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    for axis in ("data", "z", "y", "x"):
        parser.add_argument(f"--grid.{axis}", dest=axis, type=int, default=1)
    args = vars(parser.parse_args())
    steps = args.pop("steps")

    grid = ax.init(**args)
    model = ax.parallelize(make_model(), grid, call=lambda model: model(jnp.zeros((BATCH, SIDE, SIDE, 3))))
    print(ax.sharding_report(model))
    optimizer = nnx.Optimizer(model, optax.adam(3e-3), wrt=nnx.Param)
    bounded = ax.in_flight()
    for step, batch in enumerate(batches(steps), 1):
        loss = bounded(train_step(model, optimizer, grid.shard_batch(batch)))
        if step == 1 or step % 10 == 0:
            print(f"step {step}  loss {float(loss):.4f}")
    model.eval()
    right = [accuracy(model, grid.shard_batch(batch)) for batch in batches(4, seed=1)]
    print(f"held-out accuracy {float(np.mean(jax.device_get(right))):.2f}")


if __name__ == "__main__":
    main()
