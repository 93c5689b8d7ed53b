"""A rank of a pipelined loss under mpirun: prints the metrics of its steps and of an evaluation as JSON, and saves."""

import json
import sys

import jax
import optax
import staged_models as models

import axonn_jax as ax


def main():
    name, channel, directory, axes = sys.argv[1], sys.argv[2], sys.argv[3], json.loads(sys.argv[4])
    grid = ax.init(**axes)
    make, loss, batches, weight = models.MODELS[name]
    pipeline = ax.PipelineConfig(channel=channel)
    options = {"weight": weight, "microbatches": 4, "clip": 1.0, "seed": 3, "pipeline": pipeline}
    trainer = ax.Trainer(make, optax.sgd(0.05), grid, loss=loss, **options)
    rows = trainer.rows(models.ROWS)
    part = [jax.tree.map(lambda leaf: leaf[rows], batch) for batch in batches(3)]
    numbers = []
    for batch in part:
        metrics = trainer.step(batch)
        numbers.append([float(metrics["loss"]), float(metrics["grad_norm"])])
        numbers[-1] += [float(value) for value in jax.tree.leaves(metrics.get("aux", {}))]
    mean = trainer.evaluate(part[:1])
    trainer.save(directory, 3)
    trainer.close()
    if grid.rank == 0:
        print(json.dumps({"numbers": numbers, "mean": mean}))


if __name__ == "__main__":
    main()
