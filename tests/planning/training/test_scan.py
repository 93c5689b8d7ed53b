"""Scanned layers compute what unrolled ones do, under the same names, in a program that does not grow with depth."""

from dataclasses import replace

import grids
import jax
import live
import numpy as np
import optax
import pytest
from flax import nnx
from hlo.steps import compile_abstract, instructions
from trainers import again, ids, losses, make_trainer

from axonn_jax.core.checkpoint import orbax
from axonn_jax.core.checkpoint.snapshot import snapshot
from axonn_jax.core.engines import base
from axonn_jax.core.engines.scan_layers import LAYERS, choose_stack
from axonn_jax.core.errors import UserError
from axonn_jax.core.models import stacked
from axonn_jax.core.models.stacked import stack_layers
from axonn_jax.core.settings import MemoryConfig, TensorConfig
from axonn_jax.core.tensor.params import split_module
from axonn_jax.models import SequenceModel, Transformer

ALL = grids.GridShape(1, 1, 2, 2, 2)
SMALL = replace(grids.GPT, layers=3, seq_len=8)


def decayed(params):
    """A mask by dims and one by name, both alike for all layers."""
    return {name: p.ndim >= 2 and "mlp" not in name for name, p in params.items()}


def train(scan_layers, axes, optimizer=None, *, steps, **options):
    grid = grids.lay(axes)
    optimizer = optimizer or optax.adamw(3e-3, weight_decay=0.1, mask=decayed)
    model = grids.model_on(SMALL, grid)
    trainer = make_trainer(model, optimizer, grid, clip=0.5, scan_layers=scan_layers, **options)
    return trainer, losses(trainer, again(ids(SMALL.vocab, 4, 8, SMALL.seq_len + 1), steps))


def test_the_curve_of_20_steps_and_what_users_see_are_those_of_unrolled_layers():
    plain, want = train("no", grids.GridShape(), steps=20)
    scanned, curve = train("yes", ALL, steps=20, microbatches=2)
    np.testing.assert_allclose(curve, want, rtol=grids.CURVE_TOLERANCE)
    assert curve[-1] < curve[0] - 0.2
    assert jax.tree.structure(scanned.engine.params) == jax.tree.structure(plain.engine.params)
    assert jax.tree.structure(scanned.engine.opt_state) == jax.tree.structure(plain.engine.opt_state)
    mine, theirs = ((t.engine.params, t.engine.opt_state) for t in (scanned, plain))
    for (path, a), b in zip(jax.tree.leaves_with_path(mine), jax.tree.leaves(theirs), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype), path
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5, err_msg=str(path))
    specs = split_module(grids.model_on(SMALL, scanned.engine.grid)).specs
    for name, value in scanned.engine.params.items():
        sharding = jax.sharding.NamedSharding(scanned.engine.grid.mesh, specs[name])
        assert value.sharding.is_equivalent_to(sharding, value.ndim), name
        moment = scanned.engine.opt_state[0].mu[name]
        assert moment.sharding.is_equivalent_to(sharding, value.ndim), name
    stacked_kernel = scanned.engine.train_state.model.weights["blocks.every.mlp.up.kernel"]
    assert stacked_kernel.shape == (SMALL.layers, SMALL.hidden, SMALL.ffn)
    batch = ids(SMALL.vocab, 8, SMALL.seq_len + 1, seed=1)
    assert scanned.evaluate([batch]) == pytest.approx(plain.evaluate([batch]), rel=grids.CURVE_TOLERANCE)


@pytest.mark.parametrize("in_memory", ["of the host", pytest.param("of their own", marks=pytest.mark.slow)])
def test_saves_and_loads_take_one_state_on_the_devices(tmp_path, monkeypatch, in_memory):
    """Beside it a load takes both forms of one kind of parameter for a moment, here 11 % of all, and a save nothing.

    Sampled in a save is what there is when all layers of devices with memory of their own are on the host; those that
    compute in the host's memory have their copies made after that.
    """
    if in_memory == "of their own":
        monkeypatch.setattr(orbax, "on_the_hosts_cores", lambda value: False)
    before, most = jax.live_arrays(), {"save": 0, "read": 0, "join": 0}

    def sampled(name, function):
        def sample(*given):
            result = function(*given)
            most[name] = max(most[name], live.live_bytes(jax.devices()[0], before))
            return result

        return sample

    trainer = make_trainer(replace(SMALL, layers=8), optax.adamw(1e-3), grids.GridShape(), scan_layers="yes")
    trainer.step(np.zeros((2, 9), np.int32))
    state = sum(leaf.nbytes for leaf in jax.tree.leaves(trainer.engine.train_state.model))
    monkeypatch.setattr(orbax, "snapshot", lambda state: sampled("save", len)(state) and snapshot(state))
    monkeypatch.setattr(base, "load", sampled("read", base.load))
    monkeypatch.setattr(stacked, "_stack_arrays", sampled("join", stacked._stack_arrays))
    want = jax.tree.map(np.array, (trainer.engine.params, trainer.engine.opt_state))
    trainer.save(tmp_path, 1)
    trainer.load(tmp_path / "step_00000001")
    jax.tree.map(
        np.testing.assert_array_equal, jax.tree.map(np.asarray, (trainer.engine.params, trainer.engine.opt_state)), want
    )
    assert {name: size / state for name, size in most.items()} == {
        "save": pytest.approx(1.0, abs=0.01),
        "read": pytest.approx(1.0, abs=0.01),
        "join": pytest.approx(1.11, abs=0.01),
    }


OPTIMIZERS = {
    "sgd": optax.sgd(0.1, momentum=0.9),
    "lamb": optax.lamb(1e-2),
    "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=16),
    "by label": optax.multi_transform(
        {"matrix": optax.adamw(3e-3), "vector": optax.sgd(0.1)},
        lambda params: {name: "matrix" if p.ndim == 2 else "vector" for name, p in params.items()},
    ),
}


@pytest.mark.parametrize(
    "name", [*(pytest.param(n, marks=pytest.mark.slow) for n in OPTIMIZERS if n != "adafactor"), "adafactor"]
)
def test_optimizers_that_look_at_dims_and_norms_see_a_layer_at_a_time(name):
    plain, want = train("no", grids.GridShape(), OPTIMIZERS[name], steps=5)
    scanned, curve = train("yes", grids.GridShape(x=2), OPTIMIZERS[name], steps=5)
    np.testing.assert_allclose(curve, want, rtol=grids.CURVE_TOLERANCE)
    assert jax.tree.structure(scanned.engine.opt_state) == jax.tree.structure(plain.engine.opt_state)
    shapes = [[leaf.shape for leaf in jax.tree.leaves(trainer.engine.opt_state)] for trainer in (scanned, plain)]
    assert shapes[0] == shapes[1]


def frozen(index):
    """Freezes one layer."""
    return optax.masked(optax.set_to_zero(), lambda params: {n: n.startswith(f"blocks.{index}.") for n in params})


@pytest.mark.parametrize(
    ("optimizer", "why"),
    [
        (optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1)), "looks at all parameters together"),
        (optax.chain(optax.sgd(0.1), frozen(2)), "treats layers 0 and 2 differently"),
        (optax.masked(optax.sgd(0.1), {f"blocks.{i}.mlp.up.bias": True for i in range(3)}), "layers one by one"),
    ],
    ids=["all together", "one layer frozen", "a mask of all names"],
)
def test_optimizers_that_tell_layers_apart_are_refused_and_auto_unrolls(optimizer, why):
    model = nnx.eval_shape(lambda: Transformer(SMALL, rngs=nnx.Rngs(0)))
    with pytest.raises(UserError, match=why):
        choose_stack(model, split_module(model), optimizer, "yes")
    deep = nnx.eval_shape(lambda: Transformer(replace(SMALL, layers=LAYERS), rngs=nnx.Rngs(0)))
    assert not choose_stack(deep, split_module(deep), frozen(LAYERS - 1), "auto").layer_names


def test_auto_scans_many_layers_and_recomputed_ones_that_the_package_does_not_order():
    def scans(layers, **options):
        model = nnx.eval_shape(lambda: Transformer(replace(SMALL, layers=layers), rngs=nnx.Rngs(0)))
        return bool(choose_stack(model, split_module(model), optax.sgd(0.1), "auto", **options).layer_names)

    assert scans(LAYERS)
    assert not scans(LAYERS - 1)
    assert scans(2, activations="full")
    assert not scans(1, activations="full")
    assert not scans(LAYERS, ordered=True, activations="full")


def test_what_cannot_be_scanned_is_refused_by_name():
    layers = SequenceModel([nnx.Embed(8, 4, rngs=nnx.Rngs(0))], lambda x, t: x[..., 0])
    with pytest.raises(UserError, match="SequenceModel"):
        make_trainer(layers, optax.sgd(0.1), grids.GridShape(), scan_layers="yes")
    alternate = replace(SMALL, window=4, window_period=2)
    for shape, layers, least in ((SMALL, 1, "2$"), (alternate, 2, "4, a multiple of 2,"), (alternate, 5, "4, a mul")):
        size = replace(shape, layers=layers)
        few = nnx.eval_shape(lambda size=size: Transformer(size, rngs=nnx.Rngs(0)))
        with pytest.raises(UserError, match=f"^model.layers = {layers}: to scan layers, at least {least}"):
            stack_layers(few, split_module(few))
    unlike = Transformer(SMALL, rngs=nnx.Rngs(0))
    unlike.blocks[2].dropout = 0.5
    with pytest.raises(UserError, match=r"blocks.0 and blocks.2"):
        stack_layers(unlike, split_module(unlike))
    with pytest.raises(UserError, match="scan_layers"):
        make_trainer(SMALL, optax.sgd(0.1), grids.GridShape(2), microbatches=2, scan_layers="yes")


@pytest.mark.slow
@pytest.mark.parametrize("activations", ["none", "full"])
def test_the_program_does_not_grow_with_depth(activations):
    """Instructions of the whole step, update and reductions included."""

    def cost(layers, *, scanned):
        program = compile_abstract(
            replace(SMALL, layers=layers), grids.lay(ALL), optax.adamw(1e-3), sequences=4, microbatches=2,
            memory=MemoryConfig(precision="fp32", activations=activations),
            tensor=TensorConfig(scan_layers="yes" if scanned else "no"),
        )  # fmt: skip
        return instructions(program)

    few, many = (cost(layers, scanned=True) for layers in (12, 96))
    assert many <= 1.02 * few
    assert cost(12, scanned=False) > 4 * few
