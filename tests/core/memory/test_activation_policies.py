"""Activation policies: what is computed again."""

import grids
import jax
import jax.numpy as jnp

from axonn_jax.core.engines.program import StageProgram
from axonn_jax.core.settings import MemoryConfig
from axonn_jax.core.tensor.params import split_module


def test_layers_are_computed_again_where_a_policy_says_so():
    grid = grids.lay(grids.GridShape())
    parts = split_module(grids.model_on(grids.GPT, grid))
    rows = jax.ShapeDtypeStruct((1, 2, grids.GPT.seq_len + 1), jnp.int32)

    def recomputed(activations):
        program = StageProgram(parts, grid, memory=MemoryConfig(activations=activations))
        return str(jax.make_jaxpr(program.gradients)(parts.params, rows, None)).count("policy=None")

    # activation functions are computed again whatever the policy
    assert recomputed("full") > recomputed("none")
