"""Cross-entropy over a sharded vocabulary: the logits are never gathered, and in float32 only a part of them exists."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from axonn_jax import compat
from axonn_jax.tensor.chunks import loss_chunk
from axonn_jax.tensor.collectives import reduce_max, reduce_sum, shard_offset, vary
from axonn_jax.tensor.matmul import PLAIN, MatmulLayouts, matmul

VOCAB_AXIS, FEATURE_AXIS = "y", "x"


class Projection(NamedTuple):
    """A weight that scores tokens, gathered over `z`, and how: static but for the weight."""

    weight: jax.Array
    """[hidden/Gx, vocab/Gy], or where `turned` (a tied table) [vocab/Gy, hidden/Gx]."""
    turned: bool = False
    layouts: MatmulLayouts = PLAIN
    used: int | None = None
    """Entries of the vocabulary, where the weight has more: those behind them score minus infinity."""

    @property
    def columns(self) -> int:
        """Logits of a token on this device."""
        return int(self.weight.shape[0 if self.turned else 1])


def cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Negative log-likelihood in nats of each target, from logits split over `y`.

    Shapes: `logits` [..., vocab/Gy], `targets` [...] of global ids -> [...] float32. Collectives over `y`: an
    all-reduce (max) of one number a token and one (sum) of two numbers a token.
    Source: Megatron-LM's vocabulary-parallel loss.
    """
    logits = logits.astype(jnp.float32)
    top = reduce_max(lax.stop_gradient(jnp.max(logits, -1)), VOCAB_AXIS)
    total = _sum_exp(logits, top)
    picked = _picked(logits, targets)
    sums = reduce_sum(jnp.stack([total, jnp.where(picked.held, picked.logit - top, 0.0)]), VOCAB_AXIS)
    return jnp.log(sums[0]) - sums[1]


class _Picked(NamedTuple):
    """Targets as this device has them."""

    place: jax.Array
    """Column of a target that is held, else 0."""
    held: jax.Array
    logit: jax.Array


def _picked(logits: jax.Array, targets: jax.Array) -> _Picked:
    local = targets - shard_offset(VOCAB_AXIS, logits.shape[-1])
    held = (local >= 0) & (local < logits.shape[-1])
    place = jnp.where(held, local, 0)
    return _Picked(place, held, jnp.take_along_axis(logits, place[..., None], -1, mode="clip")[..., 0])


@jax.checkpoint
def _sum_exp(logits: jax.Array, top: jax.Array) -> jax.Array:
    """Kept for the backward pass are the logits alone, not their exponentials."""
    return jnp.sum(jnp.exp(logits - top[..., None]), -1)


def masked(logits: jax.Array, used: int | None) -> jax.Array:
    """Logits split over `y` with those of entries from `used` on at minus infinity; as they are where it is None."""
    if used is None:
        return logits
    column = shard_offset(VOCAB_AXIS, logits.shape[-1]) + lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    return jnp.where(column < used, logits, jnp.asarray(-jnp.inf, logits.dtype))


def total_loss(h: jax.Array, projection: Projection, targets: jax.Array, weights: jax.Array | None = None) -> jax.Array:
    """Sum over all targets of their cross-entropy in nats, times `weights` where given.

    Shapes: `h` [..., hidden/Gx], `targets` and `weights` [...] -> a float32 scalar. Collectives: an all-reduce of the
    scores over `x` and those of `cross_entropy`; backward an all-reduce of dX over `y`. Where the logits are many
    (`tensor.chunks`) this runs a part of the tokens at a time, and computes a part's gradients beside its losses:
    of the logits nothing is kept and nothing computed again. Such gradients are for a sum: hence the scalar.
    """
    h = vary(h, (VOCAB_AXIS,))
    rows, targets = h.reshape(-1, h.shape[-1]), targets.reshape(-1)
    weights = None if weights is None else lax.stop_gradient(weights).astype(jnp.float32).reshape(-1)
    chunk = loss_chunk(rows.shape[0], projection.columns)
    if chunk == rows.shape[0]:
        return _summed(cross_entropy(_scores(rows, projection), targets), weights)
    # As they vary, so must their gradients, of which nothing is reduced here.
    axes = compat.varying_axes(rows) | compat.varying_axes(projection.weight) | compat.varying_axes(targets)
    how = _How(chunk, *projection[1:])
    return _chunked(vary(rows, axes), vary(projection.weight, axes), targets, weights, how)


def _summed(losses: jax.Array, weights: jax.Array | None) -> jax.Array:
    return jnp.sum(losses if weights is None else losses * weights)


def _scores(rows: jax.Array, projection: Projection) -> jax.Array:
    """Logits [tokens, vocab/Gy] of [tokens, hidden/Gx]; collective: an all-reduce over `x`."""
    found = matmul(rows, projection.weight, projection.layouts, turned=projection.turned)
    return masked(reduce_sum(found, FEATURE_AXIS), projection.used)


class _How(NamedTuple):
    """What is static of a chunked loss."""

    chunk: int
    turned: bool
    layouts: MatmulLayouts
    used: int | None


Tokens = tuple[jax.Array, jax.Array, jax.Array | None]
"""Rows, targets and weights of some tokens."""


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _chunked(rows: jax.Array, weight: jax.Array, targets: jax.Array, weights: jax.Array | None, how: _How) -> jax.Array:
    projection = Projection(weight, *how[1:])

    def add(total: jax.Array, part: Tokens) -> tuple[jax.Array, tuple[()]]:
        rows, targets, weights = part
        return total + _summed(cross_entropy(_scores(rows, projection), targets), weights), ()

    return _loop(add, _zero(rows), (rows, targets, weights), how.chunk)[0]


Gradients = tuple[jax.Array, jax.Array]
"""Of rows, and in float32 of the weight."""


def _forward(
    rows: jax.Array, weight: jax.Array, targets: jax.Array, weights: jax.Array | None, how: _How
) -> tuple[jax.Array, Gradients]:
    """The sum and its gradients."""
    projection = Projection(weight, *how[1:])

    def add(carry: tuple[jax.Array, jax.Array], part: Tokens) -> tuple[tuple[jax.Array, jax.Array], tuple[jax.Array]]:
        (total, d_weight), (rows, targets, weights) = carry, part
        loss, d_logits = _with_gradient(_scores(rows, projection), targets, weights)
        d_logits = d_logits.astype(rows.dtype)
        d_rows = matmul(d_logits, weight, turned=not how.turned)
        left, right = (d_logits, rows) if how.turned else (rows, d_logits)
        found = lax.dot_general(left, right, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32)
        return (total + loss, d_weight + found), (d_rows,)

    start = (_zero(rows), vary(jnp.zeros(weight.shape, jnp.float32), compat.varying_axes(weight)))
    (total, d_weight), (d_rows,) = _loop(add, start, (rows, targets, weights), how.chunk)
    return total, (d_rows, d_weight)


def _with_gradient(logits: jax.Array, targets: jax.Array, weights: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """The sum over [tokens, vocab/Gy] logits and its gradient; collectives as for `cross_entropy`."""
    logits = logits.astype(jnp.float32)
    top = reduce_max(jnp.max(logits, -1), VOCAB_AXIS)
    exponentials = jnp.exp(logits - top[:, None])
    picked = _picked(logits, targets)
    here = jnp.stack([jnp.sum(exponentials, -1), jnp.where(picked.held, picked.logit - top, 0.0)])
    sums = reduce_sum(here, VOCAB_AXIS)
    target = picked.held[:, None] & (lax.broadcasted_iota(jnp.int32, logits.shape, 1) == picked.place[:, None])
    d_logits = exponentials / sums[0][:, None] - target.astype(jnp.float32)
    loss = _summed(jnp.log(sums[0]) - sums[1], weights)
    return loss, d_logits if weights is None else d_logits * weights[:, None]


def _backward(how: _How, gradients: Gradients, g: jax.Array) -> tuple[jax.Array | None, ...]:
    d_rows, d_weight = gradients
    return (d_rows.astype(jnp.float32) * g).astype(d_rows.dtype), (d_weight * g).astype(d_rows.dtype), None, None


_chunked.defvjp(_forward, _backward)


def _zero(rows: jax.Array) -> jax.Array:
    """A sum of losses that has nothing yet: the same along the axes that losses are summed over."""
    return vary(jnp.zeros((), jnp.float32), compat.varying_axes(rows) - {VOCAB_AXIS, FEATURE_AXIS})


def _loop(f: Callable[[Any, Tokens], tuple[Any, Any]], carry: Any, tokens: Tokens, chunk: int) -> tuple[Any, Any]:
    """`lax.scan` of `f` over parts of `chunk` tokens; the last part may have fewer."""
    count = tokens[0].shape[0]
    whole = count // chunk * chunk
    parts = jax.tree.map(lambda a: a[:whole].reshape(-1, chunk, *a.shape[1:]), tokens)
    carry, found = lax.scan(f, carry, parts)
    found = jax.tree.map(lambda a: a.reshape(whole, *a.shape[2:]), found)
    if whole == count:
        return carry, found
    carry, rest = f(carry, jax.tree.map(lambda a: a[whole:], tokens))
    return carry, jax.tree.map(lambda a, b: jnp.concatenate([a, b]), found, rest)
