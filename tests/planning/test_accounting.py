"""Predicted bytes equal compiled bytes exactly, per kind and axis."""

from dataclasses import replace
from itertools import product

import pytest
from accounting import case, check
from hlo.accounting import Accounting, account

from axonn_jax.core.adapters.config import TARGETS
from axonn_jax.core.errors import UserError
from axonn_jax.core.grid import GridShape
from axonn_jax.core.models.config import ModelShape
from axonn_jax.core.ops.costs import StepPolicy
from axonn_jax.planning.communication import StepSpec, predict

# Every size divides where some grid of 16 devices splits it sixteen ways, over two axes at once included.
GPT = ModelShape(layers=2, hidden=64, heads=16, kv_heads=16, ffn=256, vocab=512, seq_len=32)
LLAMA = ModelShape(
    layers=2, hidden=64, heads=32, kv_heads=16, ffn=96, vocab=512, seq_len=16,
    positions="rope", norm="rmsnorm", mlp="swiglu", bias=False, tied=False,
)  # fmt: skip
QWEN = replace(LLAMA, heads=16, kv_heads=16, head_dim=4, qk_norm=True, bias="qkv")
MODELS = {"gpt": GPT, "llama": LLAMA}
GRIDS = [axes for axes in product((1, 2, 4, 8, 16), repeat=4) if axes[0] * axes[1] * axes[2] * axes[3] == 16]


def test_a_sample_of_the_grids_of_16_devices():
    """Every pair of policy, layout of the block and life of gathered weights; both models, unrolled and scanned."""
    check(
        16,
        [
            case(LLAMA, (2, 2, 2, 2), "none", 1),
            case(GPT, (1, 4, 2, 2), "none", 2, reshard_after="backward", comm=(0, 0, 1)),
            case(LLAMA, (1, 4, 1, 4), "none", 3, scanned=True, reshard_after="step", comm=(1, 1)),
            case(replace(GPT, layers=3), (2, 8, 1, 1), "full", 3, scanned=True, reshard_after="backward"),
            case(LLAMA, (2, 2, 2, 2), "full", 2, reshard_after="step", comm=(0, 0, 1)),
            case(LLAMA, (2, 2, 2, 2), "full", 2, comm=(1, 1)),
            case(GPT, (2, 2, 2, 2), "save_collectives", 2, reshard_after="step"),
            case(GPT, (1, 1, 4, 4), "save_collectives", 1, scanned=True, comm=(0, 0, 1)),
            case(GPT, (2, 2, 2, 2), "save_collectives", 1, scanned=True, reshard_after="backward", comm=(0, 1)),
            case(GPT, (2, 2, 2, 2), "full", 2),
            case(LLAMA, (1, 2, 4, 2), "full", 1, scanned=True, comm=(0, 0, 1)),
            case(QWEN, (2, 2, 2, 2), "none", 2),
            case(QWEN, (2, 1, 4, 2), "full", 1, scanned=True, comm=(1, 1)),
            case(QWEN, (2, 2, 4, 1), "save_collectives", 1, comm=(0, 0, 1)),
        ],
    )


def test_steps_that_train_adapters_alone():
    """Every layout of the block, the life of gathered weights, and targets that leave out the first projection."""
    every, some, late = ({"rank": 4, "targets": list(targets)} for targets in (TARGETS, "qv", ["o", "down"]))
    check(
        16,
        [
            case(LLAMA, (2, 2, 2, 2), lora=every),
            case(GPT, (2, 2, 2, 2), "full", 2, scanned=True, lora=some),
            case(QWEN, (2, 2, 2, 2), "full", 2, lora=every),
            case(LLAMA, (1, 4, 2, 2), "none", 2, comm=(1, 1), lora=every),
            case(LLAMA, (2, 2, 2, 2), "full", comm=(0, 0, 1), lora=some),
            case(GPT, (2, 2, 4, 1), "none", comm=(0, 0, 1), lora=late),
            case(LLAMA, (2, 2, 2, 2), "full", 3, reshard_after="step", lora=late),
            case(QWEN, (2, 2, 2, 2), "none", 2, reshard_after="backward", comm=(0, 0, 1), lora=every),
        ],
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("activations", "microbatches"), [("none", 2), ("full", 1), ("dots", 1), ("save_collectives", 2)]
)
@pytest.mark.parametrize("scanned", [False, True], ids=["unrolled", "scanned"])
@pytest.mark.parametrize("model", MODELS)
def test_every_4d_grid_of_16_devices_with_the_sequence_split(model, scanned, activations, microbatches):
    check(16, [case(MODELS[model], axes, activations, microbatches, scanned, comm=(0, 0, 1)) for axes in GRIDS])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("activations", "microbatches"), [("none", 2), ("full", 1), ("dots", 1), ("save_collectives", 2)]
)
@pytest.mark.parametrize("scanned", [False, True], ids=["unrolled", "scanned"])
@pytest.mark.parametrize("model", MODELS)
def test_every_grid_with_x_and_gathers_of_the_residual(model, scanned, activations, microbatches):
    grids = [axes for axes in GRIDS if axes[3] > 1]
    check(16, [case(MODELS[model], axes, activations, microbatches, scanned, comm=(1, 1)) for axes in grids])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("activations", "microbatches"), [("none", 1), ("none", 3), ("full", 2), ("dots", 1), ("save_collectives", 2)]
)
@pytest.mark.parametrize("scanned", [False, True], ids=["unrolled", "scanned"])
@pytest.mark.parametrize("model", MODELS)
def test_every_4d_grid_of_16_devices(model, scanned, activations, microbatches):
    assert len(GRIDS) == 35
    check(16, [case(MODELS[model], axes, activations, microbatches, scanned) for axes in GRIDS])


@pytest.mark.slow
@pytest.mark.parametrize("activations", ["none", "full", "dots", "save_collectives"])
@pytest.mark.parametrize("scanned", [False, True], ids=["unrolled", "scanned"])
@pytest.mark.parametrize("gather", ["backward", "step"])
def test_every_grid_with_z_where_gathered_weights_are_kept(gather, scanned, activations):
    grids = [axes for axes in GRIDS if axes[1] > 1]
    model = GPT if scanned else LLAMA
    check(16, [case(model, axes, activations, 1 + index % 3, scanned, gather) for index, axes in enumerate(grids)])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("devices", "model", "axes"),
    [
        (512, {"preset": "gpt-5b", "layers": 4}, (4, 8, 4, 4)),
        (512, {"preset": "gpt-20b", "layers": 2, "seq_len": 512}, (8, 1, 8, 8)),
        (512, {"preset": "llama2-7b", "layers": 4, "seq_len": 1024}, (1, 16, 8, 4)),
        (1024, {"preset": "gpt-5b", "layers": 4, "seq_len": 1024}, (64, 16, 1, 1)),
        (1024, {"preset": "llama2-70b", "layers": 2, "seq_len": 1024}, (8, 8, 4, 4)),
    ],
    ids=lambda value: value["preset"] if isinstance(value, dict) else None,
)
def test_published_models_on_hundreds_of_devices(devices, model, axes):
    check(devices, [case(model, axes, "full", 2)])


def test_a_difference_is_seen():
    work = StepSpec(replace(GPT, layers=1), GridShape(1, 1, 2, 2, 2), 2)
    done = account(work)
    assert done.exact
    assert done.ratio == 1.0
    more = Accounting(predict(replace(work, policy=StepPolicy(activations="full"))), done.compiled)
    assert not more.exact
    assert more.ratio < 1
    wrong = [(row.kind, row.axes) for row in more.rows if row.predicted != row.compiled]
    assert wrong == [("all-gather", "z"), ("all-reduce", "x"), ("all-reduce", "y")]


def test_what_cannot_be_compared_is_refused():
    with pytest.raises(UserError, match="itemsize"):
        account(StepSpec(GPT, GridShape(x=2), 1, itemsize=2))
    with pytest.raises(UserError, match=r"grid.pipe"):
        account(StepSpec(GPT, GridShape(pipe=2), 1))
    with pytest.raises(UserError, match="devices = 8"):
        account(StepSpec(GPT, GridShape(x=16), 1))
