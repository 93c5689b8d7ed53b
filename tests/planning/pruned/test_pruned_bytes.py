"""Bytes of pruned training: what travels over `data`, what lives between steps, what a step needs beside it."""

from dataclasses import replace
from math import prod

import grids
import numpy as np
import pytest
from hlo.collectives import collectives
from pruned_runs import SHAPE, batches, model, optimizer
from trainers import make_trainer

import axonn_jax as ax
from axonn_jax.core.grid import GridShape
from axonn_jax.core.pruned.prune import prunable
from axonn_jax.core.tensor.specs import spec_axes

GRIDS = [
    GridShape(1, *axes)
    for axes in [(2, 1, 1, 1), (2, 2, 2, 1), (4, 1, 1, 2), (2, 1, 2, 1), (2, 2, 1, 1), (2, 2, 1, 2),
                 (4, 1, 2, 1), (4, 2, 1, 1), (8, 1, 1, 1), (2, 1, 2, 2)]
]  # fmt: skip
WIDE = replace(SHAPE, hidden=128, ffn=256, vocab=64)
FEW = 16
"""Elements of a message that is no gradient: norm, loss, counts."""


def made(axes, density=0.1, shape=SHAPE, **options):
    return make_trainer(model(shape), optimizer(), grids.lay(axes), prune=ax.PruneConfig(density=density), **options)


@pytest.mark.parametrize(
    "axes",
    [pytest.param(axes, marks=[] if number < 2 else [pytest.mark.slow]) for number, axes in enumerate(GRIDS)],
    ids=map(grids.name, GRIDS),
)
def test_bytes_over_data_are_those_of_the_slots(axes):
    engine = made(axes, shape=WIDE).engine
    program = engine.compiled_step(batches(1, WIDE)[0]).as_text()
    sizes = {axis: getattr(axes, axis) for axis in ("data", "z", "y", "x")}
    large = [one for one in collectives(program, sizes) if one.whole > 4 * FEW]
    over_data = [one for one in large if "data" in one.axes]
    state = engine.program.state_shapes
    assert float(sum(one.bytes for one in over_data)) == pytest.approx(sum(each(engine, axes, state)), rel=1e-9)
    dense = {name: p.shape for name, p in engine.parts.params.items() if name in engine.program.forms.shapes}
    values = {name: state[name] for name in dense}
    of_dense = sum(each(engine, axes, values)) / sum(each(engine, axes, dense))
    assert 0.1 <= of_dense <= 0.1 * 1.1  # shards keep some hundred entries, and as many slots as the fullest


def each(engine, axes, shapes):
    """Bytes of each gradient's all-reduce over `data`, and `z` where that does not split it."""
    for name, shape in shapes.items():
        spec = engine.parts.specs[name]
        local = prod(shape) // prod(getattr(axes, axis) for axis in spec_axes(spec))
        group = axes.data * (1 if "z" in spec_axes(spec) else axes.z)
        yield 2 * (group - 1) / group * 4 * local


@pytest.mark.parametrize(
    ("density", "options"),
    [
        pytest.param(
            density, options, marks=[] if (density, len(options)) in ((0.1, 2), (0.5, 0)) else [pytest.mark.slow]
        )
        for density in (0.1, 0.2, 0.5)
        for options in ({}, {"precision": "bf16"}, {"precision": "bf16", "accumulate": "compute"})
    ],
    ids=str,
)
def test_state_is_as_large_as_the_formula_says(density, options):
    trainer = made(GridShape(), density, WIDE, **options)
    assert np.isfinite(float(trainer.step(batches(1, WIDE)[0])["loss"]))
    reports = trainer.engine.memory()[0]
    planned, counted = reports["planned"], reports["counted_between_steps"]["device"]
    assert counted == planned["device"] - planned["gradients"]  # which are there in a step alone
    params = trainer.engine.parts.params
    kernels = sum(params[name].size for name in prunable(trainer.engine.parts, "blocks"))
    rest = sum(p.size for p in params.values()) - kernels
    weight = 2 if options else 4
    sums = 2 if "accumulate" in options else 4
    moments_and_masters = 12 if options else 8
    of_rest = rest * (weight + sums + moments_and_masters)
    formula = kernels * (weight + (16 + sums) * density)
    assert planned["device"] - of_rest == pytest.approx(formula, rel=0.01)


def test_no_dense_gradients_pile_up_with_layers_in_a_loop():
    temporaries = []
    for layers in (4, 8):
        shape = replace(WIDE, layers=layers)
        engine = made(GridShape(), 0.01, shape, scan_layers="yes", activations="full").engine
        analysis = engine.compiled_step(batches(1, shape)[0]).memory_analysis()
        temporaries.append(analysis.temp_size_in_bytes)
        layer = 4 * sum(p.size for name, p in engine.parts.params.items() if name.startswith("blocks.0."))
    # A layer more keeps its input and, of a hundredth of its entries, sums and gradients.
    assert temporaries[1] - temporaries[0] <= 4 * (4 * 8 * shape.seq_len * shape.hidden + 0.06 * layer)
