"""Early-bird search for a mask while a run trains: the first that no longer changes (You et al., ICLR 2020)."""

from collections import deque
from collections.abc import Mapping

import jax
import jax.numpy as jnp

WINDOW = 5
"""Masks in a row that must be alike (the paper's queue)."""


class EarlyBird:
    """Remembers the last four masks; each has a byte an entry on its devices."""

    def __init__(self, threshold: float):
        self.threshold = threshold
        self._last: deque[Mapping[str, jax.Array]] = deque(maxlen=WINDOW - 1)
        self.distance: float | None = None
        """The largest to one of the masks before, at the last look."""

    def done(self, masks: Mapping[str, jax.Array]) -> bool:
        """Whether the newest mask differs from each of the four before in at most `threshold` of all entries.

        Collectives: an all-reduce of a number a parameter and mask.
        """
        before = list(self._last)[-(WINDOW - 1) :]
        self.distance = max((distance(masks, earlier) for earlier in before), default=None)
        self._last.append(masks)
        return len(before) == WINDOW - 1 and self.distance is not None and self.distance <= self.threshold


def distance(masks: Mapping[str, jax.Array], others: Mapping[str, jax.Array]) -> float:
    """The share of all entries in which two masks differ (normalised Hamming distance)."""
    counts = _differing(dict(masks), dict(others))
    return sum(map(int, counts.values())) / sum(mask.size for mask in masks.values())


@jax.jit
def _differing(masks: dict[str, jax.Array], others: dict[str, jax.Array]) -> dict[str, jax.Array]:
    return {name: jnp.sum(mask != others[name], dtype=jnp.int32) for name, mask in masks.items()}
