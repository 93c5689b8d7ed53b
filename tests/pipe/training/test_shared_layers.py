"""Layers that several stages of a pipeline use: their gradients are those of one stage, wherever the stages are."""

import pytest
from shared_layers import CASES, LAYERS, check, gradients, of_one_stage

# "interleaved" has one rank's stages too, "both ways" has neighbours.
SLOW = ("one rank's stages", "one rank's stages, three times", "neighbours", "first and last", "1f1b", "gpipe")


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.slow] if case in SLOW else []) for case in CASES]
)
def test_gradients_of_a_shared_layer_are_those_of_one_stage(case):
    uses, options = CASES[case]
    check(gradients(uses, **options), of_one_stage(uses))


@pytest.mark.slow
@pytest.mark.parametrize("pipe", [2, 3, 4])
@pytest.mark.parametrize(
    ("policy", "chunks"),
    [(policy, 1) for policy in ("message", "gpipe", "1f1b", "zero-bubble")]
    + [(policy, chunks) for policy in ("message", "zero-bubble", "interleaved") for chunks in (2, 3)],
)
def test_every_policy_and_number_of_stages(policy, chunks, pipe):
    """Shared by the first stage that has a block, and a later one: of the same place if it has several."""
    stages = pipe * chunks
    each = LAYERS // stages
    split = ",".join(map(str, [each] * (stages - 1) + [LAYERS - each * (stages - 1)]))
    # Where a stage has one layer, the embedding is all of the first.
    uses = (pipe, 2 * pipe) if each == 1 else (1, each * (pipe if chunks > 1 else stages - 1))
    check(gradients(uses, pipe, policy=policy, virtual_stages=chunks, split=split), of_one_stage(uses))


def test_a_layer_of_three_ranks_is_one_layer():
    check(gradients((1, 5, 9), pipe=3, split="4,4,4"), of_one_stage((1, 5, 9)))
