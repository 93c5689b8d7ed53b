"""Bytes of `sharding_report` are those of the compiled step: inputs without a gradient, layers called twice."""

import grids
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from any_flax.compare import compare, run_plain
from any_flax.strangers import Model
from flax import linen, nnx

import axonn_jax as ax
from axonn_jax.core.grid import GridShape

VOCAB, WIDE, ROWS, LENGTH = 32, 16, 8, 4
IDS = np.arange(ROWS * LENGTH, dtype=np.int32).reshape(ROWS, LENGTH)
FEATURES = np.random.default_rng(0).standard_normal((ROWS, LENGTH, WIDE)).astype(np.float32)


def _mean_square(y):
    return jnp.mean(jnp.square(y))


class Layers(nnx.Module):
    """A layer on data and once more on what comes of it, and one that is not called but read."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.first, self.down = nnx.Linear(WIDE, 2 * WIDE, rngs=rngs), nnx.Linear(2 * WIDE, WIDE, rngs=rngs)
        self.read = nnx.Linear(WIDE, WIDE, rngs=rngs)

    def __call__(self, x):
        once = self.down(nnx.silu(self.first(x)))
        return self.down(nnx.silu(self.first(once))) + self.read.bias[...]


class Tied(nnx.Module):
    """A table with two uses."""

    def __init__(self):
        self.table = nnx.Embed(VOCAB, WIDE, rngs=nnx.Rngs(0))

    def __call__(self, ids):
        return self.table.attend(nnx.silu(self.table(ids)))


class TiedLinen(linen.Module):
    @linen.compact
    def __call__(self, ids):
        table = linen.Embed(VOCAB, WIDE)
        return table.attend(linen.silu(linen.Dense(WIDE)(table(ids))))


def _of_module(make, batch):
    return Model(make, lambda m, x: _mean_square(m(x)), batch, lambda m, x: m(x))


MODELS = {
    "data": (_of_module(Layers, FEATURES), False),
    "tied": (_of_module(Tied, IDS), False),
    "tied linen": (
        Model(
            lambda: TiedLinen().init(jax.random.key(0), IDS),
            lambda params, ids: _mean_square(TiedLinen().apply(params, ids)),
            IDS,
        ),
        True,
    ),
}


@pytest.mark.parametrize("axes", [(2, 2, 1, 2), (1, 2, 2, 2), (2, 1, 1, 4)], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_layers_send_the_bytes_reported(name, axes):
    model, is_linen = MODELS[name]
    found = compare(model, is_linen, GridShape(1, *axes), run_plain(model, is_linen))
    assert found.traffic.layers == found.traffic.reported > 0
    assert found.gradient < 1e-5


class Inputs(nnx.Module):
    """Layers on inputs with a gradient, and on others."""

    def __init__(self):
        names = ("data", "stopped", "whole", "carried", "branch", "after")
        self.layers = nnx.Dict({name: nnx.Linear(WIDE, WIDE, rngs=nnx.Rngs(0)) for name in names})
        self.shift, self.count = nnx.Param(jnp.ones(WIDE)), nnx.BatchStat(jnp.ones(WIDE))

    def __call__(self, x):
        run = self.layers
        y = run.data(x + self.count[...])
        y = y + run.stopped(jax.lax.stop_gradient(y)) + run.whole(jnp.round(y).astype(jnp.int32).astype(jnp.float32))
        # The carry is data at first, and a layer's output afterwards.
        z, _ = jax.lax.scan(lambda carry, _: (run.carried(carry), None), x, None, 2)
        z = z + jax.lax.cond(jnp.sum(x) > 0, lambda x: run.branch(x), lambda x: x, x * self.shift[...])
        return run.after(y + jax.checkpoint(jnp.sin)(z))


def test_an_input_has_a_gradient_where_it_depends_on_a_parameter():
    model = ax.parallelize(Inputs(), grids.lay(GridShape(1, 1, 1, 2, 2)), call=lambda m: m(FEATURES))
    entries = {entry.path.removeprefix("layers."): entry for entry in ax.sharding_report(model).entries}
    found = {path: [call.input_grad for call in entry.plan.calls or ()] for path, entry in entries.items()}
    want = {"data": [False], "stopped": [False], "whole": [False], "carried": [True], "branch": [True]}
    assert found == {**want, "after": [True], "(model)": []}
