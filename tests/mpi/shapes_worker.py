"""A script for `mpirun`: trains on batches of several sizes in turn, and prints the losses of each step."""

import json
import sys

import jax
import numpy as np
import optax
from flax import nnx

import axonn_jax as ax
from axonn_jax.train.config import PipelineConfig


def losses(sizes, grid, channel="auto"):
    """Of each size, that of its step and that of its evaluation."""
    shape = ax.models.ModelShape(layers=1, hidden=16, heads=2, kv_heads=2, ffn=32, vocab=32, seq_len=8)
    trainer = ax.Trainer(
        lambda: ax.models.Transformer(shape, rngs=nnx.Rngs(0)),
        optax.adam(1e-2),
        grid,
        microbatches=2,
        pipeline=PipelineConfig(channel=channel),
    )
    random, found = np.random.default_rng(0), []
    for size in sizes:
        batch = random.integers(0, shape.vocab, (size, 9))
        loss = float(trainer.step(batch[trainer.rows(size)])["loss"])
        found.append((loss, trainer.evaluate([batch[trainer.rows(size)]])))
    trainer.close()
    jax.effects_barrier()
    return found


if __name__ == "__main__":
    axes = {name: int(size) for name, size in (word.split("=") for word in sys.argv[2].split(","))}
    grid = ax.init(**axes)
    found = losses(json.loads(sys.argv[1]), grid, sys.argv[3])
    if grid.rank == 0:
        print(json.dumps(found), flush=True)
