"""Bound on programs in flight, which are dispatched but not finished."""

from collections import deque
from typing import TypeVar

import jax

from axonn_jax.core.errors import integer, typed_arguments

Results = TypeVar("Results")
STEPS = 2
"""Programs in flight that keep devices busy: one runs, the next one waits."""


class InFlight:
    """Bound on programs in flight.

    Args:
        most: Largest number of programs in flight when a call returns.
    """

    def __init__(self, most: int = STEPS):
        self._most, self._results = integer("in_flight", most, 1), deque[object]()

    def __call__(self, results: Results) -> Results:
        """Register the results of the program just dispatched, wait for excess earlier programs, and return them."""
        self._results.append(results)
        while len(self._results) > self._most:
            jax.block_until_ready(self._results.popleft())
        return results


@typed_arguments
def in_flight(most: int = STEPS) -> InFlight:
    """Return a function that bounds the number of programs in flight in a training loop.

    Call ``bounded = ax.in_flight()`` before the loop and ``loss = bounded(train_step(model, optimizer, batch))`` in it.
    Each call returns its argument once the program from `most` calls ago has finished, so the devices always have the
    next program to run. Without a bound, a loop that reads no result of more than 32 programs can hang: XLA's CPU
    client allows 32 in flight on a device, and the 33rd waits on the thread that another device's collective needs. On
    other devices the bound limits how far the host runs ahead, and the memory of waiting batches.

    Args:
        most: Largest number of programs in flight when a call returns.

    Returns:
        A function that takes and returns an array or a tree of arrays, such as a loss or metrics, that no later program
        donates.

    Raises:
        UserError: `most` is below 1.
    """
    return InFlight(most)
