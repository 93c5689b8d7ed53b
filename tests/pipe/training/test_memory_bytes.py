"""Bytes of a training step: arrays alive, programs and reports are as the formula says."""

import gc
from itertools import product
from types import SimpleNamespace

import jax
import live
import numpy as np
import pytest
from memory_runs import batches, made, slow

from axonn_jax.core.grid import GridShape
from axonn_jax.core.memory.precision import FULL
from axonn_jax.core.memory.report import lines


def test_a_pipeline_keeps_what_its_policy_says():
    def kept(activations):
        trainer = made(GridShape(pipe=2), activations=activations)
        pipe, _ = trainer.engine._prepare(batches(1)[0])
        found = sum(stage.residual_bytes() for rank in pipe.ranks.values() for stage in rank.stages.values())
        trainer.close()
        return found

    assert kept("full") < kept("dots") < kept("none")


# Bytes a parameter: (device between backward and update, host), all parameters divisible by every axis here.
STATES = [
    ({"precision": "fp32"}, 16, 0),
    ({"precision": "bf16"}, 16, 0),
    ({"precision": "bf16", "accumulate": "compute"}, 14, 0),
    ({"precision": "fp16", "offload": "optimizer"}, 6, 12),
    ({"precision": "bf16", "offload": "optimizer", "accumulate": "compute"}, 4, 12),
    ({"precision": "fp32", "offload": "optimizer"}, 8, 8),
    ({"precision": "bf16", "zero": 1}, 2 + 16 / 2, 0),
    ({"precision": "bf16", "zero": 1, "offload": "optimizer", "accumulate": "compute"}, 2 + 2 / 2, 12 / 2),
]
LARGER = 5000


def expected(trainer, options, device):
    """Return bytes a parameter times parameters, and of norms what float32 weights and sums have more."""
    dtypes = getattr(trainer.engine, "job", trainer.engine).precisions  # a pipeline's are its job's
    norms = sum(value.size for name, value in trainer.engine.params.items() if "norm" in name)
    wider = FULL.weights.itemsize - dtypes.weights.itemsize
    weights = sum(planned.weights for planned in planned_of(trainer).values())
    total = (weights - wider * norms) // dtypes.weights.itemsize
    sums = (FULL.grad_dtype.itemsize - dtypes.grad_dtype.itemsize) // replicas(options)
    return device * total + (wider + sums) * norms, total


QUICK = (STATES[0], STATES[4])


def replicas(options):
    return 2 if "zero" in options else 1


@pytest.mark.parametrize(
    ("pipe", "state"),
    [
        pytest.param(pipe, state, marks=() if state is QUICK[2 - pipe] else slow)
        for pipe, state in product((1, 2), STATES)
        if pipe > 1 or "offload" in state[0]
    ],
)
def test_live_arrays_of_a_step_are_what_the_formula_says(pipe, state):
    """When the update of a real step begins, gradients alive, over one device of each stage; and within the update."""
    options, device, host = state
    gc.collect()
    before = jax.live_arrays()
    trainer = made(GridShape(pipe=pipe, data=replicas(options)), bucket=LARGER, **options)
    updates = live.Updates(trainer, before)
    trainer.step(batches(1)[0])
    places = planned_of(trainer)
    found = {kind: sum(begin[kind] for begin in updates.begin.values()) for kind in ("device", "host")}
    want, total = expected(trainer, options, device)
    assert len(updates.begin) == len(places)
    assert found == {"device": want, "host": host * total}
    assert found["device"] == sum(planned.device for planned in places.values())
    assert found["host"] == sum(planned.host for planned in places.values())
    buckets = 3 * 12 * LARGER if host else 0
    for place, most in updates.most.items():
        assert most <= updates.begin[place]["device"] + buckets, place
    trainer.close()


def planned_of(trainer):
    """The formula's bytes, by rank of the pipe."""
    return {pp_rank: SimpleNamespace(**report["planned"]) for pp_rank, report in trainer.engine.memory().items()}


@pytest.mark.parametrize(
    ("options", "device", "host"),
    [pytest.param(*state, marks=() if state is STATES[0] else slow) for state in STATES if "offload" not in state[0]],
)
def test_one_program_of_a_step_has_state_as_arguments_and_gradients_among_its_temporaries(options, device, host):
    """By XLA's analysis: in one program there are no arrays between the backward pass and the update."""
    trainer = made(GridShape(data=replicas(options)), **options)
    batch = batches(1)[0]
    found = trainer.engine.compiled_step(batch).memory_analysis()
    (planned,) = planned_of(trainer).values()
    assert planned.device == expected(trainer, options, device)[0]
    assert planned.host == host == 0
    tokens, numbers = batch.nbytes // replicas(options), 256
    assert 0 <= found.argument_size_in_bytes - (planned.device - planned.gradients) - tokens < numbers
    assert found.temp_size_in_bytes > planned.gradients


def test_gradients_take_the_bytes_that_the_formula_gives_them():
    trainer = made(GridShape(data=2), precision="bf16", zero=1, offload="optimizer", accumulate="compute")
    program = trainer.engine.compiled_step(batches(1)[0])
    (planned,) = planned_of(trainer).values()
    sizes = [int(np.prod(s.shape)) * s.dtype.itemsize for s in program.out_info.grads.values()]
    assert sum(sizes) // 2 == planned.gradients


def test_the_report_says_where_every_byte_is():
    trainer = made(GridShape(data=2), precision="bf16", zero=1, offload="optimizer", accumulate="compute")
    trainer.step(batches(1)[0])
    (found,) = trainer.engine.memory().values()
    assert found["counted_between_steps"]["host"] == found["planned"]["host"] > 0
    assert found["counted_between_steps"]["device"] == found["planned"]["weights"]
    assert found["program"]["temp"] > 0
    text = "\n".join(lines(found))
    assert "masters" in text
    assert "(host)" in text
