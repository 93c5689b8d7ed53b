"""A script for `mpirun`: trains on batches of several sizes in turn, and prints the losses of each step."""

import json
import sys

import jax
import numpy as np
import optax
from flax import nnx

import axonn_jax as ax
from axonn_jax.core.settings import PipelineConfig
from axonn_jax.pipe.stages import build

VOCAB = 32


def model():
    """One that is traced soon: what is of a batch's shape is the same of every model."""
    rngs = nnx.Rngs(0)
    layers = [nnx.Embed(VOCAB, 16, rngs=rngs), nnx.Linear(16, 16, rngs=rngs), nnx.Linear(16, VOCAB, rngs=rngs)]
    return ax.models.SequenceModel(layers, optax.softmax_cross_entropy_with_integer_labels)


def losses(sizes, grid, channel="auto"):
    """Of each size, that of its step and that of its evaluation."""
    pipeline = PipelineConfig(channel=channel)
    trainer = ax.Trainer(model, optax.adam(1e-2), grid, microbatches=2, pipeline=pipeline)
    random, found = np.random.default_rng(0), []
    for size in sizes:
        batch = random.integers(0, VOCAB, (size, 9))
        loss = float(trainer.step(batch[trainer.rows(size)])["loss"])
        found.append((loss, trainer.evaluate([batch[trainer.rows(size)]])))
    trainer.close()
    jax.effects_barrier()
    return found


if __name__ == "__main__":
    build._SHAPES = 2
    axes = {name: int(size) for name, size in (word.split("=") for word in sys.argv[2].split(","))}
    grid = ax.init(**axes)
    found = losses(json.loads(sys.argv[1]), grid, sys.argv[3])
    if grid.rank == 0:
        print(json.dumps(found), flush=True)
