"""Predicted bytes of models with experts equal compiled bytes exactly, per kind and axis, for both dispatches."""

from dataclasses import replace
from itertools import product
from math import prod

import pytest
from accounting import case, check

from axonn_jax.core.models.config import ModelShape

# Everything divides where 16 devices split it sixteen ways.
MIXTRAL = ModelShape(
    layers=2, hidden=64, heads=16, kv_heads=16, ffn=96, vocab=512, seq_len=32, positions="rope", norm="rmsnorm",
    mlp="swiglu", bias=False, tied=False, experts=16, experts_per_token=2, expert_ffn=64,
)  # fmt: skip
TED = ModelShape(
    layers=3, hidden=64, heads=16, kv_heads=16, ffn=128, vocab=512, seq_len=32,
    experts=16, experts_per_token=1, expert_ffn=128, moe_every=2, moe_first=1, shared_experts=1,
)  # fmt: skip
GRIDS = [sizes for sizes in product((1, 2, 4, 8, 16), repeat=5) if prod(sizes) == 16]
"""data, expert, z, y, x."""
SPLIT = (0, 0, 1)


def expert_case(model, sizes, *settings, dispatch="gather", **more):
    data, expert, z, y, x = sizes
    of = case(model, (data, z, y, x), *settings, **more)
    return of | {"expert": expert, "moe": {"dispatch": dispatch}, "sequences": of["sequences"] * expert}


def test_a_sample_of_grids_policies_and_both_dispatches():
    """The dense layer behind one of experts is in the scanned case, and in the tests of every grid."""
    ted = replace(TED, layers=2)
    check(
        16,
        [
            expert_case(MIXTRAL, (2, 2, 1, 2, 2), "full", 2),
            expert_case(MIXTRAL, (1, 4, 2, 2, 1), "none", 2, scanned=True),
            expert_case(MIXTRAL, (1, 2, 2, 2, 2), "save_collectives", 1, comm=SPLIT),
            expert_case(MIXTRAL, (2, 2, 1, 2, 2), "full", 1, dispatch="capacity"),
            expert_case(ted, (1, 2, 2, 2, 2), "full", 2, reshard_after="step"),
            expert_case(ted, (1, 2, 1, 4, 2), "none", 1, comm=SPLIT, dispatch="capacity"),
            expert_case(ted, (1, 1, 2, 4, 2), "save_collectives", 2, dispatch="capacity"),
            expert_case(replace(TED, layers=4), (1, 2, 2, 2, 2), "full", 2, scanned=True),
            expert_case(replace(ted, shared_experts=0), (1, 4, 1, 2, 2), "full", 1, comm=(1, 1)),
        ],
    )


@pytest.mark.slow
@pytest.mark.parametrize("dispatch", ["gather", "capacity"])
@pytest.mark.parametrize("comm", [(0, 0, 0), SPLIT], ids=["whole", "split"])
@pytest.mark.parametrize(("model", "activations"), [(MIXTRAL, "full"), (TED, "none"), (TED, "save_collectives")])
def test_every_grid_of_16_devices_that_splits_experts(model, activations, comm, dispatch):
    grids = [sizes for sizes in GRIDS if sizes[1] > 1]
    check(16, [expert_case(model, sizes, activations, comm=comm, dispatch=dispatch) for sizes in grids])
