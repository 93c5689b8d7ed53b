"""Baselines from the Loki paper, which select keys by other criteria; written for correctness, not for speed."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from axonn_jax.core.tensor.params import key_of
from axonn_jax.text.inference.attend import Attended, FullAttention, Seen, scores, weighted
from axonn_jax.text.inference.cache import LayerCache, append
from axonn_jax.text.inference.select import largest


def _number(seen: Seen, keys: float) -> jax.Array:
    """Return the number of keys to select for each slot, [slots, 1, 1]."""
    return jnp.maximum(jnp.floor(seen.tokens.astype(jnp.float32) * keys).astype(jnp.int32), 1)[:, None, None]


def _top_keys(ranked: jax.Array, seen: Seen, number: jax.Array, *, newest: bool = True) -> jax.Array:
    """Return the mask of the `number` best valid places by rank; with `newest`, the newest token is one of them."""
    ranked = jnp.where(seen.valid[:, None, None], ranked, -jnp.inf)
    if newest:
        is_newest = (jnp.arange(ranked.shape[-1]) == seen.newest[:, None])[:, None, None]
        ranked = jnp.where(is_newest, jnp.inf, ranked)
    number = jnp.broadcast_to(number, ranked.shape[:-1])
    # `largest` selects at least one key; slots that may have none are masked out.
    return largest(ranked, jnp.maximum(number, 1)) & seen.valid[:, None, None] & (number > 0)[..., None]


@dataclass(frozen=True)
class ExactTopK(FullAttention):
    """Ranking by exact scores, the best possible selection."""

    keys: float
    name: str = "exact-topk"

    def step(self, q: jax.Array, new: LayerCache, arrays: LayerCache, seen: Seen, extra: Any) -> Attended:
        """Attend to the keys of the largest scores."""
        arrays = append(arrays, new, seen.newest)
        scored = scores(q, arrays[0], seen.rule)
        selected = _top_keys(scored, seen, _number(seen, self.keys))
        return weighted(scored, selected, arrays[1]).astype(q.dtype), arrays


@dataclass(frozen=True)
class RandomKeys(FullAttention):
    """Random ranking, drawn for every token and shared by all heads."""

    keys: float
    name: str = "random"

    def step(self, q: jax.Array, new: LayerCache, arrays: LayerCache, seen: Seen, extra: Any) -> Attended:
        """Attend to randomly drawn keys and to the newest one."""
        arrays = append(arrays, new, seen.newest)
        scored = scores(q, arrays[0], seen.rule)
        keys = jax.vmap(jax.random.fold_in, (None, 0))(key_of(0), seen.tokens)
        drawn = jax.vmap(lambda key: jax.random.uniform(key, scored.shape[-1:]))(keys)[:, None, None]
        selected = _top_keys(jnp.broadcast_to(drawn, scored.shape), seen, _number(seen, self.keys))
        return weighted(scored, selected, arrays[1]).astype(q.dtype), arrays


@dataclass(frozen=True)
class NewestKeys(FullAttention):
    """Ranking by age."""

    keys: float
    name: str = "window"

    def step(self, q: jax.Array, new: LayerCache, arrays: LayerCache, seen: Seen, extra: Any) -> Attended:
        """Attend to the newest keys."""
        arrays = append(arrays, new, seen.newest)
        scored = scores(q, arrays[0], seen.rule)
        age = -_age(seen, scored.shape[-1])[:, None, None].astype(jnp.float32)
        selected = _top_keys(jnp.broadcast_to(age, scored.shape), seen, _number(seen, self.keys))
        return weighted(scored, selected, arrays[1]).astype(q.dtype), arrays


def _age(seen: Seen, capacity: int) -> jax.Array:
    """Return the number of newer tokens, [slots, capacity]."""
    return (seen.newest[:, None] - jnp.arange(capacity)) % capacity


@dataclass(frozen=True)
class HeavyHitters(FullAttention):
    """H2O (Zhang et al., NeurIPS 2023): half the selection is the newest keys, half those with most attention so far.

    A dropped key never returns. Sums of attention are the cache's third array, -inf for dropped keys.
    """

    # Every token changes the sums and may drop a key, so prompts go through token by token: no `dense_prompt`.

    keys: float
    group: int
    """Query heads per KV head."""
    name: str = "h2o"
    dense_prompt: bool = False

    def features(self, head_dim: int) -> tuple[tuple[int, Any], ...]:
        """Return (features, dtype) of the cache's arrays: keys, values, and each query head's attention sum."""
        return (*super().features(head_dim), (self.group, jnp.float32))

    def stored(self, k: jax.Array, v: jax.Array, extra: Any) -> LayerCache:
        """Return keys, values, and zero attention sums."""
        return k, v, jnp.zeros((*k.shape[:3], self.group), jnp.float32)

    def step(self, q: jax.Array, new: LayerCache, arrays: LayerCache, seen: Seen, extra: Any) -> Attended:
        """Attend to the retained keys and add their weights to the attention sums."""
        k, v, old_sums = append(arrays, new, seen.newest)
        scored, sums = scores(q, k, seen.rule), jnp.swapaxes(old_sums, 2, 3)
        number = _number(seen, self.keys)
        newest = (_age(seen, scored.shape[-1])[:, None, None] < jnp.maximum(number // 2, 1)[..., None]) & seen.valid[
            :, None, None
        ]
        heavy = _top_keys(jnp.where(newest, -jnp.inf, sums), seen, number - jnp.maximum(number // 2, 1), newest=False)
        retained = (newest | heavy) & (sums > -jnp.inf)
        masked = jnp.where(retained, scored, -jnp.inf)
        sums = jnp.where(retained, sums + jax.nn.softmax(masked, -1), -jnp.inf)
        # An idle slot, of 0 tokens, must not drop keys.
        new_sums = jnp.where((seen.tokens > 0)[:, None, None, None], jnp.swapaxes(sums, 2, 3), old_sums)
        return weighted(scored, retained, v).astype(q.dtype), (k, v, new_sums)
