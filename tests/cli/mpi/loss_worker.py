"""A script for `mpirun`: trains a Flax module with a BatchNorm by its own loss, and prints the losses."""

import json
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import axonn_jax as ax

ROWS, STEPS = 8, 3


class Net(nnx.Module):
    def __init__(self, rngs):
        self.first, self.norm = nnx.Linear(6, 16, use_bias=False, rngs=rngs), nnx.BatchNorm(16, rngs=rngs)
        self.last = nnx.Linear(16, 4, rngs=rngs)

    def __call__(self, x):
        return self.last(nnx.relu(self.norm(self.first(x))))


def loss(model, batch):
    losses = jnp.square(model(batch["x"]) - batch["y"][:, None])
    return jnp.mean(losses), {"small": jnp.mean(losses < 1)}


def trainer_on(grid, density):
    model = ax.parallelize(Net(nnx.Rngs(0)), grid)
    options = {"memory": ax.MemoryConfig(zero=1), "prune": ax.PruneConfig(density=density)}
    return ax.Trainer(model, optax.adam(1e-2), grid, loss=loss, microbatches=2, **options)


def batches(trainer, first, last):
    """This process's rows of some of the run's batches."""
    for step in range(first, last):
        random, rows = np.random.default_rng(step), trainer.rows(ROWS)
        x, y = random.normal(size=(ROWS, 6)), random.normal(size=ROWS)
        yield {"x": x[rows].astype(np.float32), "y": y[rows].astype(np.float32)}


def curve(grids, folder):
    """Losses, numbers and an evaluation of a run that goes on from grid to grid, pruned on the last."""
    found, done = [], 0
    for grid in grids:
        trainer = trainer_on(grid, 0.5 if done == 2 * STEPS else 1.0)
        if done:
            assert trainer.load(folder) == done
        for batch in batches(trainer, done, done + STEPS):
            metrics = trainer.step(batch)
            found.append([float(metrics["loss"]), float(metrics["aux"]["small"])])
        done += STEPS
        trainer.save(folder, done)
        found.append([trainer.evaluate(batches(trainer, 0, 2)), 0.0])
    return found


if __name__ == "__main__":
    meshes = [ax.init(data=2), ax.init(x=2), ax.init(z=2)]
    lines = curve(meshes, Path(sys.argv[1]))
    if meshes[0].rank == 0:
        print(json.dumps(lines), flush=True)
