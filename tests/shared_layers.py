"""Pipelines of which several stages use one layer: the cases, and the gradients that they must have."""

import functools

import grids
import jax
import numpy as np
import optax
import pytest
from flax import nnx
from trainers import make_trainer

import axonn_jax as ax
from axonn_jax import GridShape, PipelineConfig

MICROBATCHES, VOCAB, LAYERS = 6, 32, 12
BATCH = np.random.default_rng(0).integers(0, VOCAB, (MICROBATCHES * 2, 9))
TOLERANCE = 1e-6  # of a gradient's largest entry: sums of a microbatch's terms in another order, a few eps


class Block(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(16, rngs=rngs)
        self.up = nnx.Linear(16, 32, rngs=rngs)
        self.down = nnx.Linear(32, 16, rngs=rngs)

    def __call__(self, x):
        return x + self.down(jax.nn.relu(self.up(self.norm(x))))


def model(uses):
    """An embedding, blocks and a head in a row of `LAYERS`; the layers in `uses` are one and the same block."""

    def make():
        rngs = nnx.Rngs(0)
        middle = [Block(rngs) for _ in range(LAYERS - 2)]
        for place in uses[1:]:
            middle[place - 1] = middle[uses[0] - 1]
        layers = [nnx.Embed(VOCAB, 16, rngs=rngs), *middle, nnx.Linear(16, VOCAB, rngs=rngs)]
        return ax.models.SequenceModel(layers, optax.softmax_cross_entropy_with_integer_labels)

    return make


@functools.cache
def of_one_stage(uses):
    return gradients(uses)


def gradients(uses, pipe=1, **options):
    """Gradients of one step, of every copy of a parameter, as the optimizer was given them; and their norm."""
    made = make_trainer(
        model(uses),
        optax.trace(0.0),
        grids.lay(GridShape(pipe=pipe)),
        microbatches=MICROBATCHES,
        pipeline=PipelineConfig(**options),
    )
    norm = float(made.step(BATCH)["grad_norm"])
    found = gradients_of(made)
    made.close()
    return found, norm


def gradients_of(trainer):
    """What the optimizer was given last, of every place here."""
    opt_state = trainer.engine.opt_state
    states = opt_state.values() if isinstance(opt_state, dict) else [opt_state]
    return [{name: np.asarray(value) for name, value in state.trace.items()} for state in states]


def check(got, want):
    """Every copy of a parameter has the gradient of the one stage's."""
    (places, norm), ((whole,), whole_norm) = got, want
    assert {name for place in places for name in place} == whole.keys()
    for name, grad in (pair for place in places for pair in place.items()):
        bound = TOLERANCE * np.abs(whole[name]).max()
        np.testing.assert_allclose(grad, whole[name], rtol=0, atol=bound, err_msg=name)
    assert norm == pytest.approx(whole_norm, rel=TOLERANCE)


# The stages of `LAYERS` layers, `split` evenly: which layers share decides whose stages these are.
CASES = {
    "one rank's stages": ((1, 7), {"pipe": 2, "virtual_stages": 2, "split": "3,3,3,3"}),
    "one rank's stages, three times": ((2, 4, 8), {"pipe": 2, "virtual_stages": 3, "split": "2,2,2,2,2,2"}),
    "neighbours": ((5, 6), {"pipe": 2, "split": "6,6"}),
    "first and last": ((1, 10), {"pipe": 3, "split": "4,4,4"}),
    "first and last of four, zero-bubble": ((2, 9), {"pipe": 4, "split": "3,3,3,3", "policy": "zero-bubble"}),
    "1f1b": ((1, 10), {"pipe": 2, "split": "6,6", "policy": "1f1b"}),
    "gpipe": ((3, 4), {"pipe": 3, "split": "4,4,4", "policy": "gpipe"}),
    "interleaved": ((1, 7), {"pipe": 2, "virtual_stages": 2, "split": "3,3,3,3", "policy": "interleaved"}),
    "both ways": ((1, 5, 8), {"pipe": 2, "virtual_stages": 2, "split": "3,3,3,3"}),
}
