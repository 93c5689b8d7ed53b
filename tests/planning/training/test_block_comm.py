"""Blocks that gather the residual stream or split its sequence; weights that stay gathered: curves and refusals."""

from dataclasses import replace
from itertools import product

import grids
import numpy as np
import optax
import pytest
from hlo.steps import compile_abstract
from jax.sharding import PartitionSpec as P
from trainers import again, ids, losses, make_trainer, transformer

from axonn_jax import GridShape, MemoryConfig, TensorConfig, UserError
from axonn_jax.core.grid import BATCH_AXES
from axonn_jax.core.models.block_comm import ALL_REDUCE, BlockComm
from axonn_jax.core.ops.costs import StepPolicy
from axonn_jax.models import preset
from axonn_jax.planning.communication import StepSpec, predict
from axonn_jax.planning.declared.residual_comm import choose_residual_comm

BOTH, SPLIT = BlockComm(attention=True, mlp=True), BlockComm(sequence_split=True)
SMALL = replace(grids.LLAMA, layers=1)


def curve(axes, comm, steps=6):
    trainer = make_trainer(
        transformer(SMALL, comm=comm), optax.adamw(3e-3), axes, clip=0.5, microbatches=2, precision="fp32"
    )
    batches = ids(SMALL.vocab, 4, 8, SMALL.seq_len + 1)
    return [*losses(trainer, again(batches, steps)), trainer.evaluate([batches[0]])], trainer


def test_a_split_stream_travels_through_a_pipeline_as_it_lies():
    """The curve is that of one device; test_cases has each communication beside every other setting."""
    losses, trainer = curve(GridShape(2, 1, 1, 2, 2), SPLIT)
    trainer.close()
    np.testing.assert_allclose(losses, curve(GridShape(), ALL_REDUCE)[0], rtol=grids.CURVE_TOLERANCE)
    first, *_ = trainer.engine.job._plan(8, SMALL.seq_len + 1)
    assert first[-1].stretch.y.sharding.spec == P(BATCH_AXES, "y", "x")


@pytest.mark.parametrize("policy", ["none", "full", "save_collectives"])
@pytest.mark.parametrize("model", ["gpt-5b", "llama2-7b", "llama2-70b"])
def test_auto_sends_no_more_than_either(model, policy):
    shape, chosen = preset(model), set()
    for y, x in product((1, 2, 4, 8), (1, 2, 4, 8)):
        grid = GridShape(z=2, y=y, x=x)
        try:
            shape.check_grid(grid)
        except UserError:
            continue

        def sent(inner, grid=grid):
            found = predict(StepSpec(shape, grid, 2, StepPolicy(activations=policy), comm=inner))
            return sum(one.bytes for one in found if one.phase != "update")

        auto = choose_residual_comm("auto", shape, grid, policy)
        halves = [
            one for one in (ALL_REDUCE, BlockComm(attention=True), BlockComm(mlp=True), BOTH) if one.fits(shape, grid)
        ]
        assert sent(auto) == min(map(sent, halves)), grid
        chosen.add(auto)
        assert auto == ALL_REDUCE or x > 1
    assert len(chosen) > 1


def test_what_does_not_divide_is_refused_and_auto_leaves_it():
    shape, grid = replace(grids.GPT, heads=2, kv_heads=2), GridShape(x=4)
    with pytest.raises(UserError, match=r"model.kv_heads = 2: a multiple of y\*x \(tensor.residual_comm\) = 4"):
        choose_residual_comm("gather", shape, grid, "none")
    assert choose_residual_comm("auto", shape, grid, "none") == BlockComm(mlp=True)
    with pytest.raises(UserError, match=r"model.kv_heads = 2"):
        make_trainer(transformer(shape, comm=BOTH), optax.sgd(0.1), grid)
    with pytest.raises(
        UserError, match=r"tensor.residual_comm = 'gather': all_reduce or auto with memory.sequence_parallel"
    ):
        choose_residual_comm("gather", grids.GPT, grid, "none", sequence_split=True)
    assert choose_residual_comm("auto", grids.GPT, grid, "none", sequence_split=True) == BlockComm(sequence_split=True)


@pytest.mark.slow
@pytest.mark.parametrize("activations", ["none", "full"])
def test_a_program_needs_less_memory(activations):
    """Of a model whose activations are most of its temporaries."""
    shape = replace(grids.GPT, layers=4, hidden=64, ffn=128, seq_len=512)

    def temporaries(**options):
        grid = grids.lay(GridShape(y=4))
        return compile_abstract(
            shape, grid, optax.sgd(0.1), sequences=4, memory=MemoryConfig(activations=activations),
            tensor=TensorConfig(scan_layers="yes"), **options,
        ).memory_analysis().temp_size_in_bytes  # fmt: skip

    assert temporaries(comm=SPLIT) < 0.8 * temporaries()


def test_sequences_that_do_not_split_are_refused_before_anything_compiles():
    odd = replace(grids.GPT, seq_len=18)
    with pytest.raises(UserError, match=r"model.seq_len = 18: a multiple of y .* = 4; nearest: 16 or 20; or grid.y"):
        make_trainer(transformer(odd, comm=SPLIT), optax.sgd(0.1), GridShape(y=4))
    with pytest.raises(UserError, match=r"model.seq_len = 18"):
        make_trainer(transformer(odd, comm=SPLIT), optax.sgd(0.1), GridShape(2, y=4), microbatches=2)
    trainer = make_trainer(transformer(grids.GPT, comm=SPLIT), optax.sgd(0.1), GridShape(y=4))
    with pytest.raises(UserError, match=r"sequence length = 7: with sequence parallelism a multiple of y = 4"):
        trainer.step(np.zeros((2, 8), np.int32))


# In bfloat16 every device rounds its gradient of a microbatch; "layer" rounds the sum over `z` once more, "step" adds
# in float32. Entries of two programs then differ by a few roundings of 2**-9 each.
BF16_TOLERANCE = 8 * 2.0**-9

MIXED = grids.GridShape(1, 2, 2, 1, 2)


@pytest.mark.parametrize("gather", ["step", pytest.param("backward", marks=pytest.mark.slow)])
def test_in_bfloat16_gradients_differ_by_roundings(gather):
    layer, kept = (
        grids.gradients(grids.GPT, MIXED, dtype="bfloat16", activations="full", reshard_after=one)
        for one in ("forward", gather)
    )
    grids.check_gradients(kept, layer, BF16_TOLERANCE, 2.0**-9)
