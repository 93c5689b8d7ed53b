"""What `Trainer` does with the module it is given, and the trained one that it gives back."""

from dataclasses import replace

import grids
import jax
import numpy as np
import optax
import pytest
from trainers import make_trainer

from axonn_jax import GridShape, UserError
from axonn_jax.tensor.params import split_module
from axonn_jax.train.engines.spmd import SpmdEngine

SHAPE = replace(grids.GPT, layers=1, seq_len=8)
BATCH = np.random.default_rng(0).integers(0, SHAPE.vocab, (8, SHAPE.seq_len + 1))

CASES = {
    "one device": (GridShape(), {}),
    "offloaded": (GridShape(data=2, x=2), {"offload": "optimizer", "zero": 1, "precision": "bf16"}),
    "scanned": (GridShape(z=2, y=2), {"scan_layers": "yes"}),
    "pipelined": (GridShape(pipe=2, x=2), {"microbatches": 2}),
}


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[pytest.mark.slow] if case in ("one device", "scanned") else []) for case in CASES],
)
def test_the_trained_module_comes_back(case):
    axes, options = CASES[case]
    given = grids.model_on(replace(SHAPE, layers=2) if case == "scanned" else SHAPE, grids.lay(GridShape()))
    initial = jax.tree.map(np.asarray, split_module(given).params)
    trainer = make_trainer(given, optax.adam(1e-2), grids.lay(axes), **{"precision": "fp32", **options})
    trainer.step(BATCH)
    model, wanted = trainer.model, jax.tree.map(np.asarray, trainer.engine.params)
    held_out = trainer.evaluate([BATCH]) if case == "offloaded" else 0.0
    trainer.step(BATCH)  # uses its own arrays up, not the module's
    trainer.close()
    assert type(model) is type(given)
    parts = split_module(model)
    assert list(parts.params) == list(initial)  # in the module's own order, layers that were stacked by themselves
    for name, value in parts.params.items():
        assert value.sharding.memory_kind == jax.devices()[0].default_memory().kind
        np.testing.assert_array_equal(value, wanted[name])
        assert not np.array_equal(value, initial[name]), name
    if held_out:  # the masters were in host memory, split over data: the module can be called all the same
        total = jax.jit(lambda model, batch: model.loss(batch[:, :-1], batch[:, 1:]))(model, BATCH)
        np.testing.assert_allclose(float(total) / BATCH[:, 1:].size, held_out, rtol=1e-2)  # that of bfloat16 weights


def test_without_the_weights_of_other_processes_there_is_no_module(monkeypatch):
    trainer = make_trainer(grids.model_on(SHAPE, grids.lay(GridShape())), optax.sgd(0.1), grids.lay(GridShape()))
    here = dict(list(trainer.engine.params.items())[1:])
    monkeypatch.setattr(SpmdEngine, "params", here)
    count = len(here)
    with pytest.raises(UserError, match=f"'{count} of {count + 1} parameters here': a pipeline of one"):
        _ = trainer.model
