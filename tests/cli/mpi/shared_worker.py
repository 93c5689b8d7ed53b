"""A script for `mpirun`: one step of a model of which stages share a layer; each process writes its gradients."""

import sys
from pathlib import Path

import numpy as np
import optax

sys.path.insert(0, str(Path(__file__).parents[2]))
from shared_layers import BATCH, MICROBATCHES, gradients_of, model

import axonn_jax as ax
from axonn_jax.core.settings import PipelineConfig

folder, pipe, uses, virtual_stages, split, policy = sys.argv[1:]
trainer = ax.Trainer(
    model([int(use) for use in uses.split(",")]),
    optax.trace(0.0),
    ax.init(pipe=int(pipe)),
    microbatches=MICROBATCHES,
    pipeline=PipelineConfig(policy=policy, virtual_stages=int(virtual_stages), split=split),
)
norm = float(trainer.step(BATCH)["grad_norm"])
for place, grads in enumerate(gradients_of(trainer)):
    np.savez(Path(folder) / f"{trainer.engine.grid.rank}.{place}.npz", norm=norm, **grads)
trainer.close()
