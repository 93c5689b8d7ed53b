"""What `parallelize` decides, says and refuses; the collectives of what it makes."""

from collections import Counter

import flax_models
import grids
import hlo_text
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from jax.sharding import PartitionSpec as P

import axonn_jax as ax
from axonn_jax.core.grid import GridShape


def _roles(model):
    return {entry.path: entry.roles for entry in ax.sharding_report(model).entries}


@pytest.mark.parametrize("name", ["mlp", "transformer", "vit", "cnn"])
def test_type_names_shapes_and_values_of_parameters_stay(name):
    plain = flax_models.script(name).make()
    model = ax.parallelize(plain, grids.over(1, 2, 2, 2))
    assert type(model) is type(plain)
    before, after = (dict(nnx.to_flat_state(nnx.state(m, nnx.Param))) for m in (plain, model))
    assert before.keys() == after.keys()
    for path, param in before.items():
        np.testing.assert_array_equal(param.get_value(), after[path].get_value())
        assert len(param.get_value().sharding.device_set) == 1  # the original is as it was
        assert len(after[path].get_value().sharding.device_set) == 8
    merged = nnx.merge(*nnx.split(model))
    assert _roles(merged) == _roles(model)


BLOCK = {"norm_1": "x", "attention.query": "x -> y", "attention.key": "x -> y", "attention.value": "x -> y",
         "attention.out": "y -> x", "norm_2": "x", "up": "x -> y", "down": "y -> x"}  # fmt: skip


@pytest.mark.parametrize("with_call", [True, False], ids=["flow", "order"])
def test_roles_alternate_and_branches_share_theirs(with_call):
    script = flax_models.script("transformer")
    batch = next(script.batches(1))
    model = ax.parallelize(script.make(), grids.over(1, 2, 2, 2), call=script.call(batch) if with_call else None)
    want = {f"blocks.{i}.{name}": roles for i in range(2) for name, roles in BLOCK.items()}
    want |= {"tokens": "y -> x", "positions": "y -> x", "norm": "x", "head": "x -> y"}
    assert _roles(model) == want
    assert model.blocks[0].up.kernel.get_value().sharding.spec == P(("x", "z"), "y")
    assert model.blocks[0].down.kernel.get_value().sharding.spec == P(("y", "z"), "x")


class Odd(nnx.Module):
    """Things that cannot be split, wholly or in part."""

    def __init__(self, rngs):
        self.first = nnx.Linear(3, 8, rngs=rngs)
        self.masked = nnx.Conv(8, 8, (1,), mask=jnp.tri(8)[None], rngs=rngs)
        self.grouped = nnx.Conv(8, 8, (3,), feature_group_count=4, rngs=rngs)
        self.nothing = nnx.Linear(5, 7, rngs=rngs)
        self.transposed = nnx.ConvTranspose(8, 5, (3,), rngs=rngs)
        self.prelu = nnx.PReLU()
        self.shift = nnx.Param(jnp.zeros(5))

    def __call__(self, x):
        x = self.grouped(self.masked(nnx.silu(self.first(x))))
        return self.nothing(self.prelu(self.transposed(x) + self.shift[...]))


def _gradients(model, x):
    """Gradients of a loss of the model, by path."""
    grads = nnx.jit(nnx.grad(lambda m, x: jnp.mean(jnp.square(m(x) - 1.0))))(model, x)
    return {path: grad.get_value() for path, grad in nnx.to_flat_state(grads)}


def test_what_cannot_be_split_is_listed_with_the_reason_and_still_right():
    grid, plain = grids.over(1, 2, 2, 2), Odd(nnx.Rngs(0))
    model = ax.parallelize(plain, grid)
    text = str(ax.sharding_report(model))
    assert _roles(model) == {"(model)": "replicated", "first": ". -> y", "masked": "replicated", "grouped": "y -> y",
                             "nothing": "replicated", "transposed": "x -> .", "prelu": "replicated"}  # fmt: skip
    for line in (
        "(model): a Odd has no sharded form; 20 B whole",
        "first: input 3 does not divide by x = 2",
        "masked: a masked convolution; 288 B whole",
        "nothing: input 5 does not divide by y = 2; output 7 does not divide by x = 2; "
        "no dim of its weight (5, 7) divides by z = 2; 168 B whole",
        "transposed: output 5 does not divide by y = 2; 20 B whole",
        "prelu: a PReLU has no sharded form; 4 B whole",
    ):
        assert line in text.splitlines(), text
    x = np.random.default_rng(0).standard_normal((8, 5, 3)).astype(np.float32)
    got = _gradients(model, grid.shard_batch(x))
    for path, grad in _gradients(plain, x).items():  # a few roundings of float32 numbers
        np.testing.assert_allclose(got[path], grad, atol=1e-5 * float(jnp.abs(grad).max()), err_msg=str(path))


def test_overrides():
    make = flax_models.script("transformer").make
    grid = grids.over(1, 1, 2, 2)
    overrides = {"blocks.*.attention.*": "replicated", "blocks.1.*.out": "y", "head": "y"}
    roles = _roles(ax.parallelize(make(), grid, overrides=overrides))
    assert roles["blocks.0.attention.out"] == roles["blocks.1.attention.query"] == "replicated"
    assert roles["blocks.1.attention.out"] == "y -> x"
    assert roles["head"] == "y -> x"
    notes = str(ax.sharding_report(ax.parallelize(make(), grid, overrides={"head": "y"}))).splitlines()
    assert "head: its input arrives over x" in notes


def test_predicted_collectives_are_the_compiled_ones():
    """Kind, axis and buffer bytes of every collective of an MLP's forward and backward pass, and no others."""
    script, grid = flax_models.script("mlp"), grids.over(1, 2, 2, 2)
    batch = next(script.batches(1))
    model = ax.parallelize(script.make(), grid, call=script.call(batch))
    step = nnx.jit(nnx.value_and_grad(script.loss))
    compiled = step.lower(model, grid.shard_batch(batch)).compile().as_text()
    predicted: Counter = Counter()
    again = []
    for entry in ax.sharding_report(model).entries:
        for transfer in entry.transfers:
            if transfer.kind == "all-gather" and transfer.backward:
                again.append(transfer)
            else:
                predicted[transfer.kind, transfer.axes] += transfer.buffer
    found: Counter = Counter()
    for collective in hlo_text.collectives(compiled):
        axes = tuple(axis for axis in grid.mesh.axis_names if collective.crosses(grid.mesh, axis))
        # The text shows the result: of a scatter a shard, of the others the whole buffer.
        found[collective.kind, axes] += collective.bytes * (2 if collective.kind == "reduce-scatter" else 1)
    # The script's own mean is summed over z and x, a number each.
    predicted["all-reduce", ("z",)] += 4
    predicted["all-reduce", ("x",)] += 4
    # XLA's CPU compiler drops the barrier and merges the backward pass's gathers with the forward's; since jax 0.12 it
    # does not.
    for transfer in again if jax.__version_info__ >= (0, 12) else ():
        predicted[transfer.kind, transfer.axes] += transfer.buffer
    assert found == predicted


@pytest.mark.parametrize(
    "name", ["transformer", *(pytest.param(name, marks=pytest.mark.slow) for name in ("vit", "cnn"))]
)
def test_no_relayout_between_layers(name):
    """Gathers and scatters are over z only, and nothing is permuted or exchanged."""
    script, grid = flax_models.script(name), grids.over(1, 2, 2, 2)
    batch = next(script.batches(1))
    model = ax.parallelize(script.make(), grid, call=script.call(batch))
    compiled = nnx.jit(nnx.value_and_grad(script.loss)).lower(model, grid.shard_batch(batch)).compile().as_text()
    for collective in hlo_text.collectives(compiled):
        axes = [axis for axis in grid.mesh.axis_names if collective.crosses(grid.mesh, axis)]
        assert collective.kind == "all-reduce" or axes == ["z"], (collective.kind, axes, collective.bytes)
        assert collective.kind in ("all-reduce", "all-gather", "reduce-scatter")


class Linen(linen.Module):
    @linen.compact
    def __call__(self, x):
        return linen.Dense(4)(x)


def test_refusals_are_one_line():
    grid = grids.over(1, 1, 2, 1)
    model = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    staged = grids.lay(GridShape(2, 1, 1, 2, 1))
    cases = [
        (lambda: ax.parallelize(Linen(), grid), "model = 'Linen': a flax.nnx.Module; a Linen model is paral"),
        (lambda: ax.parallelize({"w": 1}, grid), "model = 'dict': an instance of a flax.nnx.Module"),
        (lambda: ax.parallelize(model, staged), "grid.pipe = 2: 1 for parallelize"),
        (lambda: ax.parallelize(model, grid.mesh), "grid = 'Mesh': a grid, as ax.init returns one"),
        (
            lambda: ax.parallelize(model, grid, call=np.ones((2, 4))),
            "call = 'ndarray': a call of the model, as lambda m:",
        ),
        (
            lambda: ax.parallelize(model, grid, call=lambda model: model(np.ones((2, 3)))),
            "",
        ),
        (lambda: ax.parallelize(ax.parallelize(model, grid), grid), "a model that is not parallelized already"),
        (
            lambda: ax.parallelize(nnx.Sequential(model), grid, overrides={"layer.0": "x"}),
            "overrides['layer.0'] = 'x': a pattern that matches the path of some layer that can be split; "
            "did you mean 'layers.0'?",
        ),
        (lambda: ax.parallelize(model, grid, overrides=["*"]), "overrides = ['*']: a mapping or None"),
        (
            lambda: ax.sharding_report(nnx.state(model)),
            "model = 'State': an instance of Module or an inst",
        ),
        (lambda: grid.shard_batch({"name": "text"}), "batch['name'] = 'str': an array of numbers, rows first"),
        (lambda: ax.parallelize(model, grid, overrides={"*": "z"}), "overrides['*'] = 'z': one of 'x', 'y', 'rep"),
        (
            lambda: grids.over(2, 2, 1, 1).shard_batch({"image": np.zeros((6, 2)), "scale": 1.0}),
            "batch['image'] rows = 6: a multiple of data*z = 4; nearest: 4 or 8",
        ),
    ]
    for run, line in cases:
        with pytest.raises(ax.UserError) as caught:
            run()
        assert line in str(caught.value)
        assert "\n" not in str(caught.value)


def test_linen_through_the_bridge_trains_replicated():
    grid = grids.over(2, 2, 1, 2)
    x = np.random.default_rng(0).standard_normal((8, 4)).astype(np.float32)
    plain = nnx.bridge.ToNNX(Linen(), rngs=nnx.Rngs(0)).lazy_init(x)
    model = ax.parallelize(plain, grid)
    got = _gradients(model, grid.shard_batch(x))
    for path, grad in _gradients(plain, x).items():
        np.testing.assert_allclose(got[path], grad, atol=1e-5 * float(jnp.abs(grad).max()), err_msg=str(path))
    assert set(_roles(model).values()) <= {"replicated"}


def test_a_model_without_values_is_planned_too():
    """nnx.eval_shape's models get shardings, so that a run can be compiled before it exists."""
    model = nnx.eval_shape(flax_models.script("mlp").make)
    kernel = ax.parallelize(model, grids.over(1, 2, 2, 2)).layers.layers[0].kernel.get_value()
    assert isinstance(kernel, jax.ShapeDtypeStruct)
    assert kernel.sharding.spec == P(("x", "z"), "y")
