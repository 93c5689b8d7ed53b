"""Activation policies by layer: what settings say, what is refused, and what is then computed again."""

import grids
import jax
import jax.numpy as jnp
import pytest

from axonn_jax.errors import UserError
from axonn_jax.memory.policies import POLICIES, read_policies
from axonn_jax.tensor.params import take_apart
from axonn_jax.train.check import check_scan
from axonn_jax.train.program import StageProgram


@pytest.mark.parametrize(
    ("text", "by_layer"),
    [
        *((policy, [policy] * 4) for policy in POLICIES),
        ("full:0-1", ["full", "full", "none", "none"]),
        ("full:0-1,dots:3,offload", ["full", "full", "offload", "dots"]),
        (" none , full : 1 - 2 ", ["none", "full", "full", "none"]),
        ("full:0,full:2", ["full", "none", "full", "none"]),
    ],
)
def test_every_layer_has_its_policy(text, by_layer):
    policies = read_policies(text)
    policies.check(4)
    assert [policies.of(layer) for layer in range(4)] == by_layer
    assert (policies.uniform is None) == (":" in text)


@pytest.mark.parametrize(
    ("text", "accepted"),
    [
        ("fulll", "one of none, full, dots, save_collectives, offload.*did you mean 'full'"),
        ("", "one of none"),
        ("full:", "full:0-11"),
        ("full:3-1", "full:0-11"),
        ("full:a", "full:0-11"),
        ("full:-1", "full:0-11"),
        ("full:0-2,dots:2-3", "one policy a layer; layer 2 has two"),
        ("full,none", "one policy without layers; full and none have none"),
        ("full:0-4", "layers from 0 to 3"),
    ],
)
def test_what_cannot_be_read_is_refused(text, accepted):
    with pytest.raises(UserError, match=f"memory.activations = .*{accepted}"):
        read_policies(text).check(4)


def test_what_cannot_be_done_is_refused():
    with pytest.raises(UserError, match=r"train.scan_layers = 'yes': .*full:0"):
        check_scan("yes", "none", read_policies("full:0"))
    assert check_scan("auto", "none", read_policies("full:0")) == "no"
    with pytest.raises(UserError, match="offload for all layers or for none"):
        read_policies("offload:0").check_pipelined()
    read_policies("offload").check_pipelined()


def test_only_layers_that_a_policy_names_are_computed_again():
    grid = grids.lay(grids.GridShape())
    parts = take_apart(grids.model_on(grids.GPT, grid))
    rows = jax.ShapeDtypeStruct((1, 2, grids.GPT.seq_len + 1), jnp.int32)

    def recomputed(activations):
        program = StageProgram(parts, grid, jnp.dtype("float32"), activations)
        traced = jax.make_jaxpr(program.gradients)(parts.params, rows, None)
        return str(traced).count("policy=None") - nothing

    nothing = 0
    nothing = recomputed("none")  # activation functions are computed again whatever the policy
    assert 0 < recomputed("full:1,none") < recomputed("full:0-1") == recomputed("full")
