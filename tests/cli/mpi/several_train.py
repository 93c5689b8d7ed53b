"""`axonn-jax train` several times in the processes of one start: `several_train.py RUNS.json`, of names and words.

Starting jax and its packages takes longer than a small run. What a run says follows a line with its name; one that ends
badly ends all.
"""

import gc
import json
import os
import sys
from pathlib import Path

import jax

from axonn_jax.cli.main import main
from axonn_jax.core.distributed import initialize
from axonn_jax.run import main as training

start, grids = initialize.start, {}


def starting(shape, explicit=None, settings=""):
    """As `start`; a pipeline's grid stays, whose processes cannot join others once they are a stage's."""
    if shape not in grids or shape.pipe == 1:
        grids[shape] = start(shape, explicit, settings)
        # Joined, processes stay connected, and have told each other of their GPUs.
        initialize.join, initialize.gpus.take = lambda world: None, lambda *views: ""
    return grids[shape]


training.start = starting
gc.freeze()
gc.set_threshold(50_000, 20, 20)  # as conftest has it
for name, words in json.loads(Path(sys.argv[1]).read_text()):
    if os.environ["OMPI_COMM_WORLD_RANK"] == "0":
        print(f"=== {name}", file=sys.stderr, flush=True)
    jax.config.update("jax_log_compiles", "--memory.offload" in words)
    if status := main(["train", *words]):
        sys.exit(status)
