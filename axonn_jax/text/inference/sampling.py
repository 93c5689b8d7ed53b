"""Sampling of the next token from a vocabulary split over `y`; a seed gives the same text on every grid."""

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from axonn_jax.core.options import CountOrZero, Density, Range, Seed, Settings, Share
from axonn_jax.core.tensor.collectives import all_reduce, all_reduce_max, axis_size, shard_offset
from axonn_jax.core.tensor.loss import VOCAB_AXIS
from axonn_jax.core.tensor.params import GENERATOR, key_of
from axonn_jax.text.inference.select import bisected, ordered

_LEAST, _MOST = 0.0001, 10_000  # largest divisor of scores; beyond, they may no longer be finite in float32
_Divisor = Annotated[float, Range(f"a number from {_LEAST} to {_MOST:,}", _LEAST, _MOST)]
_Temperature = Annotated[float, Range(f"0, or a number from {_LEAST} to {_MOST:,}", _LEAST, _MOST, zero=True)]


class SamplingForm(NamedTuple):
    """Part of a `Sampling` that a program is compiled for; the remaining settings are numbers that it reads."""

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
        """Part of the settings that a program is compiled for."""
        greedy = self.temperature == 0
        # Greedy choice ignores the filters: one program serves all their settings.
        drawn = not greedy
        top_k = self.top_k if drawn else 0
        return SamplingForm(
            greedy, top_k, drawn and self.top_p < 1, drawn and self.min_p > 0, self.repetition_penalty != 1
        )

    @property
    def numbers(self) -> "np.ndarray[tuple[int], np.dtype[np.float32]]":
        """Numbers that a program reads: penalty, temperature, top_p and the logarithm of min_p."""
        least = math.log(self.min_p) if self.min_p > 0 else -math.inf
        return np.array([self.repetition_penalty, self.temperature, self.top_p, least], np.float32)

    def key(self, sample: int, prompt: Sequence[int] = ()) -> "np.ndarray[tuple[int], np.dtype[np.uint32]]":
        """Return two words that seed a text's noise, from the seed, the prompt's tokens and the sample's number."""
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
    """Sample the next tokens, with Gumbel noise (Gumbel-max) by key, position and global token id.

    Collectives over `y`: an all-reduce of one number per row, and a gather of the candidates, which are one value and
    one id per row and device, or `top_k` of them. `top_p` without `top_k` adds 34 all-reduces of three numbers per row
    and a gather of one per row and device.

    Args:
        logits: Logits [rows, vocab/Gy].
        form: Part of the sampling settings that the program is compiled for.
        numbers: The other settings, `Sampling.numbers`.
        keys: Seeds of the noise, [rows, 2].
        positions: Positions of the new tokens, [rows].
        seen: Mask of the tokens in each text, [rows, vocab/Gy].

    Returns:
        Token ids [rows]; -1 where the logits are not finite.
    """
    logits = logits.astype(jnp.float32)
    wrong = all_reduce(jnp.sum(jnp.isnan(logits) | (logits == jnp.inf), -1, dtype=jnp.int32), VOCAB_AXIS) > 0
    if form.penalty and seen is not None:
        penalty = numbers[0]
        logits = jnp.where(seen, jnp.where(logits > 0, logits / penalty, logits * penalty), logits)
    ids = _shard_ids(logits)
    if not form.greedy:
        logits, ids = _allowed(logits / numbers[1], ids, form, numbers)
        logits = logits + _gumbel(keys, positions, ids)
    if form.top_k and not form.greedy:  # every device has all candidates
        token = jnp.take_along_axis(ids, jnp.argmax(logits, -1, keepdims=True), -1)[:, 0]
    else:
        token = _likeliest(logits, ids)
    return jnp.where(wrong, -1, token)


def log_probabilities(logits: jax.Array, ids: jax.Array) -> jax.Array:
    """Return float32 log-probabilities [rows] of tokens [rows] under logits [rows, vocab/Gy].

    Collectives: three all-reduces of 4 bytes per row over `y`.
    """
    logits = logits.astype(jnp.float32)
    top = all_reduce_max(jnp.max(logits, -1), VOCAB_AXIS)
    total = all_reduce(jnp.sum(jnp.exp(logits - top[:, None]), -1), VOCAB_AXIS)
    # Only the shard that has the token contributes its logit.
    local_logit = jnp.sum(jnp.where(_shard_ids(logits) == ids[:, None], logits, 0.0), -1)
    return all_reduce(local_logit, VOCAB_AXIS) - top - jnp.log(total)


def mark_seen(seen: jax.Array, ids: jax.Array, valid: jax.Array) -> jax.Array:
    """Add the `valid` ones of `ids` [rows, n] to the mask of the texts' tokens, [rows, vocab/Gy]."""
    local = ids - shard_offset(VOCAB_AXIS, seen.shape[1])
    # Ids of other shards, and invalid ones, get an index that the scatter drops.
    local = jnp.where(valid & (local >= 0) & (local < seen.shape[1]), local, seen.shape[1])
    return seen.at[jnp.arange(seen.shape[0])[:, None], local].set(True, mode="drop")


def _shard_ids(logits: jax.Array) -> jax.Array:
    ids = jnp.arange(logits.shape[1], dtype=jnp.int32) + shard_offset(VOCAB_AXIS, logits.shape[1])
    return jnp.broadcast_to(ids, logits.shape)


def _everywhere(x: jax.Array) -> jax.Array:
    """Concatenate [rows, n] of every shard of the vocabulary, in the order of ids."""
    return x if axis_size(VOCAB_AXIS) == 1 else lax.all_gather(x, VOCAB_AXIS, axis=1, tiled=True)


def _likeliest(logits: jax.Array, ids: jax.Array) -> jax.Array:
    """Return the ids of the largest logits, the lowest id of equal ones."""
    at = jnp.argmax(logits, -1, keepdims=True)
    values, owners = (_everywhere(jnp.take_along_axis(a, at, -1)) for a in (logits, ids))
    return jnp.take_along_axis(owners, jnp.argmax(values, -1, keepdims=True), -1)[:, 0]


def _allowed(logits: jax.Array, ids: jax.Array, form: SamplingForm, numbers: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return logits and ids of the candidates; other tokens have logit -inf, or are absent."""
    if form.top_k:
        # The global top k are among the shards' top k.
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
    """Return the mask [rows, vocab/Gy] of the fewest likeliest tokens that reach `p`, the lowest ids of equal ones."""
    # Bisect for the smallest logit of the nucleus. Sums are of integers and so equal on every grid: with rounded sums,
    # the number of equal tokens that are included would depend on the order of addition.
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
    offset = jnp.sum(jnp.where(jnp.arange(counts.shape[1]) < shard, counts, 0), -1, keepdims=True)
    rank = (offset + jnp.cumsum(tied, -1) - tied).astype(jnp.uint32)
    above = [more + rank * digit for more, digit in zip(mass(places > least), _digits(weights), strict=True)]
    missing = _number(above) < enough
    return (places > least) | ((tied > 0) & (missing | (rank == 0)))  # even a `p` near 0 includes one token


def _digits(number: jax.Array) -> list[jax.Array]:
    """Split 32-bit numbers into three digits, each small enough that a sum of 2^20 of them fits into 32 bits."""
    return [number >> 21, (number >> 10) & 2047, number & 1023]


def _number(digits: list[jax.Array]) -> jax.Array:
    """Return digits, or sums of digits, as a float32 number; only the two additions round."""
    first, second, third = (digit.astype(jnp.float32) for digit in digits)
    return first * 2**21 + (second * 2**10 + third)


def _gumbel(keys: jax.Array, positions: jax.Array, ids: jax.Array) -> jax.Array:
    """Return the noise of tokens [rows, n], which depends only on the row's key and position and the token's id."""
    rows = jax.vmap(jax.random.fold_in)(jax.random.wrap_key_data(keys, impl=GENERATOR), positions)
    words = jax.random.key_data(jax.vmap(jax.vmap(jax.random.fold_in, (None, 0)))(rows, ids))
    return gumbel(words[..., 0])


def gumbel(words: jax.Array) -> jax.Array:
    """Return Gumbel noise of random 32-bit words, from -2.9 to 22.9."""
    # The noise must be finite, or a token of zero probability could win. Words near 0, which give the largest noise,
    # keep all their bits.
    uniform = jnp.minimum((words.astype(jnp.float32) + 0.5) * 2.0**-32, 1 - 2.0**-24)
    return -jnp.log(-jnp.log1p(-uniform))
