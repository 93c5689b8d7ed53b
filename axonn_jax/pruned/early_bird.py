"""Early-bird search for a mask while a run trains: the first that no longer changes (You et al., ICLR 2020).

The paper counts the entries in which two masks differ over all entries. Masks drawn at random, of density f, differ in
2f(1-f) of them: at density 0.05 in fewer than the paper's threshold of a tenth. So differences are counted over those.
"""

from collections import deque
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from axonn_jax.pruned.masks import Arrays, counting, rounds, totals

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
        """True if the newest mask's `distance` to each of the four before is at most `threshold`.

        Collectives: all-reduces of three numbers a parameter and mask.
        """
        before = list(self._last)
        self.distance = max((distance(masks, earlier) for earlier in before), default=None)
        self._last.append(masks)
        return len(before) == WINDOW - 1 and self.distance is not None and self.distance <= self.threshold


def distance(masks: Mapping[str, jax.Array], earlier: Mapping[str, jax.Array]) -> float:
    """Return the entries in which two masks differ, as a share of those in which random masks would differ.

    A random mask keeps as many entries of every parameter as the mask does: 0 means equal masks, about 1 unrelated
    ones.
    """
    differing, by_chance = 0, 0.0
    for names in rounds(masks):
        counts = np.asarray(_counts([masks[name] for name in names], [earlier[name] for name in names]))
        for name, (apart, now, then) in zip(names, counts.T.tolist(), strict=True):
            size = masks[name].size
            differing += apart
            by_chance += (now * (size - then) + then * (size - now)) / size
    return differing / by_chance if by_chance else 0.0


@counting
def _counts(masks: Arrays, earlier: Arrays) -> jax.Array:
    """Count entries in which masks differ, that each mask keeps, and that the earlier one keeps: [3, masks]."""
    apart = [mask != before for mask, before in zip(masks, earlier, strict=True)]
    return jnp.stack([totals(apart), totals(masks), totals(earlier)])
