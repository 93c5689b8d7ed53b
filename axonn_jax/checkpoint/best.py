"""The lowest held-out loss of a run: which step has it, and how long it has not fallen."""

import math
from collections.abc import Iterable


class Best:
    """The lowest of a run's held-out losses.

    Args:
        losses: Steps with their losses before a run goes on, in order.
    """

    def __init__(self, losses: Iterable[tuple[int, float]] = ()):
        self.step, self.loss, self.since = 0, math.inf, 0
        for step, loss in losses:
            self.seen(step, loss)

    def seen(self, step: int, loss: float) -> bool:
        """Count an evaluation; return True if its loss is the lowest so far, NaN never."""
        lowest = loss < self.loss
        self.step, self.loss, self.since = (step, loss, 0) if lowest else (self.step, self.loss, self.since + 1)
        return lowest
