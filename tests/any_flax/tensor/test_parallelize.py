"""A parallelized model trains as the plain one: loss curves, gradients, statistics, train and eval mode."""

import functools
import re

import flax_models
import grids
import jax
import jax.numpy as jnp
import layer_zoo
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from axonn_jax.any_flax.parallelize.api import parallelize
from axonn_jax.any_flax.parallelize.report import sharding_report

EPS = float(np.finfo(np.float32).eps)
STEPS = 20

# A sum of n float32 products is off by about sqrt(n) eps, whatever the order; gradients here sum at most 16 * 64 rows
# (the CNN's 16 * 64 pixels), so 32 eps, and pass through up to a dozen such sums on their way back.
GRADIENT_TOLERANCE = 400 * EPS
# Adam divides gradients by their own size, so that a rounding of 400 eps of one moves a parameter by lr * 400 eps a
# step, which later steps feed on; a parameter whose true gradient is zero (a key's bias) wanders, without effect.
CURVE_TOLERANCE = 2e-4


@functools.cache
def plain_curve(name):
    return flax_models.train(flax_models.script(name).make(), name, STEPS)[0]


CURVES = [("mlp", (2, 1, 1, 1)), ("transformer", (2, 2, 2, 1)), ("vit", (1, 2, 2, 2)), ("cnn", (2, 1, 2, 2))]
SLOW = [
    *(("mlp", axes) for axes in ((1, 2, 1, 1), (1, 1, 2, 1), (1, 1, 1, 2), (1, 2, 2, 2))),
    *(("transformer", axes) for axes in ((1, 2, 2, 2), (2, 1, 2, 2))),
] + [
    (name, axes)
    for name in ("transformer", "vit", "cnn")
    for axes in [(8, 1, 1, 1), (1, 4, 1, 1), (1, 1, 4, 1), (1, 1, 1, 4), (2, 2, 2, 1), (2, 2, 1, 2), (1, 1, 2, 4)]
    if (name, axes) not in CURVES
]
CASES = CURVES + [pytest.param(*case, marks=pytest.mark.slow) for case in SLOW]


@pytest.mark.parametrize(("name", "axes"), CASES, ids=str)
def test_loss_curve_equals_the_unsharded_scripts(name, axes):
    script, grid = flax_models.script(name), grids.over(*axes)
    batch = next(script.batches(1))
    model = parallelize(script.make(), grid, call=script.call(batch))
    losses, optimizer, _ = flax_models.train(model, name, STEPS, grid.shard_batch)
    want = plain_curve(name)
    assert want[-1] < want[0]
    np.testing.assert_allclose(losses, want, rtol=CURVE_TOLERANCE)
    # Moments lie as their parameters do, and no sharded layer's have moved since they were placed.
    again = parallelize(script.make(), grid, call=script.call(batch))
    assert "axonn_plan=" in str(again)
    assert "Mesh(" not in str(again)
    sharded = {entry.path for entry in sharding_report(again).entries if entry.plan.sharded}
    trees = [nnx.state(model, nnx.Param), optimizer.opt_state[0].mu, optimizer.opt_state[0].nu]
    after = [dict(nnx.to_flat_state(tree)) for tree in trees]
    for path, param in nnx.to_flat_state(nnx.state(again, nnx.Param)):
        if ".".join(map(str, path[:-1])) in sharded:
            born = param.get_value().sharding
            assert all(each[path].get_value().sharding.is_equivalent_to(born, param.ndim) for each in after), path


@pytest.mark.parametrize(
    ("name", "with_call"),
    [
        ("transformer", True),
        ("cnn", True),
        ("mlp", False),
        *(pytest.param(*one, marks=pytest.mark.slow) for one in (("mlp", True), ("vit", True), ("transformer", False))),
    ],
)
def test_gradients_of_one_step(name, with_call):
    script, grid = flax_models.script(name), grids.over(1, 2, 2, 2)
    batch = next(script.batches(1))
    plain = script.make()
    model = parallelize(plain, grid, call=script.call(batch) if with_call else None)
    for each in (plain, model):
        each.set_attributes(deterministic=True, raise_if_not_found=False)  # gradients must not vanish by chance
    loss_want, want = nnx.jit(nnx.value_and_grad(script.loss))(plain, batch)
    loss, got = nnx.jit(nnx.value_and_grad(script.loss))(model, grid.shard_batch(batch))
    np.testing.assert_allclose(loss, loss_want, rtol=8 * EPS)
    want, got = (dict(nnx.to_flat_state(g)) for g in (want, got))
    assert want.keys() == got.keys()
    largest = max(float(jnp.max(jnp.abs(g.get_value()))) for g in want.values())
    for path, grad in want.items():
        exact, here = (np.asarray(g.get_value()) for g in (grad, got[path]))
        scale = max(np.max(np.abs(exact)), 1e-2 * largest)  # a bias before a softmax or batch norm has rounding only
        assert np.max(np.abs(here - exact)) <= GRADIENT_TOLERANCE * scale, path
    if name == "cnn":
        check_statistics(plain, model, batch)


def check_statistics(plain, model, batch):
    """Batch statistics are those of the global batch, and used in eval mode."""
    want = dict(nnx.to_flat_state(nnx.state(plain, nnx.BatchStat)))
    for path, stat in nnx.to_flat_state(nnx.state(model, nnx.BatchStat)):
        np.testing.assert_allclose(stat.get_value(), want[path].get_value(), rtol=64 * EPS, atol=64 * EPS)
    plain.eval()
    model.eval()
    evaluated = [nnx.jit(lambda m, b: m(b["image"]))(m, batch) for m in (plain, model)]
    np.testing.assert_allclose(*evaluated, atol=64 * EPS * float(jnp.abs(evaluated[0]).max()))


def test_a_grid_of_one_device_is_the_identity():
    model = flax_models.script("mlp").make()
    assert parallelize(model, grids.over(1, 1, 1, 1)) is model


@pytest.mark.parametrize("with_call", [True, False], ids=["flow", "order"])
def test_einsum_attention_and_a_tied_table(with_call):
    grid = grids.over(1, 2, 2, 2)
    plain = layer_zoo.Einsums(nnx.Rngs(1))
    ids = np.random.default_rng(0).integers(-64, 64, (8, 6), dtype=np.int32)
    model = parallelize(plain, grid, call=(lambda m: m(ids)) if with_call else None)
    specs = {name: getattr(model, name).kernel.get_value().sharding.spec for name in ("query", "both", "out")}
    assert specs["query"] == P(("x", "z"), "y", None)
    if with_call:  # definition order cannot know that `both` takes what `query` takes
        assert specs["both"] == P(None, ("x", "z"), "y", None)
        assert specs["out"] == P(("y", "z"), None, "x")

    def loss(m, ids):
        return jnp.mean(jnp.square(m(ids)))

    want = nnx.jit(nnx.value_and_grad(loss))(plain, ids)
    got = nnx.jit(nnx.value_and_grad(loss))(model, grid.shard_batch(ids))
    for a, b in zip(jax.tree.leaves(want), jax.tree.leaves(got), strict=True):
        np.testing.assert_allclose(b, a, atol=64 * EPS * float(jnp.abs(a).max()))
    outside = np.full((8, 6), 64, np.int32)
    assert bool(jnp.all(jnp.isnan(model.embed(grid.shard_batch(outside)))))


def test_bfloat16_layers_keep_their_dtypes():
    grid = grids.over(1, 2, 2, 2)
    plain = nnx.Linear(16, 32, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    x = jnp.ones((8, 16), jnp.bfloat16)

    def loss(m, x):
        y = m(x)
        return jnp.mean(jnp.square(y.astype(jnp.float32))), y

    step = nnx.jit(nnx.grad(loss, has_aux=True))
    # Gradients are summed over `data` in float32, on a grid where nothing else is.
    lowered = step.lower(parallelize(plain, grids.over(4, 2, 1, 1)), x).as_text()
    sums = re.findall(r"stablehlo.all_reduce.*?\) -> tensor<([^>]*)>", lowered, re.DOTALL)
    assert {"8x32xf32", "32xf32"} <= set(sums)
    assert not any("bf16" in each for each in sums)
    grads, y = step(parallelize(plain, grid), grid.shard_batch(x))
    for a, b in zip(jax.tree.leaves(step(plain, x)[0]), jax.tree.leaves(grads), strict=True):
        assert b.dtype == jnp.float32
        np.testing.assert_allclose(b, a, atol=2**-7 * float(jnp.abs(a).max()))
    assert y.dtype == jnp.bfloat16
    assert y.sharding.is_equivalent_to(NamedSharding(grid.mesh, P(("data", "z"), "y")), 2)
    np.testing.assert_allclose(
        np.asarray(y, np.float32), np.asarray(plain(x), np.float32), atol=2**-7 * float(jnp.abs(plain(x)).max())
    )
