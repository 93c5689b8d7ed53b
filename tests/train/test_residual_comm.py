"""With blocks that gather the residual stream, every grid still computes the plain model's loss, gradients and norm."""

import functools
from dataclasses import replace
from itertools import product

import grids
import numpy as np
import optax
import pytest
from flax import nnx
from trainers import make_trainer

from axonn_jax.checkpoint.restore import load_weights, named_checkpoint
from axonn_jax.distributed.host_sync import LocalSync
from axonn_jax.errors import UserError
from axonn_jax.grid import GridShape
from axonn_jax.models.block_comm import ALL_REDUCE, BlockComm
from axonn_jax.models.presets import preset
from axonn_jax.models.declared.residual_comm import choose_residual_comm
from axonn_jax.models.transformer import Transformer
from axonn_jax.planner.communication.predict import predict
from axonn_jax.planner.communication.step import StepSpec

CURVE_TOLERANCE = 2e-6  # as for the curves of grids (test_trainer)
BOTH = BlockComm(attention=True, mlp=True)
SMALL = replace(grids.LLAMA, layers=1)


def cases():
    """One, of fourfold x; every grid with x of 2, 4 and 8, every policy, halves, sub-batches and orders are slow."""
    few = [
        ("llama", GridShape(1, 2, 1, 1, 4), BOTH, {"activations": "full", "scanned": True}),
    ]
    for model, axes, inner, options in few:
        yield pytest.param(model, axes, inner, options, id="-".join([model, grids.name(axes), *options]))
    policies = ("none", "full", "dots", "save_collectives")
    for model, axes, policy in product(grids.MODELS, grids.all_grids(2, 4, 8), policies):
        if axes.x > 1:
            name = f"{model}-{grids.name(axes)}-{policy}-slow"
            options = {"activations": policy, "scanned": policy in ("full", "dots")}
            yield pytest.param(model, axes, BOTH, options, id=name, marks=pytest.mark.slow)
    rest = (
        (BlockComm(attention=True), {}),
        (BlockComm(mlp=True), {"activations": "full"}),
        (BOTH, {"sub_batches": 2, "ordered": True}),
        (BOTH, {"sub_batches": 2, "ordered": True, "activations": "save_collectives"}),
        (BOTH, {"zero": True}),
        (BOTH, {"reshard_after": "step", "activations": "full"}),
    )
    for model, axes, (inner, options) in product(
        grids.MODELS, (GridShape(1, 1, 2, 2, 2), GridShape(1, 2, 2, 1, 2)), rest
    ):
        name = "-".join([model, grids.name(axes), str(inner), *options, "slow"])
        yield pytest.param(model, axes, inner, options, id=name, marks=pytest.mark.slow)


@pytest.mark.parametrize(("model", "axes", "inner", "options"), list(cases()))
def test_loss_gradients_and_norm_equal_the_plain_model(model, axes, inner, options):
    got = grids.gradients(grids.MODELS[model], axes, layout={"comm": inner}, **options)
    grids.check_gradients(got, grids.reference(model))


def curve(axes, inner, steps=6, **options):
    trainer = make_trainer(
        lambda: Transformer(SMALL, rngs=nnx.Rngs(0), comm=inner), optax.adamw(3e-3), grids.lay(axes),
        clip=0.5, microbatches=2, precision="fp32", **options,
    )  # fmt: skip
    batches = np.random.default_rng(0).integers(0, SMALL.vocab, (4, 8, SMALL.seq_len + 1))
    losses = [float(trainer.step(batches[step % 4])["loss"]) for step in range(steps)]
    return [*losses, trainer.evaluate([batches[0]])], trainer


@functools.cache
def one_device():
    return curve(GridShape(), ALL_REDUCE)[0]


@pytest.mark.parametrize(
    ("axes", "options"),
    [
        pytest.param(GridShape(2, 1, 1, 1, 2), {}, marks=pytest.mark.slow),
        pytest.param(GridShape(2, 1, 1, 2, 2), {"activations": "save_collectives"}, marks=pytest.mark.slow),
        pytest.param(GridShape(2, 2, 1, 1, 2), {"activations": "full", "zero": 1}, marks=pytest.mark.slow),
        pytest.param(GridShape(1, 2, 1, 2, 2), {"zero": 1}, marks=pytest.mark.slow),
        pytest.param(GridShape(1, 1, 2, 1, 4), {"offload": "optimizer"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_training_follows_the_curve_of_one_device(axes, options):
    losses, trainer = curve(axes, BOTH, **options)
    trainer.close()
    np.testing.assert_allclose(losses, one_device(), rtol=CURVE_TOLERANCE)


@pytest.mark.slow
def test_weights_go_from_one_layout_to_the_other(tmp_path):
    axes = GridShape(x=4, z=2)
    _, spread = curve(axes, BOTH)
    spread.save(tmp_path, 6)
    _, papers = curve(axes, ALL_REDUCE, steps=0)
    saved = load_weights(named_checkpoint(tmp_path, LocalSync(), pytest.fail, "checkpoint"), papers.engine.params)
    for name, value in spread.engine.params.items():
        np.testing.assert_array_equal(np.asarray(saved[name]), np.asarray(value), err_msg=name)


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
            found = predict(StepSpec(shape, grid, 2, activations=policy, comm=inner))
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
        make_trainer(Transformer(shape, rngs=nnx.Rngs(0), comm=BOTH), optax.sgd(0.1), grids.lay(grid))
    with pytest.raises(
        UserError, match=r"tensor.residual_comm = 'gather': all_reduce or auto with memory.sequence_parallel"
    ):
        choose_residual_comm("gather", grids.GPT, grid, "none", sequence_split=True)
    assert choose_residual_comm("auto", grids.GPT, grid, "none", sequence_split=True) == BlockComm(sequence_split=True)
