"""Adapters (LoRA): steps are those of PEFT in torch, on every grid; nothing but adapters is trained."""

import functools
from collections import Counter
from dataclasses import replace

import adapted
import cases
import numpy as np
import optax
import pytest
from flax import nnx
from hlo_text import collectives

import axonn_jax as ax
from axonn_jax.core.grid import GridShape
from axonn_jax.core.models.block_comm import BlockComm
from axonn_jax.core.tensor.params import split_module
from axonn_jax.files.adapters.peft import read_adapter

EPS = float(np.finfo(np.float32).eps)
GRIDS = {
    "data": GridShape(data=2), "z": GridShape(z=2), "y": GridShape(y=2), "x": GridShape(x=2),
    "data z y": GridShape(data=2, z=2, y=2), "z y x": GridShape(z=2, y=2, x=2), "pipe": GridShape(pipe=2),
    "pipe y": GridShape(pipe=2, y=2),
}  # fmt: skip
SETTINGS = {
    "zero offload": (GridShape(data=2, y=2), {"memory": ax.MemoryConfig(zero=1, offload="optimizer")}),
    "scanned": (
        GridShape(z=2),
        {"memory": ax.MemoryConfig(activations="full"), "tensor": ax.TensorConfig(scan_layers="yes")},
    ),
    "gathered once": (GridShape(z=2), {"memory": ax.MemoryConfig(reshard_after="step")}),
    "halves": (GridShape(y=2, x=2), {"tensor": ax.TensorConfig(sub_batches=2, order="package")}),
    "stage without adapters": (GridShape(pipe=2), {"pipeline": ax.PipelineConfig(split="1,5")}),
    "stage without adapters, offload": (
        GridShape(pipe=2),
        {"pipeline": ax.PipelineConfig(split="1,5"), "memory": ax.MemoryConfig(offload="optimizer")},
    ),
}
COMMS = {
    "sequence": (GridShape(y=2, x=2), BlockComm(sequence_split=True)),
    "gather": (GridShape(y=2, z=2), BlockComm(attention=True, mlp=True)),
}


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    return adapted.peft_directory(tmp_path_factory.mktemp("peft") / "first", "first")


@pytest.fixture(scope="module")
def alone(first):
    """Losses, norms and adapters of one device."""
    results, trainer = adapted.run(adapted.adapted(first))
    return results, adapted.arrays(trainer), trainer


def test_steps_are_those_of_peft_in_torch(alone, tmp_path):
    results, arrays, _ = alone
    stored = adapted.stored()
    assert np.abs(results[:, 0] / stored["losses"] - 1).max() < 16 * EPS
    assert np.abs(results[:, 1] / stored["norms"] - 1).max() < 64 * EPS
    last = read_adapter(adapted.peft_directory(tmp_path / "last"), adapted.SHAPE, "directory").arrays
    assert last.keys() == arrays.keys()
    assert adapted.far(arrays, last) < 256 * EPS  # 20 steps of Adam


@pytest.mark.parametrize("name", GRIDS)
def test_steps_on_a_grid_are_those_of_one_device(first, alone, name):
    results, arrays, _ = alone
    got, trainer = adapted.run(adapted.adapted(first), GRIDS[name], microbatches=4 // GRIDS[name].batch_shards)
    trainer.close()
    assert np.abs(got / results - 1).max() < 64 * EPS
    assert adapted.far(adapted.arrays(trainer), arrays) < 256 * EPS


@pytest.mark.parametrize("name", SETTINGS)
def test_steps_with_other_settings_are_those_of_one_device(first, alone, name):
    grid, options = SETTINGS[name]
    results = alone[0]
    got, trainer = adapted.run(adapted.adapted(first), grid, 6, microbatches=2, **options)
    trainer.close()
    assert np.abs(got / results[:6] - 1).max() < 64 * EPS


@pytest.mark.parametrize("name", COMMS)
def test_steps_with_another_communication_are_those_of_one_device(first, alone, name):
    grid, comm = COMMS[name]
    memory = ax.MemoryConfig(sequence_parallel=comm.sequence_split)
    got, _ = adapted.run(adapted.adapted(first, comm=comm), grid, 4, memory=memory)
    assert np.abs(got / alone[0][:4] - 1).max() < 64 * EPS


@functools.cache
def _steps(case):
    trainer = cases.trainer(replace(case, weights="lora"))
    results = [trainer.step(batch) for batch in cases.batches(case.model, 3)]
    trainer.close()
    return np.array([[float(r["loss"]), float(r["grad_norm"])] for r in results])


@pytest.mark.slow
@pytest.mark.parametrize("case", cases.CASES, ids=str)
def test_adapters_meet_every_setting_of_a_step(case):
    """With adapters, the steps of the cases in which any two settings meet are those of one device."""
    want = _steps(cases.case(f"{case.model} {case.precision}"))
    tolerance = {"fp32": 64 * EPS, "fp16": 1e-3, "bf16": 8e-3}[case.precision]
    assert np.abs(_steps(case)[:2] / want[:2] - 1).max() < tolerance


def test_half_precision_keeps_the_base_but_norms_in_two_bytes_and_the_adapters_in_four(first, alone):
    got, trainer = adapted.run(adapted.adapted(first), GridShape(y=2), memory=ax.MemoryConfig(precision="bf16"))
    assert np.abs(got[:, 0] / alone[0][:, 0] - 1).max() < 0.03
    store = trainer.engine.store
    found = {name: str(a.dtype) for name, a in store.frozen.arrays.items()}
    assert found == {name: "float32" if "norm" in name else "bfloat16" for name in found}
    assert {str(a.dtype) for a in store.model.weights.values()} == {"float32"}
    report = trainer.engine.memory()[0]
    adapters = sum(a.addressable_shards[0].data.size for a in store.model.weights.values())
    base = sum(a.addressable_shards[0].data.nbytes for a in store.frozen.arrays.values())
    assert report["planned"]["weights"] == base + 4 * adapters
    assert report["planned"]["moments"] == 2 * 4 * adapters  # Adam's two of the adapters, and none of the base
    assert report["counted_between_steps"]["device"] == base + 12 * adapters


def test_the_base_does_not_change(first, alone):
    params = alone[2].engine.params
    for name, value in split_module(adapted.adapted(first)).frozen.items():
        assert np.array_equal(value, params[name]), name


def _collectives(model):
    """Collectives of a step of two microbatches over z and y, in the loop over these and outside, and the trainer."""
    trainer = ax.Trainer(model, optax.sgd(0.1), adapted.grids.lay(GridShape(z=2, y=2)), microbatches=2)
    step = trainer.engine.compiled_step(np.zeros((4, adapted.SHAPE.seq_len + 1), np.int32))
    made = collectives(step.as_text())
    looped = Counter((one.kind, one.bytes) for one in made if one.in_loop)
    return looped, [one for one in made if not one.in_loop], trainer


@pytest.mark.bits
def test_a_step_sends_what_a_frozen_model_does_and_the_adapters_gradients_once():
    full, _, _ = _collectives(adapted.base())
    narrow, narrow_once, trainer = _collectives(ax.lora(adapted.base(), rank=1))
    wide, wide_once, wider = _collectives(ax.lora(adapted.base(), rank=4))
    assert narrow == wide  # nothing of the adapters travels with a microbatch
    assert not narrow - full  # nor anything that a trained model has not
    assert any(kind == "reduce-scatter" for kind, _ in full)
    assert not any(kind == "reduce-scatter" for kind, _ in narrow)  # no gradient of the base is made

    def elements(trainer):
        weights = trainer.engine.store.model.weights.values()
        return sum(a.addressable_shards[0].data.size for a in weights)

    grown = sum(one.bytes for one in wide_once) - sum(one.bytes for one in narrow_once)
    assert grown == 4 * (elements(wider) - elements(trainer))


def test_a_dense_trainer_is_refused_adapters():
    with pytest.raises(ax.UserError, match="loss = 'a model with adapters'"):
        ax.Trainer(ax.lora(adapted.base(), rank=1), optax.sgd(0.1), adapted.grids.lay(GridShape()), loss=lambda m, b: 0)
    pruned = ax.PruneConfig(density=0.5)
    with pytest.raises(ax.UserError, match=r"prune.density = 0.5"):
        ax.Trainer(ax.lora(adapted.base(), rank=1), optax.sgd(0.1), adapted.grids.lay(GridShape()), prune=pruned)


BAD = {
    "rank": ({"rank": 0}, "lora.rank = 0: an integer of at least 1"),
    "negative": ({"rank": -1}, "lora.rank = -1: an integer from 0"),
    "dropout": ({"rank": 1, "dropout": 1.0}, "lora.dropout = 1.0: a probability of at least 0 and below 1"),
    "text": ({"rank": 1, "targets": "all-linear"}, "lora.targets = 'all-linear': one of q, .*left out for all of them"),
    "target": ({"rank": 2, "targets": ("q", "upp")}, "lora.targets = 'upp': .*did you mean 'up'"),
    "twice": ({"rank": 2, "targets": ("q", "q")}, "each target once; q is there twice"),
    "none": ({"rank": 2, "targets": ()}, "at least one of q, k"),
    "seed": ({"rank": 2, "seed": "0"}, "^seed = '0': an integer"),
    "no targets": ({"rank": 2, "targets": 3}, "^targets = 3: a list"),
    "alpha": ({"rank": 2, "alpha": 0.0}, "lora.alpha = 0.0: a finite number above 0"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_settings_are_refused_in_one_line(name):
    given, message = BAD[name]
    with pytest.raises(ax.UserError, match=message):
        ax.lora(adapted.base(), **given)


def test_models_that_cannot_have_adapters_are_refused():
    with pytest.raises(ax.UserError, match=r"'Linear': a models\.Transformer"):
        ax.lora(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), rank=1)
    with pytest.raises(ax.UserError, match="adapters on adapters"):
        ax.lora(ax.lora(adapted.base(), rank=1), rank=1)
    experts = ax.models.Transformer(adapted.grids.MIXTRAL, rngs=nnx.Rngs(0))
    with pytest.raises(ax.UserError, match=r"lora.targets = \['up'\]: at least one of q, k, v, o, which the model has"):
        ax.lora(experts, rank=1, targets=["up"])
    moved = ax.models.Transformer(adapted.grids.MIXTRAL, rngs=nnx.Rngs(0), moe=ax.MoeConfig(balance_rate=0.001))
    with pytest.raises(ax.UserError, match=r"moe.balance_rate = 0.001: 0 beside adapters"):
        ax.lora(moved, rank=1)


def test_a_rank_above_a_side_of_a_kernel_is_one_of_its_own(first):
    """As in PEFT; the sums of such adapters reach no further, but they learn otherwise."""
    wide = ax.lora(adapted.base(), rank=adapted.SHAPE.hidden + 1)
    got, trainer = adapted.run(wide, steps=4)
    on_grid, _ = adapted.run(ax.lora(adapted.base(), rank=adapted.SHAPE.hidden + 1), GridShape(z=2, y=2), steps=4)
    assert got[3, 0] < got[0, 0]
    assert np.abs(on_grid / got - 1).max() < 64 * EPS
    assert trainer.engine.params["blocks.0.attention.out.adapter.a"].shape[1] == adapted.SHAPE.hidden + 1
