"""Arrays of a batch that have no rows, as a graph's edges."""

from dataclasses import dataclass
from typing import Any

import jax
from jax.tree_util import register_dataclass


@register_dataclass
@dataclass(frozen=True)
class Replicated:
    """Arrays of a batch that have no rows: every device gets them whole."""

    value: Any


def replicated(array: Any) -> Replicated:
    """Mark an array of a `Trainer`'s batch as one without rows, such as a graph's edges or a number.

    Args:
        array: The array, or a tree of arrays, the same in every process; the loss gets it as it is.
    """
    return Replicated(array)


def is_replicated(leaf: Any) -> bool:
    """True if a node of a batch is marked by `replicated`."""
    return isinstance(leaf, Replicated)


def values_of(batch: Any) -> Any:
    """Return a batch as a loss takes it, without marks."""
    return jax.tree.map(lambda leaf: leaf.value if is_replicated(leaf) else leaf, batch, is_leaf=is_replicated)
