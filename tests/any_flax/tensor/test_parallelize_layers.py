"""Layers of every kind behind `parallelize`: loss, gradients and statistics are the plain model's, on every grid."""

import functools

import grids
import hlo_text
import jax
import jax.numpy as jnp
import layer_zoo
import numpy as np
import pytest
from flax import nnx
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import axonn_jax as ax
from axonn_jax.core.grid import GridShape

LOSS_TOLERANCE = 1e-6
# Of a parameter's largest entry. Sums of another order; the scan of the Mamba-like block feeds on its own roundings.
GRADIENT_TOLERANCE = 1e-5

# Grids on which XLA's partitioner makes wrong kernel gradients of grouped convolutions; a whole product takes minutes.
FAST = {
    "convolutions": [(1, 2, 2, 2)],
    "norms": [(1, 2, 2, 2)],
    "mamba": [(1, 2, 2, 2)],
    "einsums": [],  # test_parallelize has them on one grid
    "scanned": [(2, 1, 2, 2)],
}
EVERY = [(grid.data, grid.z, grid.y, grid.x) for grid in grids.all_grids(8)]
CASES = [
    pytest.param(kind, axes, marks=[] if axes in FAST[kind] else pytest.mark.slow)
    for kind in layer_zoo.MODELS
    for axes in EVERY
]


def one_step(model, script, batch):
    """Loss, gradients and the model's statistics afterwards."""
    loss, grads = nnx.jit(nnx.value_and_grad(script.loss))(model, batch)
    trees = (grads, nnx.state(model, nnx.BatchStat))
    return loss, *({path: np.asarray(v.get_value()) for path, v in nnx.to_flat_state(tree)} for tree in trees)


@functools.cache
def plain_step(kind):
    script = layer_zoo.script(kind)
    return one_step(script.make(), script, script.batch)


@pytest.mark.parametrize(("kind", "axes"), CASES, ids=str)
def test_loss_gradients_and_statistics_are_the_plain_models(kind, axes):
    check(layer_zoo.script(kind), plain_step(kind), axes, with_call=True)


@pytest.mark.slow
@pytest.mark.parametrize("kind", layer_zoo.MODELS)
def test_without_call_too(kind):
    check(layer_zoo.script(kind), plain_step(kind), (1, 2, 2, 2), with_call=False)


def check(script, plain, axes, *, with_call):
    grid = grids.lay(GridShape(1, *axes))
    model = ax.parallelize(script.make(), grid, call=(lambda m: m(script.batch["x"])) if with_call else None)
    loss, grads, stats = one_step(model, script, grid.shard_batch(script.batch))
    want_loss, want_grads, want_stats = plain
    assert all(np.any(g) for g in want_grads.values())
    errors = {path: np.max(np.abs(grads[path] - g)) / np.max(np.abs(g)) for path, g in want_grads.items()}
    worst = max(errors, key=errors.get)
    print(f"loss {abs(loss - want_loss) / want_loss:.1e} gradient {errors[worst]:.1e} {worst}")  # read with -rP
    np.testing.assert_allclose(loss, want_loss, rtol=LOSS_TOLERANCE)
    assert grads.keys() == want_grads.keys()
    assert errors[worst] <= GRADIENT_TOLERANCE, (worst, errors[worst])
    assert stats.keys() == want_stats.keys()
    for path, stat in stats.items():
        np.testing.assert_allclose(stat, want_stats[path], rtol=1e-5, atol=1e-6)


def test_groups_are_split_where_they_arrive():
    """A depthwise kernel lies over the axis of its features."""
    script = layer_zoo.script("mamba")
    model = ax.parallelize(script.make(), grids.lay(GridShape(1, 2, 1, 2, 2)), call=lambda m: m(script.batch["x"]))
    (conv,) = [entry for entry in ax.sharding_report(model).entries if entry.path == "blocks.0.conv"]
    assert conv.roles == "y -> y"
    assert conv.device_bytes == conv.bytes // 2
    assert [(t.kind, t.axes) for t in conv.transfers] == [("all-reduce", ("data",))] * 2
    assert model.blocks[0].conv.kernel.get_value().sharding.spec == P(None, None, "y")
    assert model.blocks[0].conv.bias.get_value().sharding.spec == P("y")


def test_groups_communicate_their_gradients_alone():
    grid = grids.lay(GridShape(1, 1, 2, 2, 2))
    layer = nnx.Conv(16, 16, (3,), feature_group_count=16, rngs=nnx.Rngs(0))
    model = ax.parallelize(layer, grid, overrides={"": "y"})
    x = jax.device_put(np.ones((8, 4, 16), np.float32), NamedSharding(grid.mesh, P(("data", "z"), None, "y")))
    step = nnx.jit(nnx.grad(lambda m, x: jnp.sum(jnp.square(m(x)))))
    found = hlo_text.collectives(step.lower(model, x).compile().as_text())
    (entry,) = ax.sharding_report(model).entries
    assert {c.kind for c in found} == {"all-reduce"}
    assert not any(c.crosses(grid.mesh, axis) for c in found for axis in ("y", "x"))
    assert sum(c.bytes for c in found) == sum(t.buffer for t in entry.transfers) == (3 + 1) * 8 * 4


class Own(nnx.Module):
    """A grouped convolution that is not in a layer, of a kernel that is a parameter or a constant."""

    def __init__(self, rngs, *, fixed=False):
        self.kernel = nnx.Param(jax.random.normal(rngs.params(), (3, 1, 8)))
        self.fixed = fixed

    def __call__(self, x):
        kernel = np.ones((3, 1, 8), np.float32) if self.fixed else self.kernel[...]

        @jax.checkpoint  # an equation with equations in it
        def convolve(x, kernel):
            dims = ("NHC", "HIO", "NHC")
            return lax.conv_general_dilated(x, kernel, (1,), "SAME", dimension_numbers=dims, feature_group_count=8)

        return convolve(x, kernel) * self.kernel[0, 0]


def test_a_grouped_convolution_between_layers_is_refused():
    x = np.ones((8, 4, 8), np.float32)

    def parallelized(model, *axes):
        return ax.parallelize(model, grids.lay(GridShape(1, *axes)), call=lambda m: m(x))

    with pytest.raises(ax.UserError, match=r"model = 'a jax.lax convolution of 8 groups': an nnx.Conv in its place"):
        parallelized(Own(nnx.Rngs(0)), 1, 2, 1, 2)
    for model, axes in [
        (Own(nnx.Rngs(0)), (2, 2, 1, 1)),  # where XLA gets it right
        (Own(nnx.Rngs(0)), (1, 1, 2, 2)),
        (Own(nnx.Rngs(0), fixed=True), (1, 2, 1, 2)),  # no gradient of its kernel
    ]:
        parallelized(model, *axes)
