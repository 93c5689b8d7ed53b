"""A script for `mpirun`: begins from a pretrained directory, steps once, and prints what this process read."""

import sys
from pathlib import Path

import jax
import numpy as np
import optax
from flax import nnx

import axonn_jax as ax
from axonn_jax.files.huggingface import reader
from axonn_jax.files.huggingface.pretrained import read_config

opened = []


class Counted(reader.TensorFiles):
    """Files that stay known."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        opened.append(self)


reader.TensorFiles = Counted
grid = ax.init(**{name: int(size) for name, size in (word.split("=") for word in sys.argv[2].split(","))})
shape = reader.shape_from_config(read_config(Path(sys.argv[1]), "directory"))
trainer = ax.Trainer(lambda: ax.models.Transformer(shape, rngs=nnx.Rngs(0)), optax.adam(1e-3), grid, microbatches=2)
trainer.load(sys.argv[1], weights_only=True)
(files,) = opened
batch = np.random.default_rng(0).integers(0, shape.vocab, (8, 17))
loss = float(trainer.step(batch[trainer.rows(8)])["loss"])
print(f"process {files.bytes_read / files.nbytes:.4f} {loss:.6f}", flush=True)
trainer.close()
jax.effects_barrier()
