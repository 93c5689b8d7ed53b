"""Programs in flight: dispatched and not finished, of which a loop should keep few."""

from collections import deque
from typing import Any, TypeVar

import jax

from axonn_jax.errors import integer, typed_arguments

Results = TypeVar("Results")
STEPS = 2
"""Programs of a training loop that keep devices busy: one runs, the next waits."""


class InFlight:
    """Bound on programs in flight: each call takes a program's results and waits until at most `most` are in flight."""

    def __init__(self, most: int = STEPS):
        self._most, self._results = integer("in_flight", most, 1), deque[Any]()

    def __call__(self, results: Results) -> Results:
        """Return the results of the program just dispatched, after waiting for results of earlier programs."""
        self._results.append(results)
        while len(self._results) > self._most:
            jax.block_until_ready(self._results.popleft())
        return results


@typed_arguments
def in_flight(most: int = STEPS) -> InFlight:
    """Return a function of a loop's loss that bounds the number of programs in flight.

    ``bounded = ax.in_flight()`` before the loop, ``loss = bounded(train_step(model, optimizer, batch))`` in it. Each
    call returns its argument once the program of `most` calls before has finished: the devices always have the next
    program to run. Without a bound, a loop that reads nothing for more than 32 programs can hang: XLA's CPU client
    allows 32 in flight on a device, and the 33rd waits on the thread that another device's collective needs. On other
    devices the bound limits the host's lead, and the memory of waiting batches.

    Args:
        most: programs in flight when a call returns.

    Returns:
        A function of an array or a tree of arrays that no later program donates (a loss, metrics).

    Raises:
        UserError: `most` is below 1.
    """
    return InFlight(most)
