"""A benchmark worker that trains with axonn_jax over a pipeline: `mpirun -n P worker_pipeline.py POLICY CHANNEL ...`.

Every rank keeps to a core of its own (that of its rank). Rank 0 takes the orders and passes them on; the others look
for them a few hundred times a second, since whoever waits in MPI spins, and it may be another contestant's turn.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path

os.sched_setaffinity(0, {int(os.environ.get("OMPI_COMM_WORLD_LOCAL_RANK", "0"))})
if "mpi4jax" in sys.argv:
    os.environ["NPROC"] = "2"  # its receives hold a thread of jax's pool, which has one a core

import numpy as np
import optax
from flax import nnx
from workers import Task

import axonn_jax as ax
from axonn_jax.schedule.tasks import Kind
from axonn_jax.train.config import PipelineConfig


def slow_down(trainer: ax.Trainer, mean: float, batch: np.ndarray, last: bool) -> None:
    """Makes the last rank sleep before every task, for times as others' use of a machine gives them: mostly short.

    A whole backward, which is twice the work of a forward or of half a backward, sleeps twice as long on average.
    Every rank calls it: the pipeline that is set up for it is set up by all.
    """
    pipe, _ = trainer.engine._prepare(batch)
    if not last:
        return
    (rank,) = pipe.ranks.values()
    start, sleeps = rank.start, np.random.default_rng(1)

    def late(*tasks: Task, train: bool = True) -> object:
        work = sum(2 if task.kind is Kind.BACKWARD else 1 for task in tasks)
        time.sleep(mean * work * sleeps.pareto(1.5) * 0.5)  # Pareto's mean is 2 here, with a heavy tail
        return start(*tasks, train=train)

    rank.start = late


def main() -> None:
    """Builds the task's model over the ranks and serves steps."""
    parser = argparse.ArgumentParser()
    parser.add_argument("policy")
    parser.add_argument("channel")
    parser.add_argument("--virtual", type=int, default=1)
    parser.add_argument("--split", default="")
    parser.add_argument("--in-flight", type=int, default=0)
    parser.add_argument("--fused", action="store_true")
    parser.add_argument("--timeline", default="", help="folder for timeline.json and timeline.png")
    parser.add_argument("--straggler", type=float, default=0.0, help="mean extra seconds of a task on the last rank")
    arguments = parser.parse_args()
    task = Task()
    ranks = int(os.environ["OMPI_COMM_WORLD_SIZE"])
    grid = ax.init(pipe=ranks)
    shape = ax.models.ModelShape(
        task.layers, task.hidden, task.heads, task.heads, 4 * task.hidden, task.vocab, task.seq_len
    )
    trainer = ax.Trainer(
        lambda: ax.models.Transformer(shape, rngs=nnx.Rngs(0)),
        optax.adamw(3e-4, 0.9, 0.95, weight_decay=0.1),
        grid,
        microbatches=task.microbatches,
        memory=ax.MemoryConfig(precision="fp32"),
        pipeline=PipelineConfig(
            policy=arguments.policy,
            channel=arguments.channel,
            virtual_stages=arguments.virtual,
            split=arguments.split,
            in_flight=arguments.in_flight,
            split_backward=not arguments.fused,
        ),
    )
    batches = np.random.default_rng(0)
    global_batch = task.microbatch * task.microbatches
    from mpi4py import MPI

    comm = MPI.COMM_WORLD.Dup()
    if arguments.straggler:
        example = batches.integers(0, task.vocab, (global_batch, task.seq_len + 1))
        slow_down(trainer, arguments.straggler, example, last=grid.rank == ranks - 1)
        batches = np.random.default_rng(0)
    if grid.rank == 0:
        print(json.dumps({"ready": True}), flush=True)
    while True:
        order = np.zeros(1, np.int32)
        if grid.rank == 0:
            order[0] = bool(sys.stdin.readline())
        request = comm.Ibcast(order)
        while not request.Test():
            time.sleep(0.003)
        if not order[0]:
            break
        if arguments.timeline:
            trainer.engine.write_timeline(Path(arguments.timeline))
        start = time.perf_counter()
        loss = trainer.step(batches.integers(0, task.vocab, (global_batch, task.seq_len + 1)))["loss"]
        np.asarray(next(iter(trainer.engine.params.values())))  # the update too has run then
        request = comm.Ibarrier()
        while not request.Test():  # on every rank: the benchmark stops them all when it is another's turn
            time.sleep(0.0005)
        if grid.rank == 0:
            print(json.dumps({"seconds": time.perf_counter() - start, "loss": float(loss)}), flush=True)
    os._exit(0)


main()
