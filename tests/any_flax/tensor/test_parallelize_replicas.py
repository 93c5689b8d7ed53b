"""Parallelized modules under `jax.vmap` over replicas: each has the plain module's loss and gradients of its rows."""

import grids
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import strange_layers
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import axonn_jax as ax
from axonn_jax.any_flax.parallelize.api import gather_spread, with_row_axes
from axonn_jax.core.grid import GridShape

HIDDEN, VOCAB, ROWS, LENGTH = 16, 64, 4, 6
# Of a parameter's largest entry: sums of another order.
GRADIENT_TOLERANCE = 1e-5


class Model(nnx.Module):
    """Layers of every kind with a manual region of its own, and convolutions split by rows."""

    def __init__(self, rngs: nnx.Rngs):
        self.tokens = nnx.Embed(VOCAB, HIDDEN, rngs=rngs)
        self.positions = nnx.Embed(LENGTH, HIDDEN, rngs=rngs)
        self.norm_1 = nnx.LayerNorm(HIDDEN, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, HIDDEN, decode=False, rngs=rngs)
        self.norm_2 = nnx.RMSNorm(HIDDEN, rngs=rngs)
        self.up = nnx.Linear(HIDDEN, 2 * HIDDEN, rngs=rngs)
        mask = jnp.tri(HIDDEN)[None]
        self.masked = nnx.Conv(HIDDEN, HIDDEN, (1,), mask=mask, rngs=rngs)
        self.down = nnx.Linear(2 * HIDDEN, HIDDEN, rngs=rngs)

    def __call__(self, ids):
        x = self.tokens(ids) + self.positions(jnp.arange(LENGTH))
        x = x + self.attention(self.norm_1(x))
        x = x + self.down(nnx.gelu(self.up(self.masked(self.norm_2(x)))))
        return self.tokens.attend(x)


MODELS = {"layers": Model, **{kind: strange_layers.MODELS[kind] for kind in ("own", "stacked")}}


def _step(model, *, gathered=False):
    """Parameters and a function of them and of rows: loss and gradients."""
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)

    def loss(params, ids):
        merged = nnx.merge(graphdef, params, rest, copy=True)
        if gathered:
            gather_spread(merged)
        return strange_layers.loss(merged, ids)

    return params, jax.value_and_grad(loss)


CASES = [("layers", (2, 2, 1, 2), False), ("own", (2, 2, 1, 2), True), ("stacked", (2, 2, 1, 2), False)]
SLOW = [(kind, (2, 1, 2, 2), True) for kind in MODELS] + [("own", (2, 2, 1, 2), False)]


@pytest.mark.parametrize(
    ("kind", "axes", "gathered"), CASES + [pytest.param(*case, marks=pytest.mark.slow) for case in SLOW], ids=str
)
def test_replicas_have_the_plain_gradients_of_their_rows(kind, axes, gathered):
    grid, plain = grids.lay(GridShape(1, *axes)), MODELS[kind](nnx.Rngs(0))
    replicas = grid.shape.data
    ids = np.random.default_rng(0).integers(0, VOCAB, (replicas, ROWS, LENGTH), dtype=np.int32)
    model = ax.parallelize(plain, grid, call=lambda m: m(ids[0]))
    with_row_axes(model, ("z",))
    plans = [entry.plan for entry in ax.sharding_report(model).entries if entry.path != "positions"]
    assert all(plan.splits(call) for plan in plans for call in plan.calls or ())
    params, step = _step(model, gathered=gathered)

    def own(param):
        stacked = np.broadcast_to(param, (replicas, *param.shape))
        return jax.device_put(stacked, NamedSharding(grid.mesh, P("data", *param.sharding.spec)))

    def run(params, ids):
        return jax.vmap(step, spmd_axis_name="data")(params, ids)

    given = jax.device_put(ids, NamedSharding(grid.mesh, P("data", "z")))
    losses, grads = jax.jit(run)(jax.tree.map(own, params), given)
    params, step = _step(plain)
    want_losses, want = jax.jit(jax.vmap(step, in_axes=(None, 0)))(params, ids)
    np.testing.assert_allclose(losses, want_losses, rtol=1e-6)
    for (path, exact), (_, here) in zip(nnx.to_flat_state(want), nnx.to_flat_state(grads), strict=True):
        exact, here = np.asarray(exact.get_value()), np.asarray(here.get_value())
        scale = max(np.abs(exact).max(), 1e-2)  # a key's bias has rounding only
        assert np.abs(here - exact).max() <= GRADIENT_TOLERANCE * scale, path
