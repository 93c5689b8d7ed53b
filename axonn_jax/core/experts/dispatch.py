"""Dropless dispatch: tokens are gathered to the devices of their experts and results reduce-scattered back."""

import jax
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from axonn_jax.core.experts.router import Routing
from axonn_jax.core.tensor.collectives import (
    SEQUENCE_AXIS,
    all_reduce,
    assume_replicated,
    axis_size,
    gather_features,
    gather_over,
    local_sequence,
    mark_varying,
    scatter_features,
    scatter_over,
)

# Local shards: tokens are split over `expert`, features over `x`, a split sequence over `y`. The experts are split over
# `expert` and their inner features over (`y`, `x`), so devices along `y` and `x` need the same tokens, all those that
# choose their experts.

EXPERT_AXIS = "expert"
TOKENS = "tokens"
"""Prefix of the checkpoint names of collectives on tokens."""


def drops_duplicates(sequence_split: bool) -> bool:
    """Return True if devices along `y`, which hold the same tokens, each send a different part of them.

    Duplicate token dropping (TED, Singh et al., ICS 23, section 5.1). With a single group of experts no token is sent,
    so there is nothing to drop.
    """
    return not sequence_split and axis_size(EXPERT_AXIS) > 1 and axis_size(SEQUENCE_AXIS) > 1


def gather_tokens(x: jax.Array, routing: Routing, *, sequence_split: bool) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gather tokens [tokens, hidden/Gx] with their choices and weights over `expert`, and their features over `x`.

    Returns:
        Tokens [all tokens, hidden], choices and weights [all tokens, k] of every device along `expert`. Collectives:
        all-gathers over `expert`, `y` and `x`. Bytes per device on a ring, with t tokens of h bytes and k choices per
        device: `(G-1) t (h + 8 k)` over `expert`, of t/Gy tokens if duplicates are dropped; `(Gy-1)/Gy` of the gathered
        bytes over `y` if duplicates are dropped or the sequence is split; `(Gx-1)/Gx` of the full tokens over `x`.
    """
    choices, weights = routing.choices, routing.weights
    dropped = drops_duplicates(sequence_split)
    if dropped:
        x, choices, weights = drop(x), local_sequence(choices, 0), drop(weights)

    def everyone(part: jax.Array) -> jax.Array:
        part = gather_over(part, EXPERT_AXIS, 0, TOKENS)
        if dropped or sequence_split:
            return gather_over(part, SEQUENCE_AXIS, 0, TOKENS)
        # Inner features are split over `y`, so the transpose has to sum the gradients there: an all-reduce.
        return mark_varying(part, (SEQUENCE_AXIS,))

    return gather_features(everyone(x)), everyone(choices), everyone(weights)


def scatter_tokens(sums: jax.Array, *, sequence_split: bool) -> jax.Array:
    """Reduce partial sums [all tokens, hidden] to the sums of this device's tokens, [tokens, hidden/Gx].

    Collectives: reduce-scatters over `x`, `y` and `expert` with the bytes of `gather_tokens`; a final all-gather over
    `y` if duplicates were dropped. With a single group of experts the reduction over `y` is an all-reduce.
    """
    sums = scatter_features(sums)
    dropped = drops_duplicates(sequence_split)
    over_y = sequence_split or dropped
    sums = scatter_over(sums, SEQUENCE_AXIS, 0, TOKENS) if over_y else all_reduce(sums, SEQUENCE_AXIS)
    sums = scatter_over(sums, EXPERT_AXIS, 0, TOKENS)
    return undrop(sums) if dropped else sums


# The residual stream is replicated along `y`. Autodiff would transpose both operations to all-reduces; each is exactly
# the other's transpose, at half the bytes.
@jax.custom_vjp
def drop(x: jax.Array) -> jax.Array:
    """Return this device's slice of tokens replicated along `y`; the backward pass all-gathers over `y`."""
    return local_sequence(x, 0)


@jax.custom_vjp
def undrop(x: jax.Array) -> jax.Array:
    """All-gather slices of tokens over `y`; the backward pass takes this device's slice of the gradient."""
    return _gather_slices(x)


def _gather_slices(x: jax.Array) -> jax.Array:
    gathered = checkpoint_name(lax.all_gather(x, SEQUENCE_AXIS, axis=0, tiled=True), "tokens_all_gather")
    return assume_replicated(gathered, (SEQUENCE_AXIS,))


drop.defvjp(lambda x: (local_sequence(x, 0), None), lambda _, dy: (_gather_slices(dy),))
undrop.defvjp(lambda x: (_gather_slices(x), None), lambda _, dy: (local_sequence(dy, 0),))
