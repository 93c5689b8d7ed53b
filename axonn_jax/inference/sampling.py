"""Choice of the next token from a vocabulary split over `y`; with one seed a text is the same on every grid."""

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from axonn_jax.inference.select import bisected, ordered
from axonn_jax.options import CountOrZero, Density, Range, Seed, Settings, Share
from axonn_jax.tensor.collectives import all_reduce, all_reduce_max, axis_size, shard_offset
from axonn_jax.tensor.loss import VOCAB_AXIS
from axonn_jax.tensor.params import GENERATOR, key_of

_LEAST, _MOST = 0.0001, 10_000  # largest divisor of scores; beyond, they may no longer be finite in float32
_Divisor = Annotated[float, Range(f"a number from {_LEAST} to {_MOST:,}", _LEAST, _MOST)]
_Temperature = Annotated[float, Range(f"0, or a number from {_LEAST} to {_MOST:,}", _LEAST, _MOST, zero=True)]


class SamplingForm(NamedTuple):
    """Part of a `Sampling` that decides on the program; the rest are numbers for the program to read."""

    greedy: bool
    top_k: int
    top_p: bool
    min_p: bool
    penalty: bool


@dataclass(frozen=True)
class Sampling(Settings):
    """Sampling of the next token. The fields apply in their order, as in Hugging Face's `generate`."""

    table = "sampling"

    repetition_penalty: _Divisor = 1.0
    """Divisor of positive scores, and factor on negative scores, of tokens in the text so far; 1: no penalty."""
    temperature: _Temperature = 0.8
    """Divisor of the scores; 0: always the likeliest token, the lowest id of equal ones."""
    top_k: CountOrZero = 50
    """Number of likeliest tokens to draw from; 0: all."""
    top_p: Density = 1.0
    """Total probability of the likeliest tokens to draw from, no more of them than reach it, of equal ones the lowest
    ids; 1: all tokens."""
    min_p: Share = 0.0
    """Least probability of a drawn token, as a share of the likeliest one's."""
    seed: Seed = 0
    """Seed of the draws; each prompt and sample has its own noise."""

    @property
    def form(self) -> SamplingForm:
        """Part of the settings for which a program is compiled."""
        greedy = self.temperature == 0
        drawn = not greedy
        top_k = self.top_k if drawn else 0
        return SamplingForm(
            greedy, top_k, drawn and self.top_p < 1, drawn and self.min_p > 0, self.repetition_penalty != 1
        )

    @property
    def numbers(self) -> "np.ndarray[tuple[int], np.dtype[np.float32]]":
        """Numbers for a program: penalty, temperature, top_p and the logarithm of min_p."""
        least = math.log(self.min_p) if self.min_p > 0 else -math.inf
        return np.array([self.repetition_penalty, self.temperature, self.top_p, least], np.float32)

    def key(self, sample: int, prompt: Sequence[int] = ()) -> "np.ndarray[tuple[int], np.dtype[np.uint32]]":
        """Two words to seed the noise of a text, drawn from the seed, the prompt's tokens and the sample's number."""
        key = key_of(self.seed)
        for number in (zlib.crc32(np.asarray(prompt, "<u4").tobytes()), sample):
            key = jax.random.fold_in(key, number)
        return np.asarray(jax.random.key_data(key))


def choose(
    logits: jax.Array,
    form: SamplingForm,
    numbers: jax.Array,
    keys: jax.Array,
    positions: jax.Array,
    seen: jax.Array | None,
) -> jax.Array:
    """Ids of the next tokens [rows] for logits [rows, vocab/Gy]; -1 where the logits are not finite.

    `keys` [rows, 2] seed the noise, `positions` [rows] are the new tokens', `seen` [rows, vocab/Gy] marks tokens of the
    text. Noise is Gumbel's, by key, position and global token id (Gumbel-max). Collectives over `y`: an all-reduce of a
    number a row, and a gather of the candidates: a value and an id a row and device, or with `top_k` so many; `top_p`
    without it 34 all-reduces of three numbers a row and a gather of one a row and device.
    """
    logits = logits.astype(jnp.float32)
    wrong = all_reduce(jnp.sum(jnp.isnan(logits) | (logits == jnp.inf), -1, dtype=jnp.int32), VOCAB_AXIS) > 0
    if form.penalty and seen is not None:
        penalty = numbers[0]
        logits = jnp.where(seen, jnp.where(logits > 0, logits / penalty, logits * penalty), logits)
    ids = _own_ids(logits)
    if not form.greedy:
        logits, ids = _allowed(logits / numbers[1], ids, form, numbers)
        logits = logits + _gumbel(keys, positions, ids)
    if form.top_k and not form.greedy:  # candidates are on every device
        chosen = jnp.take_along_axis(ids, jnp.argmax(logits, -1, keepdims=True), -1)[:, 0]
    else:
        chosen = _likeliest(logits, ids)
    return jnp.where(wrong, -1, chosen)


def log_probabilities(logits: jax.Array, ids: jax.Array) -> jax.Array:
    """Log-probabilities [rows], float32, of tokens [rows] under logits [rows, vocab/Gy]; three small all-reduces."""
    logits = logits.astype(jnp.float32)
    top = all_reduce_max(jnp.max(logits, -1), VOCAB_AXIS)
    total = all_reduce(jnp.sum(jnp.exp(logits - top[:, None]), -1), VOCAB_AXIS)
    own = jnp.sum(jnp.where(_own_ids(logits) == ids[:, None], logits, 0.0), -1)
    return all_reduce(own, VOCAB_AXIS) - top - jnp.log(total)


def mark_seen(seen: jax.Array, ids: jax.Array, valid: jax.Array) -> jax.Array:
    """Return the marks of the texts' tokens, [rows, vocab/Gy], with further `valid` ones [rows, n]."""
    local = ids - shard_offset(VOCAB_AXIS, seen.shape[1])
    local = jnp.where(valid & (local >= 0) & (local < seen.shape[1]), local, seen.shape[1])
    return seen.at[jnp.arange(seen.shape[0])[:, None], local].set(True, mode="drop")


def _own_ids(logits: jax.Array) -> jax.Array:
    ids = jnp.arange(logits.shape[1], dtype=jnp.int32) + shard_offset(VOCAB_AXIS, logits.shape[1])
    return jnp.broadcast_to(ids, logits.shape)


def _everywhere(x: jax.Array) -> jax.Array:
    """[rows, n] of every shard of the vocabulary side by side, in the order of ids."""
    return x if axis_size(VOCAB_AXIS) == 1 else lax.all_gather(x, VOCAB_AXIS, axis=1, tiled=True)


def _likeliest(logits: jax.Array, ids: jax.Array) -> jax.Array:
    """Ids of the largest logits, of equal ones the lowest."""
    at = jnp.argmax(logits, -1, keepdims=True)
    values, owners = (_everywhere(jnp.take_along_axis(a, at, -1)) for a in (logits, ids))
    return jnp.take_along_axis(owners, jnp.argmax(values, -1, keepdims=True), -1)[:, 0]


def _allowed(logits: jax.Array, ids: jax.Array, form: SamplingForm, numbers: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return logits and ids of the candidates; other tokens have minus infinity, or are absent."""
    if form.top_k:
        largest, at = lax.top_k(logits, min(form.top_k, logits.shape[1]))
        values, owners = _everywhere(largest), _everywhere(jnp.take_along_axis(ids, at, -1))
        logits, at = lax.top_k(values, min(form.top_k, values.shape[1]))
        ids = jnp.take_along_axis(owners, at, -1)
        top = logits[:, :1]
        if form.top_p:
            weights = jax.nn.softmax(logits, -1)
            logits = jnp.where(jnp.cumsum(weights, -1) - weights < numbers[2], logits, -jnp.inf)
    else:
        top = all_reduce_max(jnp.max(logits, -1, keepdims=True), VOCAB_AXIS)
        if form.top_p:
            logits = jnp.where(_nucleus(logits, top, numbers[2]), logits, -jnp.inf)
    if form.min_p:
        logits = jnp.where(logits >= top + numbers[3], logits, -jnp.inf)
    return logits, ids


def _nucleus(logits: jax.Array, top: jax.Array, p: jax.Array) -> jax.Array:
    """Mask of the fewest tokens [rows, vocab/Gy], the likeliest first and of equal ones the lowest ids, that reach `p`.

    The least of their logits is found by bisection. Sums are of whole numbers, so equal on every grid: with rounded
    ones the number of the equal tokens would depend on their order.
    """
    places = ordered(logits)
    weights = jnp.minimum(jnp.exp(logits - top) * 2.0**32, 2.0**32 - 2**8).astype(jnp.uint32)

    def mass(mask: jax.Array) -> list[jax.Array]:
        sums = [jnp.sum(digit, -1, keepdims=True) for digit in _digits(jnp.where(mask, weights, 0))]
        return [*all_reduce(jnp.stack(sums), VOCAB_AXIS)]

    enough = p * _number(mass(jnp.ones_like(places, bool)))
    lowest = jnp.full(top.shape, -(2**31), jnp.int32)
    _, least = bisected(lowest, ordered(top), lambda place: ~(_number(mass(places > place)) < enough))
    tied = (places == least).astype(jnp.int32)
    counts, shard = _everywhere(jnp.sum(tied, -1, keepdims=True)), shard_offset(VOCAB_AXIS, 1)
    before = jnp.sum(jnp.where(jnp.arange(counts.shape[1]) < shard, counts, 0), -1, keepdims=True)
    rank = (before + jnp.cumsum(tied, -1) - tied).astype(jnp.uint32)
    above = [more + rank * digit for more, digit in zip(mass(places > least), _digits(weights), strict=True)]
    missing = _number(above) < enough
    return (places > least) | ((tied > 0) & (missing | (rank == 0)))  # a `p` near 0 leaves one too


def _digits(whole: jax.Array) -> list[jax.Array]:
    """Return three digits of numbers of 32 bits, each so small that a sum of 2^20 still has a place in 32 bits."""
    return [whole >> 21, (whole >> 10) & 2047, whole & 1023]


def _number(digits: list[jax.Array]) -> jax.Array:
    """Return the float32 of digits or of sums of digits; only the two additions round."""
    first, second, third = (digit.astype(jnp.float32) for digit in digits)
    return first * 2**21 + (second * 2**10 + third)


def _gumbel(keys: jax.Array, positions: jax.Array, ids: jax.Array) -> jax.Array:
    """Return noise of tokens [rows, n], by the row's key and position and the token's id alone."""
    rows = jax.vmap(jax.random.fold_in)(jax.random.wrap_key_data(keys, impl=GENERATOR), positions)
    words = jax.random.key_data(jax.vmap(jax.vmap(jax.random.fold_in, (None, 0)))(rows, ids))
    return gumbel(words[..., 0])


def gumbel(words: jax.Array) -> jax.Array:
    """Gumbel noise of random words of 32 bits, from -2.9 to 22.9: of an infinite one a token of no probability wins.

    The words near 0, of the largest noise, keep all their bits.
    """
    uniform = jnp.minimum((words.astype(jnp.float32) + 0.5) * 2.0**-32, 1 - 2.0**-24)
    return -jnp.log(-jnp.log1p(-uniform))
