"""Steps of cached attention on whole numbers, and in numpy what they attend to."""

import jax
import jax.numpy as jnp
import numpy as np

from axonn_jax.text.inference.attend import Seen

EPS = float(np.finfo(np.float32).eps)
CAPACITY = WIDTH = 64  # values are unit vectors: what a query gets is what it attends to, and how much
LENGTHS = (1, 10, 64)
SLOTS, KV_HEADS, FIRST = 3, 2, 16


def oracle(ranked, tokens, keys, block=1):
    """The places, of the first `tokens`, that a query attends to by its scores of all keys."""
    number = -(-max(int(np.float32(tokens) * np.float32(keys)), 1) // block)
    scores = np.full(-(-len(ranked) // block) * block, -np.inf)
    scores[:tokens] = ranked[:tokens]
    scores[tokens - 1] = np.inf
    best = scores.reshape(-1, block).max(1)
    blocks = np.argsort(-best, kind="stable")[:number]
    places = np.sort((blocks[:, None] * block + np.arange(block)).ravel())
    return places[places < tokens]


def softmax(scores):
    weights = np.exp(scores - scores.max())
    return weights / weights.sum()


def seen_of(lengths, capacity=CAPACITY):
    tokens = jnp.asarray(lengths, jnp.int32)
    return Seen(jnp.arange(capacity) < tokens[:, None], tokens - 1, tokens)


def orthonormal(rng, *lead, width=WIDTH):
    return np.linalg.qr(rng.standard_normal((*lead, width, width)))[0].astype(np.float32)


class Step:
    """A step's inputs: whole numbers, of which float32 has exact sums, turned by exchanges and signs of features.

    `q`, `k` and `v` are as a model gives them; behind a slot's tokens the cache holds something large.
    """

    def __init__(self, group, lengths=LENGTHS):
        rng = np.random.default_rng(0)
        self.lengths, self.seen = lengths, seen_of(lengths)
        self.q = rng.integers(-1, 2, (SLOTS, KV_HEADS, group, WIDTH)).astype(np.float32)
        self.k = rng.integers(-1, 2, (SLOTS, KV_HEADS, CAPACITY, WIDTH)).astype(np.float32)
        self.scale = 2.0 ** np.arange(SLOTS * KV_HEADS).reshape(SLOTS, KV_HEADS, 1, 1)
        self.v = (self.scale * np.eye(CAPACITY)).astype(np.float32)
        turned = [np.eye(WIDTH)[rng.permutation(WIDTH)] * rng.choice([-1, 1], WIDTH) for _ in range(KV_HEADS)]
        self.components = np.stack(turned).astype(np.float32)
        self.newest = np.array(lengths)[:, None, None, None] - 1

    def take(self, attention, extra=None):
        """What comes of a step, and the cache before and after it."""
        extra = None if extra is None else jnp.asarray(extra)
        at = np.broadcast_to(self.newest, (SLOTS, KV_HEADS, 1, 1))
        behind = np.arange(CAPACITY)[:, None] >= self.newest  # the newest is not there yet
        new = attention.stored(*(jnp.asarray(np.take_along_axis(a, at, 2)) for a in (self.k, self.v)), extra)
        held = (jnp.asarray(np.where(behind, np.float32(1000), a)) for a in (self.k, self.v))
        arrays = attention.stored(*held, extra)
        out, after = jax.jit(attention.step)(jnp.asarray(self.q), new, arrays, self.seen, extra)
        return np.asarray(out), arrays, after

    def scores(self, first=WIDTH):
        """Of all keys, by the first turned features."""
        turned = np.eye(WIDTH) if first == WIDTH else self.components[:, :, :first]
        turned = np.broadcast_to(turned, (KV_HEADS, WIDTH, first))
        return np.einsum("bkgd,kde,bknf,kfe->bkgn", self.q, turned, self.k, turned, optimize=True)

    def check(self, out, places_of, scores=None):
        """Asserts the places that each query attends to, of (its slot, head and number, tokens), and how much."""
        exact = self.scores() if scores is None else scores
        for slot, head, query in np.ndindex(*self.q.shape[:3]):
            places = places_of((slot, head, query), self.lengths[slot])
            weights = out[slot, head, query] / self.scale[slot, head, 0]
            np.testing.assert_array_equal(np.flatnonzero(weights), places)
            wanted = softmax(exact[slot, head, query, places] / WIDTH**0.5)
            np.testing.assert_allclose(weights[places], wanted, rtol=16 * EPS)
