"""Made-up timelines, and orders of tasks run against each other."""

from collections import deque

from axonn_jax.pipe.schedule.dispatcher import OrderedDispatcher
from axonn_jax.pipe.schedule.tasks import sends
from axonn_jax.pipe.timeline.spans import Span


def gpipe(ranks, microbatches, step=1, forward=1.0, backward=2.0, split=False):
    """All forwards, then all backwards, of even length: a bubble of (ranks - 1) / (microbatches + ranks - 1)."""
    spans = []
    for rank in range(ranks):
        for number in range(microbatches):
            start = (rank + number) * forward
            spans.append(Span(rank, f"F{rank}.{number}", "forward", start, start + forward, step))
            if rank < ranks - 1:
                spans.append(Span(rank, f"send F{rank}.{number}", "communication", start + 0.9, start + 1.1, step))
            start = (ranks + microbatches - 1) * forward + (ranks - 1 - rank + number) * backward
            if split:
                middle = start + backward / 2
                spans.append(Span(rank, f"B{rank}.{number}", "input_gradient", start, middle, step))
                spans.append(Span(rank, f"W{rank}.{number}", "weight_gradient", middle, start + backward, step))
            else:
                spans.append(Span(rank, f"B{rank}.{number}", "backward", start, start + backward, step))
    return spans


def task(rank, start, end, kind="forward", name="F0.0", step=1):
    return Span(rank, name, kind, start, end, step)


def check_feasible(orders, shape):
    """Runs fixed orders, one a rank, against each other and pairs every send with its receive.

    Raises ``ValueError`` that names the blocked tasks if the ranks would wait for each other, a task that does not
    belong where it is or comes twice, or a rank whose order is not complete.
    """
    if len(orders) != shape.pipe:
        raise ValueError(f"{len(orders)} orders for {shape.pipe} ranks")
    ranks = [OrderedDispatcher(shape, rank) for rank in range(shape.pipe)]
    for dispatcher, order in zip(ranks, orders, strict=True):
        for task_of_order in order:
            dispatcher.append(task_of_order)
    work = deque(range(shape.pipe))
    while work:
        dispatcher = ranks[work.popleft()]
        while (task := dispatcher.next()) is not None:
            dispatcher.finished(task)
            message = sends(task, shape)
            if message is not None:
                ranks[shape.rank_of(message.stage)].arrived(message)
                work.append(shape.rank_of(message.stage))
    blocked = [f"rank {rank.rank} at {rank.blocked}" for rank in ranks if rank.blocked is not None]
    if blocked:
        raise ValueError("these orders deadlock: " + ", ".join(blocked))
    short = [str(rank.rank) for rank in ranks if not rank.done]
    if short:
        raise ValueError(f"tasks are missing from the order of rank {', '.join(short)}")
