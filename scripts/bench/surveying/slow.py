"""A rank of this package's contestant that sleeps, for a benchmark of stragglers."""

import time
from typing import Any

import numpy as np
from surveying.contestant import Job


def slow_down(trainer: Any, job: Job, mean: float) -> None:
    """Makes the last rank sleep before every task, for times as others' use of a machine gives them: mostly short.

    A whole backward, which is twice the work of a forward or of half a backward, sleeps twice as long on average. Every
    rank calls it: the pipeline that is set up for it is set up by all.
    """
    from axonn_jax.pipe.schedule.tasks import Kind

    pipe, _ = trainer.engine._prepare(job.data.batch(0, job.rows))
    if job.rank < job.world - 1:
        return
    (rank,) = pipe.ranks.values()
    start, sleeps = rank.start, np.random.default_rng(1)

    def late(*tasks: Any, train: bool = True) -> object:
        work = sum(2 if task.kind is Kind.BACKWARD else 1 for task in tasks)
        time.sleep(mean * work * sleeps.pareto(1.5) * 0.5)  # Pareto's mean is 2 here, with a heavy tail
        return start(*tasks, train=train)

    rank.start = late
