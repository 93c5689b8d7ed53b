"""Runs with pruned weights that several tests compare."""

import grids
import numpy as np
import optax
import trainers
from trainers import ids, transformer
from trainers import params as params_of

import axonn_jax as ax

DENSITY = 0.25
PRUNE = ax.PruneConfig(density=DENSITY)
SHAPE = grids.LLAMA


def model(shape=SHAPE):
    return transformer(shape)


def optimizer():
    return optax.adamw(3e-3, weight_decay=0.1)


def batches(steps, shape=SHAPE):
    return ids(shape.vocab, steps, 8, shape.seq_len + 1)


def curve(trainer, steps, shape=SHAPE):
    found = trainers.curve(trainer, batches(steps, shape)), params_of(trainer)
    trainer.close()
    return found


def largest(value, count=None):
    """A mask by numpy: of so many of the largest magnitudes, of equal ones the first."""
    mask = np.zeros(value.size, bool)
    mask[np.argsort(-np.abs(value).reshape(-1), kind="stable")[: count or round(value.size * DENSITY)]] = True
    return mask.reshape(value.shape)
