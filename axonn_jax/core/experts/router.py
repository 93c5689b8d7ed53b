"""Router of a mixture of experts: scores, top-k choices and their weights, and the load-balancing loss."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from axonn_jax.core.experts.load import counted, counting
from axonn_jax.core.experts.shape import ExpertShape
from axonn_jax.core.tensor.collectives import FEATURE_AXIS, SEQUENCE_AXIS, all_reduce, axis_size, local_sequence
from axonn_jax.core.tensor.params import constant_param, normal_param

CHOICES = "expert_choices"
"""Checkpoint name of the choices. Every activation policy saves them, since a recomputed choice could differ."""


class Routing(NamedTuple):
    """Routing of tokens [tokens, hidden] to experts."""

    choices: jax.Array
    """Expert indices [tokens, k], int32; padding has the index `experts`, which is out of range."""
    weights: jax.Array
    """Weight of each chosen expert's output [tokens, k], float32."""
    shares: jax.Array
    """Normalized scores [tokens, experts], float32, for the balance loss."""

    def padded(self, count: int, experts: int) -> "Routing":
        """Return the routing with `count` padding tokens appended, which choose no expert."""
        choices = jnp.pad(self.choices, ((0, count), (0, 0)), constant_values=experts)
        return Routing(choices, *(jnp.pad(a, ((0, count), (0, 0))) for a in (self.weights, self.shares)))


class Packing(NamedTuple):
    """Text mask and target counts of a device's rows; not split over `y`, even if the sequence is."""

    text: jax.Array
    """True for tokens of documents that have at least one target, [rows, seq]; everything else is padding."""
    targets: jax.Array
    """Number of counted targets of each row, [rows] float32."""

    def local_text(self, *, sequence_split: bool) -> jax.Array:
        """Return the mask of this device's tokens, [rows, seq/Gy] if the sequence is split; no collectives."""
        return local_sequence(self.text, 1) if sequence_split else self.text


class Gate(nnx.Module):
    """Router projection. The kernel is replicated along `y` and `z`; scores are computed in float32."""

    def __init__(self, hidden: int, moe: ExpertShape, *, std: float, key: jax.Array):
        self.moe = moe
        self.kernel = normal_param(key, (hidden, moe.experts), std, P(FEATURE_AXIS, None), role="router")
        # Added to scores for selection only (DeepSeek-V3). Not trained by the loss: see `experts.load`.
        self.bias = constant_param((moe.experts,), 0.0, P(), role="load")

    def __call__(self, x: jax.Array, text: jax.Array | None = None) -> Routing:
        """Route tokens [tokens, hidden/Gx]; those outside the mask `text` [tokens] choose no expert.

        Collectives: an all-reduce over `x` of 4 bytes per token and expert.
        """
        scores = x.astype(jnp.float32) @ self.kernel.get_value().astype(jnp.float32)
        bias = self.bias.get_value()
        routing = route(all_reduce(scores, FEATURE_AXIS), bias.astype(jnp.float32), self.moe)
        if text is not None:
            routing = routing._replace(choices=jnp.where(text[:, None], routing.choices, self.moe.experts))
        return routing._replace(weights=counting(routing.weights, bias, routing.choices))


def route(scores: jax.Array, bias: jax.Array, moe: ExpertShape) -> Routing:
    """Return the routing for scores [tokens, experts] float32 and bias [experts]; no collectives.

    An expert's gate is the softmax over all experts, or the sigmoid, of its score. The k experts with the largest gate
    plus bias are chosen, within the groups whose best two experts have the largest sums. With `moe.norm` the weights of
    a token's choices are normalized to sum to 1; all weights are multiplied by `moe.scale`. Sources: Mixtral (arXiv
    2401.04088) section 2.1, DeepSeek-V3 (arXiv 2412.19437) section 2.1.2.
    """
    # Normalize in log space: the gates of all chosen experts may underflow to zero, and 0/0 is NaN.
    logs = scores if moe.router == "softmax" else jax.nn.log_sigmoid(scores)
    shares = jax.nn.softmax(logs, axis=-1)
    gates = shares if moe.router == "softmax" else jax.nn.sigmoid(scores)
    ranked = _mask_groups(lax.stop_gradient(gates) + bias, moe)
    _, choices = lax.top_k(lax.stop_gradient(ranked), moe.per_token)
    choices = checkpoint_name(choices.astype(jnp.int32), CHOICES)
    weights = jnp.take_along_axis(logs if moe.norm else gates, choices, axis=-1)
    if moe.norm:
        weights = jax.nn.softmax(weights, axis=-1)
    return Routing(choices, weights * moe.scale, shares)


def _mask_groups(ranked: jax.Array, moe: ExpertShape) -> jax.Array:
    if moe.groups == 1:
        return ranked
    groups = ranked.reshape(-1, moe.groups, moe.experts // moe.groups)
    best, _ = lax.top_k(groups, 2)
    _, best_groups = lax.top_k(jnp.sum(best, axis=-1), moe.groups_kept)
    mask = jnp.any(jnp.arange(moe.groups)[None, :, None] == best_groups[:, None, :], axis=-1)
    return jnp.where(mask[..., None], groups, -jnp.inf).reshape(ranked.shape)


def balance_loss(
    routing: Routing, moe: ExpertShape, sequences: int, packing: Packing | None = None, *, sequence_split: bool
) -> jax.Array:
    """Return the balance loss summed over the targets of local sequences, a float32 scalar; 1 per target if balanced.

    The loss of a sequence is `sum over experts of f P`, where f is the expert's share of the sequence's choices times
    the number of experts, and P the mean of its normalized scores (DeepSeek-V3, arXiv 2412.19437, eq. 17 to 20; over
    all tokens of a batch this is Switch's, arXiv 2101.03961, eq. 4). Padding does not count.

    Collectives: if the sequence is split, an all-reduce over `y` of 8 bytes per sequence and expert.
    """
    # Per sequence rather than per batch, so that the loss depends neither on the grid nor on microbatches.
    counts = counted(routing.choices.reshape(sequences, -1), moe.experts)
    tokens = jnp.float32(routing.choices.shape[0] // sequences * (axis_size(SEQUENCE_AXIS) if sequence_split else 1))
    shares = routing.shares.reshape(sequences, -1, moe.experts)
    targets = tokens
    if packing is not None:
        text = packing.local_text(sequence_split=sequence_split)
        shares = jnp.where(text[..., None], shares, 0.0)
        # At least 1: a row of padding alone must give 0, not 0/0.
        tokens = jnp.maximum(jnp.sum(packing.text, axis=1, dtype=jnp.float32), 1.0)[:, None]
        targets = packing.targets[:, None]
    shares = jnp.sum(shares, axis=1)
    if sequence_split:
        counts, shares = all_reduce(jnp.stack([counts, shares]), SEQUENCE_AXIS)
    often = counts * (moe.experts / (moe.per_token * tokens))
    return jnp.sum(often * shares * (targets / tokens))
