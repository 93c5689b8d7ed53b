"""Sums of losses over the rows of a batch that count, and rows that only fill a batch up."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

NO_TARGET = -1
"""The targets of a row that fills a batch up."""


def counted_sum(losses: jax.Array, batch: jax.Array, vocab: int | None) -> jax.Array:
    """The sum of the losses [rows, ...] of those rows of a batch [rows, seq + 1] that have targets; no collectives.

    A row that has none, all of its targets being negative, adds nothing. In any other an id that is not in the
    vocabulary (None: any is) makes the sum NaN, on every grid, whatever the layers make of such an id.
    """
    counted = jnp.any(batch[:, 1:] >= 0, axis=1)
    if vocab is not None:
        known = jnp.all((batch >= 0) & (batch < vocab), axis=1)
        losses = jnp.where(_along(known, losses), losses, jnp.nan)
    return jnp.sum(jnp.where(_along(counted, losses), losses, 0.0))


def filled_up(batch: np.ndarray, rows: int) -> np.ndarray:
    """The batch with rows behind it that do not count, up to so many."""
    filling = np.zeros((rows - len(batch), *batch.shape[1:]), batch.dtype)
    return np.concatenate([batch, without_targets(filling, np.ones(len(filling), bool))])


def without_targets(batch: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """The batch, of which some rows, a mask, no longer count."""
    targets = np.where(rows[:, None], np.array(NO_TARGET, batch.dtype), batch[:, 1:])
    return np.concatenate([batch[:, :1], targets], axis=1)


def samples_in(batch: np.ndarray) -> int:
    """The number of rows that count."""
    return int(np.any(batch[:, 1:] >= 0, axis=1).sum())


def vocabulary(model: Any) -> int | None:
    """The number of token ids that a model knows; None where it does not tell."""
    return getattr(getattr(model, "shape", None), "vocab", None)


def _along(rows: jax.Array, losses: jax.Array) -> jax.Array:
    return rows.reshape(-1, *(1,) * (losses.ndim - 1))
