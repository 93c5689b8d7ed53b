"""A script of a user's own, with its own handler of signals: `signals_script.py FOLDER WHEN SECONDS`.

The handler is set before `ax.init` or after the trainer is made (WHEN), and saves for so many seconds.
"""

import faulthandler
import signal
import sys
import time
from pathlib import Path

import numpy as np
import optax
from flax import nnx

import axonn_jax as ax

folder, when, seconds = Path(sys.argv[1]), sys.argv[2], float(sys.argv[3])
rank = 0


def save_and_end(number, _):
    faulthandler.dump_traceback_later(40)  # where it hangs, should it not end
    print(f"handler of rank {rank} begins", file=sys.stderr, flush=True)
    with open(folder / f"saved-{rank}", "w") as file:
        for _ in range(20):
            time.sleep(seconds / 20)
            print("part of a checkpoint", file=file, flush=True)
        print("complete", file=file)
    sys.exit(0)


def handle():
    signal.signal(signal.SIGTERM, save_and_end)
    signal.signal(signal.SIGINT, save_and_end)


def model():
    rngs = nnx.Rngs(0)
    layers = [nnx.Embed(100, 64, rngs=rngs), nnx.Linear(64, 64, rngs=rngs), nnx.Linear(64, 100, rngs=rngs)]
    return ax.models.SequenceModel(layers, optax.softmax_cross_entropy_with_integer_labels)


if when == "before":
    handle()
grid = ax.init(pipe=2)
rank = grid.rank
trainer = ax.Trainer(model, optax.adam(1e-2), grid, microbatches=4)
if when == "after":
    handle()
batch = np.zeros((16, 33), np.int32)
for step in range(1_000_000):
    trainer.step(batch)
    if step == 0:
        print(f"rank {rank} has taken a step", file=sys.stderr, flush=True)
