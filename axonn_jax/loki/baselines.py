"""Baselines of Loki from its paper: other choices of keys, written for correctness, not for speed."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from axonn_jax.inference.attend import Attended, FullAttention, Seen, scores, weighted
from axonn_jax.inference.cache import LayerCache, append
from axonn_jax.inference.select import largest
from axonn_jax.tensor.params import key_of


def _number(seen: Seen, keys: float) -> jax.Array:
    """Number of keys of each slot, [slots, 1, 1]."""
    return jnp.maximum(jnp.floor(seen.tokens.astype(jnp.float32) * keys).astype(jnp.int32), 1)[:, None, None]


def _first(ranked: jax.Array, seen: Seen, number: jax.Array, *, newest: bool = True) -> jax.Array:
    """Return the first valid places by rank, the newest included."""
    ranked = jnp.where(seen.valid[:, None, None], ranked, -jnp.inf)
    if newest:
        own = (jnp.arange(ranked.shape[-1]) == seen.newest[:, None])[:, None, None]
        ranked = jnp.where(own, jnp.inf, ranked)
    number = jnp.broadcast_to(number, ranked.shape[:-1])
    return largest(ranked, jnp.maximum(number, 1)) & seen.valid[:, None, None] & (number > 0)[..., None]


@dataclass(frozen=True)
class ExactTopK(FullAttention):
    """Ranking by exact scores: the best choice of so many keys."""

    keys: float
    name: str = "exact-topk"

    def step(self, q: jax.Array, new: LayerCache, arrays: LayerCache, seen: Seen, extra: Any) -> Attended:
        """The softmax over the keys of the largest scores."""
        arrays = append(arrays, new, seen.newest)
        scored = scores(q, arrays[0], seen.rule)
        chosen = _first(scored, seen, _number(seen, self.keys))
        return weighted(scored, chosen, arrays[1]).astype(q.dtype), arrays


@dataclass(frozen=True)
class RandomKeys(FullAttention):
    """Ranking by chance, anew for every token, all heads alike."""

    keys: float
    name: str = "random"

    def step(self, q: jax.Array, new: LayerCache, arrays: LayerCache, seen: Seen, extra: Any) -> Attended:
        """The softmax over keys drawn at random and the newest."""
        arrays = append(arrays, new, seen.newest)
        scored = scores(q, arrays[0], seen.rule)
        keys = jax.vmap(jax.random.fold_in, (None, 0))(key_of(0), seen.tokens)
        drawn = jax.vmap(lambda key: jax.random.uniform(key, scored.shape[-1:]))(keys)[:, None, None]
        chosen = _first(jnp.broadcast_to(drawn, scored.shape), seen, _number(seen, self.keys))
        return weighted(scored, chosen, arrays[1]).astype(q.dtype), arrays


@dataclass(frozen=True)
class NewestKeys(FullAttention):
    """Ranking by age."""

    keys: float
    name: str = "window"

    def step(self, q: jax.Array, new: LayerCache, arrays: LayerCache, seen: Seen, extra: Any) -> Attended:
        """The softmax over the newest keys."""
        arrays = append(arrays, new, seen.newest)
        scored = scores(q, arrays[0], seen.rule)
        age = -_age(seen, scored.shape[-1])[:, None, None].astype(jnp.float32)
        chosen = _first(jnp.broadcast_to(age, scored.shape), seen, _number(seen, self.keys))
        return weighted(scored, chosen, arrays[1]).astype(q.dtype), arrays


def _age(seen: Seen, capacity: int) -> jax.Array:
    """Number of newer tokens, [slots, capacity]."""
    return (seen.newest[:, None] - jnp.arange(capacity)) % capacity


@dataclass(frozen=True)
class HeavyHitters(FullAttention):
    """H2O (Zhang et al., NeurIPS 2023): the newest half of the keys, and the keys with most attention so far.

    A dropped key never returns. Sums of attention are a third array of the cache, minus infinity for dropped keys; so
    prompts go through token by token, and a waiting slot (of 0 tokens) keeps its keys.
    """

    keys: float
    group: int
    """Query heads of a KV head."""
    name: str = "h2o"
    dense_prompt: bool = False

    def features(self, head_dim: int) -> tuple[tuple[int, Any], ...]:
        """Keys, values, and each query head's sum of attention."""
        return (*super().features(head_dim), (self.group, jnp.float32))

    def stored(self, k: jax.Array, v: jax.Array, extra: Any) -> LayerCache:
        """A new key has no attention yet."""
        return k, v, jnp.zeros((*k.shape[:3], self.group), jnp.float32)

    def step(self, q: jax.Array, new: LayerCache, arrays: LayerCache, seen: Seen, extra: Any) -> Attended:
        """Return the softmax over the kept keys; add the weights to the sums."""
        k, v, before = append(arrays, new, seen.newest)
        scored, sums = scores(q, k, seen.rule), jnp.swapaxes(before, 2, 3)
        number = _number(seen, self.keys)
        newest = (_age(seen, scored.shape[-1])[:, None, None] < jnp.maximum(number // 2, 1)[..., None]) & seen.valid[
            :, None, None
        ]
        heavy = _first(jnp.where(newest, -jnp.inf, sums), seen, number - jnp.maximum(number // 2, 1), newest=False)
        kept = (newest | heavy) & (sums > -jnp.inf)
        masked = jnp.where(kept, scored, -jnp.inf)
        sums = jnp.where(kept, sums + jax.nn.softmax(masked, -1), -jnp.inf)
        after = jnp.where((seen.tokens > 0)[:, None, None, None], jnp.swapaxes(sums, 2, 3), before)
        return weighted(scored, kept, v).astype(q.dtype), (k, v, after)
