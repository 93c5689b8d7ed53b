"""Which rows of a batch count, and rows that only fill a batch up."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

NO_TARGET = -1
"""The targets of a row that fills a batch up."""


def target_weights(batch: jax.Array, vocab: int | None) -> jax.Array:
    """What each target of a batch [rows, seq + 1] counts in a sum of losses, [rows, seq] float32; no collectives.

    Nothing in a row that has no targets, all of them being negative. In any other an id that is not in the vocabulary
    (None: any is) counts NaN, and so the sum is NaN on every grid, whatever the layers make of such an id.
    """
    counts = jnp.any(batch[:, 1:] >= 0, axis=1)
    known = jnp.bool_(True) if vocab is None else jnp.all((batch >= 0) & (batch < vocab), axis=1)
    weights = jnp.where(counts, jnp.where(known, 1.0, jnp.nan), 0.0).astype(jnp.float32)
    return jnp.broadcast_to(weights[:, None], batch[:, 1:].shape)


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
