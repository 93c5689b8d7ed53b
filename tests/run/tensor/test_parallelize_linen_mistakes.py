"""Mistakes with `parallelize_linen`: one line each."""

import grids
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import axonn_jax as ax
from axonn_jax.core.grid import GridShape


def test_mistakes_are_one_line():
    grid = grids.lay(GridShape(1, 1, 1, 2, 1))
    model, x = nn.Sequential([nn.Dense(4), nn.Dense(4)]), np.ones((4, 4), np.float32)
    params = model.init(jax.random.key(0), x)

    def loss(params, x):
        return jnp.mean(model.apply(params, x))

    def run(*, loss=loss, params=params, grid=grid, batch=x, **named):
        return lambda: ax.parallelize_linen(loss, params, grid, batch, **named)

    foreign = NamedSharding(Mesh(jax.devices()[:2], ("model",)), P("model"))
    missing = {"params": {"layers_0": params["params"]["layers_0"]}}
    cases = [
        (run(params=missing), "params = 'params': the parameters of every layer that loss applies: Could not find"),
        (run(params={"params": params}), "an extra params layer"),
        (run(batch=x[:, :2]), "params = 'params': the parameters of every layer that loss applies: For parameter \"k"),
        (run(params={}), "params = 'dict': a tree of arrays"),
        (run(batch={"scale": 1.0}), "batch = {'scale': ()}: at least one array, with rows"),
        (run(batch={"x": x, "text": ["a"] * 4}), "batch = 'str in it': numbers in arrays"),
        (run(batch=x[:0]), "batch = (0, 4): at least one array, with rows"),
        (run(loss=model), "loss = 'Sequential': a function of (params, batch)"),
        (run(loss=run()()[0]), "loss = 'LinenLoss': a function of (params, batch) that is not parallelized already"),
        (run(loss=model.apply), "loss = 'a function that returns float32[4, 4]': one that returns a scalar"),
        (run(loss=lambda p, x: None), "loss = 'a function that returns None': one that returns a scalar"),
        (
            run(loss=lambda p, x: loss(p, jax.lax.with_sharding_constraint(x, foreign))),
            "loss = \"a sharding constraint P('model',) on a mesh of {'model': 2}\": none, or one on the grid's mesh",
        ),
        (run(grid=grids.lay(GridShape(2, 1, 1, 2, 1))), "grid.pipe = 2: 1 for parallelize_linen"),
        (run(grid=grid.mesh), "grid = 'Mesh': a grid"),
        (run(overrides={"params.layer_0": "x"}), "did you mean 'params.layers_0'?"),
    ]
    for call, line in cases:
        with pytest.raises(ax.UserError) as caught:
            call()
        assert line in str(caught.value)
        assert "\n" not in str(caught.value)
