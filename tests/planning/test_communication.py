"""Predicted communication against the formulas of the published algorithm, written out by hand."""

import subprocess
import sys
from fractions import Fraction

import pytest
from hlo.collectives import totals

from axonn_jax.core.errors import UserError
from axonn_jax.core.grid import GridShape
from axonn_jax.core.models.block_comm import BlockComm
from axonn_jax.core.models.presets import preset
from axonn_jax.core.ops.costs import StepPolicy
from axonn_jax.planning.communication import StepSpec, predict

GPT = preset("gpt-5b")
GRID = GridShape(pipe=1, data=2, z=4, y=8, x=2)


def find(predicted, name, phase, kind):
    found = [one for one in predicted if (one.name, one.phase, one.kind) == (name, phase, kind)]
    assert len(found) == 1
    return found[0]


@pytest.mark.parametrize("accumulate", [4, 2])
def test_the_up_projection_is_the_table_of_the_algorithm(accumulate):
    predicted = predict(StepSpec(GPT, GRID, 64, StepPolicy(2, gradient_item=accumulate), itemsize=2))
    # The algorithm's table with k = 4096 over x, n = 16384 over y, m = 32 sequences x 2048 a microbatch, e = 2.
    k, n, m, steps = 4096, 16384, 32 * 2048, 24 * 2
    gathered = find(predicted, "blocks.mlp.up", "forward", "all-gather")
    assert gathered.bytes == 24 * Fraction(3, 4) * k * n * 2 / (2 * 8)  # once for both microbatches
    scattered = find(predicted, "blocks.mlp.up", "backward", "reduce-scatter")
    assert scattered.bytes == steps * Fraction(3, 4) * k * n * accumulate / (2 * 8)
    forward = find(predicted, "blocks.mlp.up", "forward", "all-reduce")
    assert (forward.over, forward.bytes) == ("x", steps * 2 * Fraction(1, 2) * m * n * 2 / (2 * 4 * 8))
    backward = find(predicted, "blocks.mlp.up", "backward", "all-reduce")
    assert (backward.over, backward.bytes) == ("y", steps * 2 * Fraction(7, 8) * m * k * 2 / (2 * 4 * 2))
    update = find(predicted, "blocks.mlp.up.kernel", "update", "all-reduce")
    assert (update.over, update.bytes) == ("data", 24 * 2 * Fraction(1, 2) * k * n * 4 / (2 * 8 * 4))
    bias = find(predicted, "blocks.mlp.up.bias", "update", "all-reduce")
    assert (bias.over, bias.bytes) == ("data*z", 24 * 2 * Fraction(7, 8) * n * 4 / 8)


def test_alternate_layers_swap_x_and_y():
    down = [
        one for one in predict(StepSpec(GPT, GRID, 8)) if one.name == "blocks.mlp.down" and one.kind == "all-reduce"
    ]
    assert {one.phase: one.over for one in down} == {"forward": "y", "backward": "x"}


def test_gate_and_up_reduce_their_input_gradient_once():
    shape = preset("llama2-7b")
    grid = GridShape(z=2, y=4, x=2)
    over_y = [one for one in predict(StepSpec(shape, grid, 4)) if one.over == "y" and one.phase == "backward"]
    blocks = [one for one in over_y if one.name.startswith("blocks")]
    assert [one.name for one in blocks] == ["blocks.attention.qkv", "blocks.mlp.up"]
    each = 2 * Fraction(3, 4) * 2 * 4096 * 4096 * 4 / 2  # 2 sequences of 4,096 tokens, hidden 4096 over x = 2
    assert sum(one.bytes for one in blocks) == 2 * 32 * each


def test_a_tied_table_travels_once_each_way():
    over_z = [one for one in predict(StepSpec(GPT, GridShape(z=8), 8)) if one.over == "z" and one.kind != "all-reduce"]
    table = {(one.name, one.kind): one.bytes for one in over_z if one.name in ("embedding", "head")}
    once = Fraction(7, 8) * GPT.vocab * GPT.hidden * 4
    assert table == {("embedding", "all-gather"): once, ("embedding", "reduce-scatter"): once}


def test_one_axis_alone_is_ddp_and_fsdp():
    params = preset("llama2-7b").params()
    ddp = totals(predict(StepSpec(preset("llama2-7b"), GridShape(data=8), 8)))
    assert ddp == {("all-reduce", "data"): 2 * Fraction(7, 8) * (4 * params + 8)}  # gradients, targets and loss
    fsdp = totals(predict(StepSpec(preset("llama2-7b"), GridShape(z=8), 8, itemsize=2)))
    norms = 65 * 4096  # replicated over z, so reduced like DDP's
    assert fsdp == {
        ("all-gather", "z"): Fraction(7, 8) * 2 * (params - norms),
        ("all-reduce", "z"): 2 * Fraction(7, 8) * 4 * (norms + 3),  # and targets, the loss, the global norm
        ("reduce-scatter", "z"): Fraction(7, 8) * 4 * (params - norms),
    }


def test_one_device_communicates_nothing():
    assert predict(StepSpec(GPT, GridShape(), 1)) == ()


def test_recomputation_gathers_again_and_skips_what_nothing_reads():
    kept, again = (predict(StepSpec(GPT, GRID, 64, StepPolicy(2, policy))) for policy in ("none", "full"))
    extra = {(one.name, one.kind) for one in again if one.phase == "recompute"}
    assert ("blocks.mlp.down", "all-gather") in extra
    assert ("blocks.mlp.down", "all-reduce") not in extra
    assert not any(name in ("embedding", "head", "norm", "loss") for name, _ in extra)
    assert [one for one in again if one.phase != "recompute"] == list(kept)


@pytest.mark.parametrize(("policy", "share"), [("none", "5/4"), ("full", "11/10"), ("save_collectives", "5/4")])
def test_a_split_sequence_takes_one_more_gather_over_y_and_less_over_x(policy, share):
    """A gather and a reduce-scatter have an all-reduce's bytes; each half of a block gathers once more."""

    def sent(split, axis, names):
        found = predict(StepSpec(GPT, GRID, 64, StepPolicy(2, policy), comm=BlockComm(sequence_split=split)))
        return sum(one.bytes for one in found if one.over == axis and one.name.startswith(names))

    assert sent(True, "y", "blocks") == Fraction(share) * sent(False, "y", "blocks")
    outside = ("embedding", "head", "loss")
    assert sent(True, "y", outside) == sent(False, "y", outside)
    norms = ("blocks.attention_norm", "blocks.mlp_norm", "norm")
    assert 8 * sent(True, "x", norms) == sent(False, "x", norms)
    with pytest.raises(UserError, match=r"model.seq_len = 1001: a multiple of y"):
        predict(StepSpec(preset("gpt-5b", seq_len=1001), GridShape(y=8), 1, comm=BlockComm(sequence_split=True)))


def test_a_grid_that_does_not_divide_is_refused():
    with pytest.raises(UserError, match=r"train.global_batch = 3"):
        predict(StepSpec(GPT, GRID, 3))
    with pytest.raises(UserError, match=r"model.hidden"):
        predict(StepSpec(GPT, GridShape(x=3), 1))


def test_predicting_imports_no_jax():
    code = "import sys, axonn_jax.planning.communication; print('jax' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "False\n"
