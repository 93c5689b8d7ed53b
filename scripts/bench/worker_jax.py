"""A benchmark worker that trains with axonn_jax: `worker_jax.py [data rank port] [--weights FILE] [--layouts]`."""

import sys

from workers import Task, pin, serve

pin()

import numpy as np
import optax
from flax import nnx

import axonn_jax as ax
from axonn_jax.grid import GridShape
from axonn_jax.models.matmuls import local_products
from axonn_jax.tensor.matmul import PLAIN, MatmulLayouts, choosing, with_layouts
from axonn_jax.tuning import measure


def measured(shape: ax.models.ModelShape, tokens: int) -> MatmulLayouts:
    """The layouts of a run with train.matmul_layouts = "measure"."""
    import jax

    found = measure(local_products(shape, GridShape(), tokens, "float32"), jax.local_devices()[0])
    return choosing({one.product: one.best for one in found})


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
    layouts = measured(shape, task.microbatch * task.seq_len) if "--layouts" in arguments else PLAIN
    model = with_layouts(ax.models.Transformer(shape, rngs=nnx.Rngs(0)), layouts)
    optimizer = optax.adamw(3e-4, 0.9, 0.95, weight_decay=0.1)
    trainer = ax.Trainer(model, optimizer, grid, microbatches=task.microbatches // data, precision="fp32")
    if weights is not None:
        np.savez(weights, **{name: np.asarray(value) for name, value in trainer.params.items()})
    batches = np.random.default_rng(0)
    global_batch = task.microbatch * task.microbatches
    rows = trainer.rows(global_batch)

    def step() -> float:
        batch = batches.integers(0, task.vocab, (global_batch, task.seq_len + 1))
        return float(trainer.step(batch[rows])["loss"])

    serve(step)


main()
