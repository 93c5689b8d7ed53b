"""Numbers beside a loss, and parts of their means and totals."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import register_dataclass

from axonn_jax.errors import UserError
from axonn_jax.train.engines.engine import mean_by_count

Weight = Callable[[Any], Any]
"""Function of a batch -> what its mean loss counts."""


@register_dataclass
@dataclass(frozen=True)
class Total:
    """A number beside a loss that adds up over the rows."""

    value: Any


def total(value: Any) -> Total:
    """Mark a number that a `Trainer`'s loss returns as one to be added up over the rows of a batch, not averaged.

    Args:
        value: The sum over the rows that the loss has, a scalar.
    """
    return Total(value)


def part_weights(weight: Weight | None, batch_of: Callable[[Any], Any], rows: list[jax.Array], parts: int) -> jax.Array:
    """Return what the mean loss of each part counts, by `weight` of its batch or else its rows.

    Parts are in the first `parts` dims of `rows`. Raises ``UserError`` for a weight that is no number.
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
    """Return the mean loss, and the means or totals of the numbers beside it, of evaluations (loss, count, numbers).

    Raises ``UserError`` where nothing counts.
    """
    counts = [float(count) for _, count, _ in results]

    def mean(*values: Any) -> float:
        if is_total(values[0]):
            return sum(float(each.value) for each in values)
        return mean_by_count(values, counts)

    numbers = [each for _, _, each in results]
    return mean(*(loss for loss, _, _ in results)), jax.tree.map(mean, *numbers, is_leaf=is_total)


def is_total(leaf: Any) -> bool:
    """True if a node of the numbers beside a loss is marked by `total`."""
    return isinstance(leaf, Total)


def averaged(share: Any, aux: Any) -> Any:
    """Return the numbers' parts of their means and totals; raises ``UserError`` for what is no number."""
    return jax.tree.map(partial(_number, share), aux, is_leaf=is_total)


def _number(share: Any, given: Any) -> Any:
    value = given.value if isinstance(given, Total) else given
    if jnp.shape(value) != ():
        accepted = "numbers, averaged as the loss is: take a mean over the rows, or ax.total(sum)"
        raise UserError("loss", f"an array of shape {jnp.shape(value)} beside the loss", accepted)
    number = jnp.asarray(value, jnp.float32)
    return Total(number) if isinstance(given, Total) else share_of(number, share)


def share_of(value: jax.Array, share: jax.Array) -> jax.Array:
    """Return a part's share of a mean: 0 where nothing in the part counts, whatever its value."""
    return jnp.where(share != 0, value * share, 0)
