"""Cross-entropy over a sharded vocabulary.

Logits are never gathered, and only a part of them exists in float32 at a time.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from axonn_jax.core import compat
from axonn_jax.core.backend.workarounds import depend_on
from axonn_jax.core.tensor.collectives import FEATURE_AXIS, all_reduce, all_reduce_max, mark_varying, shard_offset
from axonn_jax.core.tensor.elementwise import capped
from axonn_jax.core.tensor.kernel_choice import loss_chunk
from axonn_jax.core.tensor.linear import matmul

Carry = TypeVar("Carry")
Results = TypeVar("Results")

VOCAB_AXIS = "y"


class Projection(NamedTuple):
    """Projection of the stream onto the vocabulary; all fields but the weight are static."""

    weight: jax.Array
    """[hidden/Gx, vocab/Gy], or if `turned` (a tied table) [vocab/Gy, hidden/Gx]; gathered over `z`."""
    turned: bool = False
    used: int | None = None
    """Size of the vocabulary if the weight is padded; padding has logits of minus infinity. None without padding."""
    cap: float = 0.0
    """Soft cap of logits (`elementwise.capped`); 0 for none."""

    @property
    def columns(self) -> int:
        """Number of logits per token on this device."""
        return int(self.weight.shape[0 if self.turned else 1])


def cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Return the negative log-likelihood of each target in nats, from logits split over `y`.

    Collectives over `y`: an all-reduce (max) of one number per token and an all-reduce (sum) of two numbers per token.
    Source: Megatron-LM's vocabulary-parallel loss.

    Args:
        logits: [..., vocab/Gy].
        targets: Global ids [...].

    Returns:
        [...] float32.
    """
    logits = logits.astype(jnp.float32)
    top = all_reduce_max(lax.stop_gradient(jnp.max(logits, -1)), VOCAB_AXIS)
    total = jnp.sum(jnp.exp(logits - top[..., None]), -1)
    picked = _picked(logits, targets)
    sums = all_reduce(jnp.stack([total, jnp.where(picked.is_local, picked.logit - top, 0.0)]), VOCAB_AXIS)
    return jnp.log(sums[0]) - sums[1]


class _Picked(NamedTuple):
    """Targets within this device's shard of the vocabulary."""

    place: jax.Array
    """Local column of a target, 0 if it lies in another shard."""
    is_local: jax.Array
    logit: jax.Array


def _picked(logits: jax.Array, targets: jax.Array) -> _Picked:
    local = targets - shard_offset(VOCAB_AXIS, logits.shape[-1])
    is_local = (local >= 0) & (local < logits.shape[-1])
    place = jnp.where(is_local, local, 0)
    return _Picked(place, is_local, jnp.take_along_axis(logits, place[..., None], -1, mode="clip")[..., 0])


def masked(logits: jax.Array, used: int | None) -> jax.Array:
    """Return logits split over `y`, with minus infinity from entry `used` on; unchanged if `used` is None."""
    if used is None:
        return logits
    column = shard_offset(VOCAB_AXIS, logits.shape[-1]) + lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    return jnp.where(column < used, logits, jnp.asarray(-jnp.inf, logits.dtype))


def total_loss(h: jax.Array, projection: Projection, targets: jax.Array, weights: jax.Array | None = None) -> jax.Array:
    """Return the sum of the targets' cross-entropies in nats, optionally weighted.

    The forward pass computes gradients together with the losses, in chunks of tokens if there are many logits
    (`loss_chunk`), so logits are neither stored nor recomputed. Collectives: an all-reduce of the logits over `x` and
    those of `cross_entropy`; backward an all-reduce of dX over `y`.

    Args:
        h: [..., hidden/Gx].
        projection: Projection onto the vocabulary.
        targets: Global ids [...].
        weights: Factors [...]; None for 1.

    Returns:
        A float32 scalar.
    """
    h = mark_varying(h, (VOCAB_AXIS,))
    rows, targets = h.reshape(-1, h.shape[-1]), targets.reshape(-1)
    weights = None if weights is None else lax.stop_gradient(weights).astype(jnp.float32).reshape(-1)
    chunk = loss_chunk(rows.shape[0], projection.columns)
    # Gradients from the custom VJP vary like the inputs, so mark all inputs varying over the same axes: nothing is
    # reduced here, the callers' autodiff does that.
    axes = compat.varying_axes(rows) | compat.varying_axes(projection.weight) | compat.varying_axes(targets)
    tokens = mark_varying(rows, axes), targets, weights
    return _chunked(mark_varying(projection.weight, axes), tokens, chunk, projection[1:])


def _summed(losses: jax.Array, weights: jax.Array | None) -> jax.Array:
    return jnp.sum(losses if weights is None else losses * weights)


def _logits(rows: jax.Array, projection: Projection) -> jax.Array:
    """Return logits [tokens, vocab/Gy] of [tokens, hidden/Gx]; collective: an all-reduce over `x`."""
    return masked(capped(_products(rows, projection), projection.cap), projection.used)


def _products(rows: jax.Array, projection: Projection) -> jax.Array:
    """Return logits before capping and masking."""
    partial_sums = matmul(rows, projection.weight, turned=projection.turned)
    return all_reduce(partial_sums, FEATURE_AXIS)


Tokens = tuple[jax.Array, jax.Array, jax.Array | None]
"""Rows, targets and weights of a chunk of tokens."""


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _chunked(weight: jax.Array, tokens: Tokens, chunk: int, fields: tuple[Any, ...]) -> jax.Array:
    """Return the sum of losses, `chunk` tokens at a time; `fields` are the projection's fields after its weight."""
    projection = Projection(weight, *fields)

    def add(total: jax.Array, part: Tokens) -> tuple[jax.Array, tuple[()]]:
        rows, targets, weights = part
        return total + _summed(cross_entropy(_logits(rows, projection), targets), weights), ()

    return _loop(add, _zero(tokens[0]), tokens, chunk)[0]


Gradients = tuple[jax.Array, jax.Array]
"""Gradients of the rows and, in float32, of the weight."""


def _forward(weight: jax.Array, tokens: Tokens, chunk: int, fields: tuple[Any, ...]) -> tuple[jax.Array, Gradients]:
    # A sum has a scalar cotangent, so the backward pass only scales the gradients computed here.
    projection = Projection(weight, *fields)

    def add(carry: tuple[jax.Array, jax.Array], part: Tokens) -> tuple[tuple[jax.Array, jax.Array], tuple[jax.Array]]:
        (total, d_weight), (rows, targets, weights) = carry, part
        logits, uncapped = jax.vjp(lambda products: capped(products, projection.cap), _products(rows, projection))
        loss, d_logits = _with_gradient(masked(logits, projection.used), targets, weights)
        (d_logits,) = uncapped(d_logits.astype(logits.dtype))
        d_rows = matmul(d_logits, weight, turned=not projection.turned)
        lhs, rhs = (d_logits, rows) if projection.turned else (rows, d_logits)
        d_part = lax.dot_general(lhs, rhs, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32)
        return (total + loss, d_weight + d_part), (d_rows,)

    start = (_zero(tokens[0]), mark_varying(jnp.zeros(weight.shape, jnp.float32), compat.varying_axes(weight)))
    (total, d_weight), (d_rows,) = _loop(add, start, tokens, chunk)
    # Without this order XLA would postpone the weight's gradient past the layers' backward passes and keep the logits'
    # gradient alive until then.
    return total, (depend_on(d_rows, d_weight), d_weight)


def _with_gradient(logits: jax.Array, targets: jax.Array, weights: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """Return the sum of losses for [tokens, vocab/Gy] logits and its gradient; collectives as for `cross_entropy`."""
    logits = logits.astype(jnp.float32)
    top = all_reduce_max(jnp.max(logits, -1), VOCAB_AXIS)
    exponentials = jnp.exp(logits - top[:, None])
    picked = _picked(logits, targets)
    local_sums = jnp.stack([jnp.sum(exponentials, -1), jnp.where(picked.is_local, picked.logit - top, 0.0)])
    sums = all_reduce(local_sums, VOCAB_AXIS)
    target = picked.is_local[:, None] & (lax.broadcasted_iota(jnp.int32, logits.shape, 1) == picked.place[:, None])
    d_logits = exponentials / sums[0][:, None] - target.astype(jnp.float32)
    loss = _summed(jnp.log(sums[0]) - sums[1], weights)
    return loss, d_logits if weights is None else d_logits * weights[:, None]


def _backward(chunk: int, fields: tuple[object, ...], gradients: Gradients, g: jax.Array) -> tuple[object, ...]:
    d_rows, d_weight = gradients
    return (d_weight * g).astype(d_rows.dtype), ((d_rows.astype(jnp.float32) * g).astype(d_rows.dtype), None, None)


_chunked.defvjp(_forward, _backward)


def _zero(rows: jax.Array) -> jax.Array:
    # Losses come out of all-reduces over these two axes, so the carry of the scan must not vary over them either.
    return mark_varying(jnp.zeros((), jnp.float32), compat.varying_axes(rows) - {VOCAB_AXIS, FEATURE_AXIS})


def _loop(
    f: Callable[[Carry, Tokens], tuple[Carry, Results]], carry: Carry, tokens: Tokens, chunk: int
) -> tuple[Carry, Results]:
    """Scan `f` over chunks of `chunk` tokens; the last chunk may be shorter."""
    count = tokens[0].shape[0]
    if count == chunk:
        return f(carry, tokens)
    divided = count // chunk * chunk
    parts = jax.tree.map(lambda a: a[:divided].reshape(-1, chunk, *a.shape[1:]), tokens)
    carry, results = lax.scan(f, carry, parts)
    results = jax.tree.map(lambda a: a.reshape(divided, *a.shape[2:]), results)
    if divided == count:
        return carry, results
    carry, tail = f(carry, jax.tree.map(lambda a: a[divided:], tokens))
    return carry, jax.tree.map(lambda a, b: jnp.concatenate([a, b]), results, tail)
