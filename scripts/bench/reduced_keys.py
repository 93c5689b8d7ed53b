"""PCAAttn, the baseline of Loki's paper that no part of the package uses."""

from dataclasses import dataclass
from typing import Any

import jax

from axonn_jax.text.inference.attend import Attended, Seen, products, weighted
from axonn_jax.text.inference.cache import LayerCache, append
from axonn_jax.text.loki.attention import LokiAttention, turn


@dataclass(frozen=True)
class ReducedKeys(LokiAttention):
    """PCAAttn of the paper: attends to all keys by the scores of the first features, as if there were no others."""

    name: str = "reduced"

    def step(self, q: jax.Array, new: LayerCache, arrays: LayerCache, seen: Seen, extra: Any) -> Attended:
        """The softmax of approximate scores."""
        arrays = append(arrays, new, seen.newest)
        scored = products(turn(q, extra)[..., : self.first], arrays[0]) * q.shape[-1] ** -0.5
        return weighted(scored, seen.valid[:, None, None], arrays[2]).astype(q.dtype), arrays
