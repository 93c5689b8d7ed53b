"""The axis `expert` where there are no experts: layers of plain Flax take it for a part of `data`."""

import functools

import grids
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P
from shared_layers import Block
from trainers import make_trainer

import axonn_jax as ax
from axonn_jax import GridShape, UserError
from axonn_jax.memory.zero import split_over_replicas

STEPS = 4
CURVE_TOLERANCE = 2e-6  # sums in another order, as on any grid


def flax_layers():
    rngs = nnx.Rngs(0)
    layers = [nnx.Embed(32, 16, rngs=rngs), Block(rngs), nnx.Linear(16, 32, rngs=rngs)]
    return ax.models.SequenceModel(layers, optax.softmax_cross_entropy_with_integer_labels)


def curve(axes, **options):
    """Losses and norms of a few steps, in buckets smaller than some parameters and larger than others."""
    made = make_trainer(
        flax_layers, optax.adam(1e-2), grids.lay(GridShape(**axes)), microbatches=2, clip=1.0, bucket=400, **options
    )
    given = np.random.default_rng(0).integers(0, 32, (STEPS, 16, 9))
    metrics = [made.step(rows) for rows in given]
    made.close()
    return [[float(m[name]) for name in ("loss", "grad_norm")] for m in metrics]


@functools.cache
def of_one_device():
    return curve({})


@pytest.mark.parametrize(
    ("axes", "options"),
    [
        pytest.param({"expert": 2}, {}, marks=pytest.mark.slow),
        pytest.param({"data": 2, "expert": 2}, {"zero": 1}, marks=pytest.mark.slow),
        ({"data": 2, "expert": 2, "z": 2}, {"zero": 1, "offload": "optimizer"}),
        ({"pipe": 2, "data": 2, "expert": 2}, {"zero": 1}),
    ],
)
def test_replicas_along_the_axis_are_like_those_along_data(axes, options):
    np.testing.assert_allclose(curve(axes, **options), of_one_device(), rtol=CURVE_TOLERANCE)


def test_what_experts_do_not_share_is_split_over_data_alone():
    mesh = grids.lay(GridShape(data=2, expert=2)).mesh
    found = split_over_replicas({"dense": (8, 3), "experts": (2, 6)}, {"dense": P(), "experts": P("expert")}, mesh)
    assert found == {"dense": P(("data", "expert"), None), "experts": P("expert", ("data",))}


def test_a_transformer_without_experts_takes_one():
    with pytest.raises(UserError, match=r"grid\.expert = 2: 1 for a model without experts"):
        grids.GPT.check_grid(GridShape(expert=2))
    assert str(GridShape(data=2, expert=4)) == "pipe 1 x data 2 x expert 4 x z 1 x y 1 x x 1"
    assert "expert" not in str(GridShape(data=2))
