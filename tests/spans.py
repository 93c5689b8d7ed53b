"""Made-up timelines."""

from axonn_jax.pipeline.timeline import Span


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
