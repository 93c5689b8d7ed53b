"""Activation policies: what is refused, and what is then computed again."""

from typing import get_args

import grids
import jax
import jax.numpy as jnp
import pytest

from axonn_jax.errors import UserError
from axonn_jax.memory.remat import check_activations
from axonn_jax.options import Activations
from axonn_jax.tensor.params import split_module
from axonn_jax.train.config import MemoryConfig
from axonn_jax.train.engines.program import StageProgram


@pytest.mark.parametrize("name", ["fulll", "", "full:0-11,dots:12-17,none"])
def test_what_is_no_policy_is_refused(name):
    accepted = "one of none, full, dots, save_collectives, offload, for all layers"
    with pytest.raises(UserError, match=f"memory.activations = {name!r}: {accepted}"):
        check_activations(name)
    for policy in get_args(Activations):
        check_activations(policy)


def test_layers_are_computed_again_where_a_policy_says_so():
    grid = grids.lay(grids.GridShape())
    parts = split_module(grids.model_on(grids.GPT, grid))
    rows = jax.ShapeDtypeStruct((1, 2, grids.GPT.seq_len + 1), jnp.int32)

    def recomputed(activations):
        program = StageProgram(parts, grid, memory=MemoryConfig(activations=activations))
        return str(jax.make_jaxpr(program.gradients)(parts.params, rows, None)).count("policy=None")

    # activation functions are computed again whatever the policy
    assert recomputed("full") > recomputed("none")
