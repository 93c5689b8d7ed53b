"""The explicit program beside automatic partitioning: depth, sameness, and what is said where it loses."""

from dataclasses import replace

import numpy as np
import optax
import pytest
from compiled.gspmd import Way, _abstract, _check_same, _compile, _count, compare_bytes, compare_runs
from grids import GPT, LLAMA

from axonn_jax import GridShape, MoeConfig, UserError
from axonn_jax.core.engines.step import TrainState
from axonn_jax.core.memory.optimizer_state import ModelState


@pytest.mark.parametrize(
    "constraints", ["layers", *(pytest.param(n, marks=pytest.mark.slow) for n in ("blocks", "none"))]
)
def test_llama_on_a_mixed_grid_is_the_same_by_either_program(constraints):
    done = compare_runs(LLAMA, GridShape(z=2, y=2), 4, Way(constraints=constraints), rounds=1)
    assert done.ratio < 1
    assert done.step_s is not None
    assert {axes for _, axes in done.explicit} >= {"z", "y"}


def test_a_deeper_model_is_one_block_more_for_every_layer():
    shape, grid = replace(GPT, layers=4), GridShape(data=2, z=2)
    done = compare_bytes(shape, grid, 4, [Way()])[0]
    whole = [_count(_compile(step, done.work), done.work) for step in _abstract(done.work, Way())]
    assert done.explicit == whole[0].sent
    assert done.automatic == whole[1].sent
    assert done.scattered == whole[1].scattered


def test_one_device_communicates_nothing():
    done = compare_bytes(GPT, GridShape(), 1, [Way()])[0]
    assert (done.explicit, done.automatic, done.ratio, done.reason()) == ({}, {}, 1.0, "")


def test_the_reason_names_axis_and_layers():
    done = compare_bytes(GPT, GridShape(x=2), 2, [Way()])[0]
    lost = replace(done, scattered={key: amount / 2 for key, amount in done.scattered.items()})
    assert lost.reason().startswith("over x +")
    assert "forward all-reduce of blocks.mlp.up" in lost.reason()


def test_other_losses_and_gradients_are_noticed():
    params = {"a": np.ones(3, np.float32)}

    def state(mu):
        adam = optax.ScaleByAdamState(np.int32(1), {"a": np.asarray(mu, np.float32)}, params)
        return TrainState(ModelState(params, {}, (adam,)), None, {})

    same = [{"loss": 2.0}, {"loss": 2.0}]
    _check_same([state([1, 2, 3]), state([1, 2, 3])], same)
    with pytest.raises(RuntimeError, match="losses differ"):
        _check_same([state([1, 2, 3]), state([1, 2, 3])], [{"loss": 2.0}, {"loss": 2.1}])
    with pytest.raises(RuntimeError, match="gradients of a differ"):
        _check_same([state([1, 2, 3]), state([1, 2, 3.1])], same)


def test_a_grid_that_does_not_divide_is_refused():
    with pytest.raises(UserError, match=r"train.global_batch = 3"):
        compare_runs(GPT, GridShape(data=2), 3)


@pytest.mark.slow
def test_weights_gathered_once_a_step_send_less_and_compute_the_same():
    way = Way(2, "full")
    layer, step = (
        compare_runs(GPT, GridShape(data=2, z=2), 8, replace(way, reshard_after=one), 0) for one in ("forward", "step")
    )
    assert step.ratio < layer.ratio < 1
    assert step.automatic == layer.automatic
    # Once a step in either program, if a compiler moved all of the automatic one's sums; its gathers stay.
    assert step.ratio < step.ratio_scattered < step.ratio_moved < 1


@pytest.mark.slow
def test_experts_send_less_than_masks_and_einsums():
    ways = [Way(moe=MoeConfig(dispatch=way, balance_weight=0.0)) for way in ("gather", "capacity")]
    shape = replace(LLAMA, layers=2, hidden=128, ffn=128, vocab=256, seq_len=64, experts=8, experts_per_token=2)
    for done in compare_bytes(shape, GridShape(expert=2, y=2), 4, ways):
        assert max(done.ratio, done.ratio_scattered) < 0.9
