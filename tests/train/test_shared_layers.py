"""Layers that several stages of a pipeline use: their gradients are those of one stage, wherever the stages are."""

import grids
import jax
import numpy as np
import optax
import pytest
from flax import nnx

import axonn_jax as ax
from axonn_jax.errors import UserError
from axonn_jax.grid import GridShape
from axonn_jax.train.config import PipelineConfig
from axonn_jax.train.trainer import Trainer

MICROBATCHES, VOCAB, LAYERS = 6, 32, 12
TOLERANCE = 3e-7  # of a gradient's largest entry: sums of a microbatch's terms in another order, a few eps


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


def gradients(uses, pipe=1, **options):
    """Gradients of one step, of every copy of a parameter, as the optimizer was given them; and their norm."""
    made = Trainer(
        model(uses),
        optax.trace(0.0),
        grids.lay(GridShape(pipe=pipe)),
        microbatches=MICROBATCHES,
        pipeline=PipelineConfig(**options),
    )
    norm = float(made.step(np.random.default_rng(0).integers(0, VOCAB, (MICROBATCHES * 2, 9)))["grad_norm"])
    states = made.opt_state.values() if pipe > 1 else [made.opt_state]
    found = [{name: np.asarray(value) for name, value in state.trace.items()} for state in states]
    made.close()
    return found, norm


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


@pytest.mark.parametrize("case", CASES)
def test_gradients_of_a_shared_layer_are_those_of_one_stage(case):
    uses, options = CASES[case]
    got, norm = gradients(uses, **options)
    (want,), want_norm = gradients(uses)
    assert {name for place in got for name in place} == want.keys()
    for name, grad in (pair for place in got for pair in place.items()):
        np.testing.assert_allclose(grad, want[name], rtol=0, atol=TOLERANCE * np.abs(want[name]).max(), err_msg=name)
    assert norm == pytest.approx(want_norm, rel=TOLERANCE)


def test_a_layer_of_three_ranks_is_refused():
    with pytest.raises(UserError, match=r"layers.1.*used by places \[0, 1, 2\] of the pipe"):
        gradients((1, 5, 9), pipe=3, split="4,4,4")
