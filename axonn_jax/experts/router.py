"""Router of a mixture of experts: a token's scores, choices and their weights, and the loss that evens choices out."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from axonn_jax.experts.load import counted, counting
from axonn_jax.experts.shape import ExpertShape
from axonn_jax.tensor.collectives import FEATURE_AXIS, SEQUENCE_AXIS, all_reduce, axis_size, local_sequence
from axonn_jax.tensor.params import constant_param, normal_param

CHOICES = "expert_choices"
"""Name of the choices, which every activation policy keeps: computed again, a choice could differ."""


class Routing(NamedTuple):
    """Routing of tokens [tokens, hidden] to experts."""

    choices: jax.Array
    """Expert numbers [tokens, k], int32; for padding the number of experts, which is no expert."""
    weights: jax.Array
    """Factor of each chosen expert's result [tokens, k], float32."""
    shares: jax.Array
    """Normalised scores of the tokens [tokens, experts], float32, for balancing."""

    def padded(self, count: int, experts: int) -> "Routing":
        """Return the routing with `count` more tokens, which choose none of the `experts`."""
        choices = jnp.pad(self.choices, ((0, count), (0, 0)), constant_values=experts)
        return Routing(choices, *(jnp.pad(a, ((0, count), (0, 0))) for a in (self.weights, self.shares)))


class Packing(NamedTuple):
    """Text and targets of a device's rows; every device along `y` has whole rows."""

    text: jax.Array
    """True for tokens of documents of which any token is trained on, [rows, seq]; all else is padding."""
    targets: jax.Array
    """Number of counted targets of each row, [rows] float32."""

    def here(self, *, sequence_split: bool) -> jax.Array:
        """`text` of the tokens of this device, [rows, seq/Gy] where the sequence is split; no collectives."""
        return local_sequence(self.text, 1) if sequence_split else self.text


class Gate(nnx.Module):
    """The router's matmul; the kernel is the same along `y` and `z`, and computed with in float32."""

    def __init__(self, hidden: int, moe: ExpertShape, *, std: float, key: jax.Array):
        self.moe = moe
        self.kernel = normal_param(key, (hidden, moe.experts), std, P(FEATURE_AXIS, None), role="router")
        self.bias = constant_param((moe.experts,), 0.0, P(), role="load")
        """Bias added to scores for the choice alone (DeepSeek-V3); not trained, its gradient is `experts.load`'s."""

    def __call__(self, x: jax.Array, text: jax.Array | None = None) -> Routing:
        """[tokens, hidden/Gx] -> the tokens' routing; tokens outside of `text` [tokens] (None: all inside) choose none.

        Collective: an all-reduce over `x` of 4 bytes a token and expert.
        """
        scores = x.astype(jnp.float32) @ self.kernel.get_value().astype(jnp.float32)
        bias = self.bias.get_value()
        routing = route(all_reduce(scores, FEATURE_AXIS), bias.astype(jnp.float32), self.moe)
        if text is not None:
            routing = routing._replace(choices=jnp.where(text[:, None], routing.choices, self.moe.experts))
        return routing._replace(weights=counting(routing.weights, bias, routing.choices))


def route(scores: jax.Array, bias: jax.Array, moe: ExpertShape) -> Routing:
    """Scores [tokens, experts] float32, bias [experts] -> choices and their weights; no collectives.

    A weight is the softmax over all experts, or the sigmoid, of the score. The k largest of weight + bias are chosen,
    of experts in the groups kept, which have the largest sums of their best two. With `moe.norm` weights are divided by
    their sum, then multiplied by `moe.scale`. Quotients are of logarithms, as weights may underflow to zero. Sources:
    Mixtral (arXiv 2401.04088) section 2.1, DeepSeek-V3 (arXiv 2412.19437) section 2.1.2.
    """
    logs = scores if moe.router == "softmax" else jax.nn.log_sigmoid(scores)
    shares = jax.nn.softmax(logs, axis=-1)
    gates = shares if moe.router == "softmax" else jax.nn.sigmoid(scores)
    ranked = _in_kept_groups(lax.stop_gradient(gates) + bias, moe)
    _, choices = lax.top_k(lax.stop_gradient(ranked), moe.per_token)
    choices = checkpoint_name(choices.astype(jnp.int32), CHOICES)
    weights = jnp.take_along_axis(logs if moe.norm else gates, choices, axis=-1)
    if moe.norm:
        weights = jax.nn.softmax(weights, axis=-1)
    return Routing(choices, weights * moe.scale, shares)


def _in_kept_groups(ranked: jax.Array, moe: ExpertShape) -> jax.Array:
    """Return ranking scores of the experts, minus infinity in dropped groups."""
    if moe.groups == 1:
        return ranked
    groups = ranked.reshape(-1, moe.groups, moe.experts // moe.groups)
    best, _ = lax.top_k(groups, 2)
    _, kept = lax.top_k(jnp.sum(best, axis=-1), moe.groups_kept)
    mask = jnp.any(jnp.arange(moe.groups)[None, :, None] == kept[:, None, :], axis=-1)
    return jnp.where(mask[..., None], groups, -jnp.inf).reshape(ranked.shape)


def balance_loss(
    routing: Routing, moe: ExpertShape, sequences: int, packing: Packing | None = None, *, sequence_split: bool
) -> jax.Array:
    """Sum over the targets of local sequences of the sequence's imbalance: a float32 scalar, 1 a target if even.

    A sequence's imbalance is `sum over experts of f P`: f an expert's share of the sequence's choices times the number
    of experts, P the mean of the tokens' shares of scores (DeepSeek-V3, arXiv 2412.19437, eq. 17 to 20; over all tokens
    of a batch this is Switch's, arXiv 2101.03961, eq. 4). The sum depends on no other sequence, so neither on the grid
    nor on microbatches. Padding counts nothing. Collective: where the sequence is split, an all-reduce over `y` of 8
    bytes a sequence and expert.
    """
    counts = counted(routing.choices.reshape(sequences, -1), moe.experts)
    tokens = jnp.float32(routing.choices.shape[0] // sequences * (axis_size(SEQUENCE_AXIS) if sequence_split else 1))
    shares = routing.shares.reshape(sequences, -1, moe.experts)
    targets = tokens
    if packing is not None:
        text = packing.here(sequence_split=sequence_split)
        shares = jnp.where(text[..., None], shares, 0.0)
        tokens = jnp.maximum(jnp.sum(packing.text, axis=1, dtype=jnp.float32), 1.0)[:, None]
        targets = packing.targets[:, None]
    shares = jnp.sum(shares, axis=1)
    if sequence_split:
        counts, shares = all_reduce(jnp.stack([counts, shares]), SEQUENCE_AXIS)
    often = counts * (moe.experts / (moe.per_token * tokens))
    return jnp.sum(often * shares * (targets / tokens))
