"""A script for `mpirun`: trains on batches of several sizes in turn, and prints the losses of each step."""

import sys

import jax
import numpy as np
import optax
from flax import nnx

import axonn_jax as ax
from axonn_jax.train.config import PipelineConfig

axes = {name: int(size) for name, size in (word.split("=") for word in sys.argv[2].split(","))}
sizes = [int(word) for word in sys.argv[1].split(",")]
shape = ax.models.ModelShape(layers=1, hidden=16, heads=2, kv_heads=2, ffn=32, vocab=32, seq_len=8)
grid = ax.init(**axes)
trainer = ax.Trainer(
    lambda: ax.models.Transformer(shape, rngs=nnx.Rngs(0)),
    optax.adam(1e-2),
    grid,
    microbatches=2,
    pipeline=PipelineConfig(channel=sys.argv[3]),
)
random = np.random.default_rng(0)
for step, size in enumerate(sizes):
    batch = random.integers(0, shape.vocab, (size, 9))
    loss = float(trainer.step(batch[trainer.rows(size)])["loss"])
    held_out = trainer.evaluate([batch[trainer.rows(size)]])
    if grid.rank == 0:
        print(f"loss {step} {loss:.6f} {held_out:.6f}", flush=True)
trainer.close()
jax.effects_barrier()
