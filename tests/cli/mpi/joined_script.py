"""Trains, saves, loads, and again on a second grid, of processes that the script or jax's variables have joined."""

import json
import os
import sys
from pathlib import Path

import jax
import numpy as np
import optax
from flax import nnx

import axonn_jax as ax

SHAPE = ax.models.ModelShape(layers=2, hidden=32, heads=4, kv_heads=4, ffn=64, vocab=64, seq_len=16)


def losses(grid, folder):
    trainer = ax.Trainer(lambda: ax.models.Transformer(SHAPE, rngs=nnx.Rngs(0)), optax.adamw(1e-2), grid, clip=1.0)
    tokens = np.random.default_rng(0).integers(0, 64, (8, 17))
    seen = [float(trainer.step(tokens[trainer.rows(8)])["loss"]) for _ in range(2)]
    trainer.load(trainer.save(folder, 2))
    seen.append(float(trainer.step(tokens[trainer.rows(8)])["loss"]))
    trainer.close()
    return seen


def main(how, address, folder, *axes):
    rank = next(
        int(os.environ[name]) for name in ("OMPI_COMM_WORLD_RANK", "SLURM_PROCID", "RANK") if name in os.environ
    )
    if how == "script":
        jax.distributed.initialize(*(() if address == "slurm" else (address, 2, rank)))
    for axis in axes:
        grid = ax.init(**{axis: 2})
        seen = losses(grid, Path(folder) / axis)
        print(json.dumps({"axis": axis, "rank": grid.rank, "size": grid.size, "losses": seen}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
