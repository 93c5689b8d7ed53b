"""Capacity-based dispatch (DeepSpeed-TED, Singh et al., ICS 23): fixed slots per expert, excess tokens dropped."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from axonn_jax.core import compat
from axonn_jax.core.experts.dispatch import EXPERT_AXIS, TOKENS, drop, drops_duplicates, undrop
from axonn_jax.core.experts.router import Routing
from axonn_jax.core.experts.shape import slots_of
from axonn_jax.core.tensor.collectives import (
    SEQUENCE_AXIS,
    all_reduce,
    axis_size,
    gather_features,
    gather_over,
    local_sequence,
    mark_varying,
    scatter_features,
    scatter_over,
)


def by_capacity(
    x: jax.Array,
    routing: Routing,
    compute: Callable[[jax.Array], jax.Array],
    experts: int,
    capacity: float,
    *,
    sequence_split: bool,
) -> jax.Array:
    """Return the weighted sum of the experts' outputs for each token; a choice without a slot contributes zero.

    Which tokens are dropped depends on the grid, and so does the loss. Slots fill in token order, first choices before
    second ones. Sends less than `dispatch` when the `expert` axis is larger than the number of choices per token.

    Args:
        x: Local tokens, [tokens, hidden/Gx].
        routing: Choices and weights of the same tokens.
        compute: Maps slots [experts/G, slots, hidden] to partial sums of the same shape.
        experts: Number of experts in the layer.
        capacity: Slots of an expert over the mean number of tokens that choose it.
        sequence_split: True if `y` splits the sequence.

    Returns:
        An array shaped like `x`. Collectives, with s slots per expert: two all-to-alls over `expert` of `experts * s`
        rows of hidden/Gx, `(G-1)/G` of those bytes per device each; an all-gather and a reduce-scatter of the slots
        over `x`. Over `y`, an all-gather and a reduce-scatter of the slots if duplicates are dropped or the sequence is
        split (plus an all-gather of the results if duplicates are dropped), otherwise one all-reduce.
    """
    choices, weights = routing.choices, routing.weights
    dropped = drops_duplicates(sequence_split)
    if dropped:
        x, choices, weights = drop(x), local_sequence(choices, 0), drop(weights)
    count = slots_of(x.shape[0], choices.shape[1], experts, capacity)
    positions = _positions(choices, experts)
    sent = jnp.zeros((experts, count, x.shape[1]), x.dtype)
    sent = mark_varying(sent, compat.varying_axes(x))
    # A token never chooses an expert twice, so no slot is written twice and `set` needs no ordering. Positions beyond
    # the last slot are out of bounds: "drop" discards those tokens here, "fill" reads zeros for them below.
    for k in range(choices.shape[1]):
        sent = sent.at[choices[:, k], positions[:, k]].set(x, mode="drop")
    slots = _exchanged(sent, split=0, concat=1)
    over_y = dropped or sequence_split
    slots = gather_over(slots, SEQUENCE_AXIS, 1, TOKENS) if over_y else mark_varying(slots, (SEQUENCE_AXIS,))
    sums = scatter_features(compute(gather_features(slots)))
    sums = scatter_over(sums, SEQUENCE_AXIS, 1, TOKENS) if over_y else all_reduce(sums, SEQUENCE_AXIS)
    back = _exchanged(sums, split=1, concat=0)
    # Accumulate in float32, as `grouped_mlp` does.
    out = jnp.zeros(x.shape, jnp.float32)
    for k in range(choices.shape[1]):
        row = back.at[choices[:, k], positions[:, k]].get(mode="fill", fill_value=0)
        out = out + row * weights[:, k, None]
    out = out.astype(x.dtype)
    return undrop(out) if dropped else out


def _positions(choices: jax.Array, experts: int) -> jax.Array:
    """Return each choice's slot within its expert, [tokens, k]; a number beyond the slots means dropped."""
    tokens, k = choices.shape
    # Choice-major order, so that a token's second choice never takes a slot from another token's first.
    first_choices_first = choices.T.reshape(-1)
    selected = jax.nn.one_hot(first_choices_first, experts, dtype=jnp.int32)
    preceding = jnp.cumsum(selected, axis=0) - selected
    positions = jnp.take_along_axis(preceding, first_choices_first[:, None], axis=1, mode="clip")[:, 0]
    return positions.reshape(k, tokens).T


def _exchanged(x: jax.Array, *, split: int, concat: int) -> jax.Array:
    if axis_size(EXPERT_AXIS) == 1:
        return x
    moved = lax.all_to_all(x, EXPERT_AXIS, split_axis=split, concat_axis=concat, tiled=True)
    return checkpoint_name(moved, f"{TOKENS}_all_to_all")
