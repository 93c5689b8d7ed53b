"""A benchmark worker that trains with axonn_jax: `worker_jax.py [data rank port] [--weights FILE]`."""

import sys

import numpy as np
import optax
from flax import nnx
from workers import Task, pin, serve

import axonn_jax as ax

pin()


def main() -> None:
    """Builds the task's model and serves steps; `data rank port` joins that many ranks."""
    task, arguments = Task(), sys.argv[1:]
    weights = arguments[arguments.index("--weights") + 1] if "--weights" in arguments else None
    if arguments and arguments[0].isdigit():
        data, rank, port = map(int, arguments[:3])
        grid = ax.init(data=data, coordinator=f"127.0.0.1:{port}", num_processes=data, process_id=rank)
    else:
        data, grid = 1, ax.init()
    shape = ax.models.ModelShape(
        task.layers, task.hidden, task.heads, task.heads, 4 * task.hidden, task.vocab, task.seq_len
    )
    model = ax.models.Transformer(shape, rngs=nnx.Rngs(0))
    optimizer = optax.adamw(3e-4, 0.9, 0.95, weight_decay=0.1)
    precise = ax.MemoryConfig(precision="fp32")
    trainer = ax.Trainer(model, optimizer, grid, microbatches=task.microbatches // data, memory=precise)
    if weights is not None:
        np.savez(weights, **{name: np.asarray(value) for name, value in trainer.engine.params.items()})
    batches = np.random.default_rng(0)
    global_batch = task.microbatch * task.microbatches
    rows = trainer.rows(global_batch)

    def step() -> float:
        batch = batches.integers(0, task.vocab, (global_batch, task.seq_len + 1))
        return float(trainer.step(batch[rows])["loss"])

    serve(step)


main()
