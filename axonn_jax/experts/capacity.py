"""Dispatch with a capacity, as in the paper: all-to-alls of equally many tokens per expert; excess tokens are dropped.

The dropped tokens depend on the grid, and so does the loss. This way sends less than `dispatch` if `expert` is above
the choices of a token; DeepSpeed-TED (Singh et al., ICS 23) works so.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from axonn_jax import compat
from axonn_jax.experts.dispatch import EXPERT_AXIS, TOKENS, drop, drops_duplicates, undrop
from axonn_jax.experts.router import Routing
from axonn_jax.experts.shape import slots_of
from axonn_jax.tensor.collectives import (
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
    """Tokens [tokens, hidden/Gx] -> sums of the experts' outputs, zero for choices without a slot.

    `compute` gives partial sums of slots [experts/G, slots, hidden], in their shape. Slots fill in the order of the
    tokens, first choices before second ones. Collectives, with s slots an expert:
    all-to-alls over `expert` of `experts * s` rows of hidden/Gx there and back, bytes a device `(G-1)/G` of that; the
    slots' features gathered over `x` and reduce-scattered; where duplicates are dropped or the sequence is split, slots
    gathered over `y` and reduce-scattered, and results gathered over `y` behind (not with a split sequence); else an
    all-reduce over `y`.
    """
    choices, weights = routing.choices, routing.weights
    dropped = drops_duplicates(sequence_split)
    if dropped:
        x, choices, weights = drop(x), local_sequence(choices, 0), drop(weights)
    count = slots_of(x.shape[0], choices.shape[1], experts, capacity)
    positions = _positions(choices, experts)
    sent = jnp.zeros((experts, count, x.shape[1]), x.dtype)
    sent = mark_varying(sent, compat.varying_axes(x))
    for k in range(choices.shape[1]):  # a token's choices are of different experts: no slot is written twice
        sent = sent.at[choices[:, k], positions[:, k]].set(x, mode="drop")
    slots = _exchanged(sent, split=0, joined=1)
    over_y = dropped or sequence_split
    slots = gather_over(slots, SEQUENCE_AXIS, 1, TOKENS) if over_y else mark_varying(slots, (SEQUENCE_AXIS,))
    sums = scatter_features(compute(gather_features(slots)))
    sums = scatter_over(sums, SEQUENCE_AXIS, 1, TOKENS) if over_y else all_reduce(sums, SEQUENCE_AXIS)
    back = _exchanged(sums, split=1, joined=0)
    out = jnp.zeros(x.shape, jnp.float32)
    for k in range(choices.shape[1]):
        row = back.at[choices[:, k], positions[:, k]].get(mode="fill", fill_value=0)
        out = out + row * weights[:, k, None]
    out = out.astype(x.dtype)
    return undrop(out) if dropped else out


def _positions(choices: jax.Array, experts: int) -> jax.Array:
    """Return each choice's slot within its expert, [tokens, k]; a number beyond the slots means dropped."""
    tokens, k = choices.shape
    first_choices_first = choices.T.reshape(-1)
    chosen = jax.nn.one_hot(first_choices_first, experts, dtype=jnp.int32)
    before = jnp.cumsum(chosen, axis=0) - chosen
    positions = jnp.take_along_axis(before, first_choices_first[:, None], axis=1, mode="clip")[:, 0]
    return positions.reshape(k, tokens).T


def _exchanged(x: jax.Array, *, split: int, joined: int) -> jax.Array:
    if axis_size(EXPERT_AXIS) == 1:
        return x
    moved = lax.all_to_all(x, EXPERT_AXIS, split_axis=split, concat_axis=joined, tiled=True)
    return checkpoint_name(moved, f"{TOKENS}_all_to_all")
