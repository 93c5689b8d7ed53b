"""Metrics that a loss returns, and their combination over parts of a batch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import register_dataclass

from axonn_jax.core.engines.engine import mean_by_count
from axonn_jax.core.errors import UserError

Weight = Callable[[Any], Any]
"""Function of a batch that returns the number of items its mean loss averages over."""


@register_dataclass
@dataclass(frozen=True)
class Total:
    """A metric that adds up over the rows."""

    value: Any


def total(value: Any) -> Total:
    """Mark a number that a `Trainer`'s loss returns as one to be added up over the rows of a batch, not averaged.

    Args:
        value: The sum over the rows that the loss has, a scalar.
    """
    return Total(value)


def part_weights(weight: Weight | None, batch_of: Callable[[Any], Any], rows: list[jax.Array], parts: int) -> jax.Array:
    """Return the number of items that the mean loss of every part averages over.

    Args:
        weight: Function of a part's batch; None counts its rows.
        batch_of: Function from a part's rows to its batch.
        rows: Arrays whose first `parts` axes index the parts.
        parts: Number of axes that index parts.

    Returns:
        Float32 weights, shaped like the axes of the parts.

    Raises:
        UserError: `weight` returns something other than a scalar.
    """
    if weight is None:
        return jnp.full(rows[0].shape[:parts], rows[0].shape[parts], jnp.float32)

    def weigh(rows: Any) -> jax.Array:
        value = weight(batch_of(rows))
        if jnp.shape(value) != ():
            raise UserError("weight", f"an array of shape {jnp.shape(value)}", "a function that returns a number")
        return jnp.asarray(value, jnp.float32)

    for _ in range(parts):
        weigh = jax.vmap(weigh)
    return weigh(rows)


def means(results: Sequence[tuple[Any, Any, Any]]) -> tuple[float, Any]:
    """Combine the results of several batches of an evaluation.

    Args:
        results: For every batch, its mean loss, the number of items it averages over, and its metrics.

    Returns:
        The mean loss, and the mean or the total of every metric.

    Raises:
        UserError: The counts add up to 0.
    """
    counts = [float(count) for _, count, _ in results]

    def mean(*values: Any) -> float:
        if is_total(values[0]):
            return sum(float(result.value) for result in values)
        return mean_by_count(values, counts)

    numbers = [result for _, _, result in results]
    return mean(*(loss for loss, _, _ in results)), jax.tree.map(mean, *numbers, is_leaf=is_total)


def is_total(leaf: Any) -> bool:
    """Return whether a node of a tree of metrics is marked by `total`."""
    return isinstance(leaf, Total)


def averaged(share: Any, aux: Any) -> Any:
    """Return a part's contribution to every metric of the batch.

    Args:
        share: The part's share of a mean.
        aux: Metrics of the part.

    Raises:
        UserError: A metric is not a scalar.
    """
    return jax.tree.map(partial(_number, share), aux, is_leaf=is_total)


def _number(share: Any, leaf: Any) -> Any:
    value = leaf.value if isinstance(leaf, Total) else leaf
    if jnp.shape(value) != ():
        accepted = "numbers, averaged as the loss is: take a mean over the rows, or ax.total(sum)"
        raise UserError("loss", f"an array of shape {jnp.shape(value)} beside the loss", accepted)
    number = jnp.asarray(value, jnp.float32)
    return Total(number) if isinstance(leaf, Total) else share_of(number, share)


def share_of(value: jax.Array, share: jax.Array) -> jax.Array:
    """Return a part's contribution to a mean: 0 for a part without items, whose mean may be NaN."""
    return jnp.where(share != 0, value * share, 0)
