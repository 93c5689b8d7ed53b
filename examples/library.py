"""Training on a 4D mesh from a script of one's own: `python examples/library.py [PREPARED_DIR] [STEPS]`."""

import sys

import optax
from flax import nnx

import axonn_jax as ax

path, steps = (*sys.argv[1:], "runs/demo-data", "20")[:2] if len(sys.argv) < 3 else sys.argv[1:3]

grid = ax.init(data=1, z=2, y=2, x=2)  # finds mpirun, srun, jax.distributed or one process, and prints which
shape = ax.models.ModelShape(layers=4, hidden=256, heads=8, kv_heads=8, ffn=1024, vocab=4096, seq_len=256)


def model():  # a function, so that every weight is born sharded
    return ax.models.Transformer(shape, rngs=nnx.Rngs(0))


trainer = ax.Trainer(model, optax.adamw(1e-3), grid, microbatches=2, clip=1.0)
loader = ax.Loader(path, seq_len=shape.seq_len, global_batch=16, rows=trainer.rows(16))

for step in range(1, int(steps) + 1):
    metrics = trainer.step(next(loader))
    if step % 5 == 0:
        print(f"step {step}  loss {metrics['loss']:.4f}  gradient norm {metrics['grad_norm']:.3f}")
trained = trainer.model  # the module
