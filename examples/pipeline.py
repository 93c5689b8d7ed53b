"""The ViT of vit.py, unchanged, in a pipeline: `mpirun -n 4 python pipeline.py --grid.pipe 2 --grid.x 2`.

In one process (`python pipeline.py --grid.pipe 2`) the stages share it. Every process makes its stages alone.
"""

import argparse

import optax
from vit import BATCH, batches, loss_of, make_model

import axonn_jax as ax

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=60)
for axis in ("pipe", "data", "z", "y", "x"):
    parser.add_argument(f"--grid.{axis}", dest=axis, type=int, default=1)
args = vars(parser.parse_args())
steps = args.pop("steps")

grid = ax.init(**args)
trainer = ax.Trainer(make_model, optax.adamw(1e-3), grid, loss=loss_of, microbatches=4)
rows = trainer.rows(BATCH)  # each process hands in its own
for step, batch in enumerate(batches(steps), 1):
    metrics = trainer.step({name: leaf[rows] for name, leaf in batch.items()})
    if grid.rank == 0 and (step == 1 or step % 10 == 0):
        print(f"step {step}  loss {float(metrics['loss']):.4f}", flush=True)
trainer.close()
