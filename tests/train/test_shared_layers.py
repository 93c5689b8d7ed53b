"""Layers that several stages of a pipeline use: their gradients are those of one stage, wherever the stages are."""

import pytest
from shared_layers import CASES, check, gradients

from axonn_jax.errors import UserError


@pytest.mark.parametrize("case", CASES)
def test_gradients_of_a_shared_layer_are_those_of_one_stage(case):
    uses, options = CASES[case]
    check(gradients(uses, **options), gradients(uses))


def test_a_layer_of_three_ranks_is_refused():
    with pytest.raises(UserError, match=r"layers.1.*used by places \[0, 1, 2\] of the pipe"):
        gradients((1, 5, 9), pipe=3, split="4,4,4")
