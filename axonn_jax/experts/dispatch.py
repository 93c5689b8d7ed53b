"""Dispatch of tokens to the devices of their experts, and the way back, on local shards.

Tokens are split over `expert`, features over `x`, a split sequence over `y`. Every device computes its own experts,
each with a part of the inner features (over `y` and `x`), for all choosing tokens of its `expert`, `y` and `x`: tokens
are gathered, and results reduce-scattered. No token is dropped.
"""

import jax
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from axonn_jax.experts.router import Routing
from axonn_jax.tensor.collectives import (
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

EXPERT_AXIS = "expert"
TOKENS = "tokens"
"""First word of the names of collectives on tokens."""


def drops_duplicates(sequence_split: bool) -> bool:
    """Return True if the devices along `y`, which have the same tokens, each send a part.

    Duplicate token dropping (TED, Singh et al., ICS 23, section 5.1). Where nothing is sent there are no duplicates.
    """
    return not sequence_split and axis_size(EXPERT_AXIS) > 1 and axis_size(SEQUENCE_AXIS) > 1


def gather_tokens(x: jax.Array, routing: Routing, *, sequence_split: bool) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Tokens [tokens, hidden/Gx], their choices and weights -> the same of all tokens of `expert`, whole features.

    Collectives: all-gathers over `expert` and `y`, and of the features over `x`. Bytes a device on a ring, with t
    tokens of h bytes and k choices on each: over `expert` `(G-1) t (h + 8 k)`, of t/Gy tokens where duplicates are
    dropped; then over `y` `(Gy-1)/Gy` of the gathered bytes, where duplicates are dropped or the sequence is split;
    over `x` `(Gx-1)/Gx` of the tokens with all features.
    """
    choices, weights = routing.choices, routing.weights
    dropped = drops_duplicates(sequence_split)
    if dropped:
        x, choices, weights = drop(x), local_sequence(choices, 0), drop(weights)

    def everyone(part: jax.Array) -> jax.Array:
        part = gather_over(part, EXPERT_AXIS, 0, TOKENS)
        if dropped or sequence_split:
            return gather_over(part, SEQUENCE_AXIS, 0, TOKENS)
        return mark_varying(part, (SEQUENCE_AXIS,))

    return gather_features(everyone(x)), everyone(choices), everyone(weights)


def scatter_tokens(sums: jax.Array, *, sequence_split: bool) -> jax.Array:
    """Partial sums of all tokens of `expert` [tokens, hidden] -> sums of a device's own [tokens/G, hidden/Gx].

    Collectives: reduce-scatters over `x`, `y` and `expert`, with the bytes of the gathers; where duplicates were
    dropped an all-gather over `y` behind, and where they stayed (one group of experts) an all-reduce over `y`.
    """
    sums = scatter_features(sums)
    dropped = drops_duplicates(sequence_split)
    over_y = sequence_split or dropped
    sums = scatter_over(sums, SEQUENCE_AXIS, 0, TOKENS) if over_y else all_reduce(sums, SEQUENCE_AXIS)
    sums = scatter_over(sums, EXPERT_AXIS, 0, TOKENS)
    return undrop(sums) if dropped else sums


# The stream is the same along `y`. Autodiff would make all-reduces of both ways back; each is the other's.
@jax.custom_vjp
def drop(x: jax.Array) -> jax.Array:
    """Return this device's part of tokens common to devices along `y`; back, an all-gather over `y`."""
    return local_sequence(x, 0)


@jax.custom_vjp
def undrop(x: jax.Array) -> jax.Array:
    """All-gather the parts of the tokens over `y`; the gradient is the own part."""
    return _all(x)


def _all(x: jax.Array) -> jax.Array:
    gathered = checkpoint_name(lax.all_gather(x, SEQUENCE_AXIS, axis=0, tiled=True), "tokens_all_gather")
    return assume_replicated(gathered, (SEQUENCE_AXIS,))


drop.defvjp(lambda x: (local_sequence(x, 0), None), lambda _, dy: (_all(dy),))
undrop.defvjp(lambda x: (_all(x), None), lambda _, dy: (local_sequence(dy, 0),))
