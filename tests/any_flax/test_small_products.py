"""Losses whose sums over products of three numbers jaxlib 0.10.2 gets wrong on CPUs."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import axonn_jax as ax
from axonn_jax.core.backend.small_products import sums_are_wrong

ROWS = 40_000


class Turned(nnx.Module):
    """Points in space, turned by a trained matrix."""

    def __init__(self) -> None:
        self.turn = nnx.Param(jnp.eye(3) * 1.5)

    def __call__(self, points: jax.Array) -> jax.Array:
        return jax.vmap(lambda point: jnp.sum(jnp.square(self.turn[...] @ point)))(points)


def loss(model: Turned, points: jax.Array) -> jax.Array:
    return jnp.mean(model(points))


@pytest.mark.skipif(not sums_are_wrong(), reason="this jaxlib gets the sums right")
@pytest.mark.parametrize("offload", ["none", "optimizer"])
@pytest.mark.parametrize("data", [1, 2])
def test_step_and_evaluation_are_those_of_float64(data: int, offload: Any) -> None:
    points = np.random.RandomState(0).randn(ROWS * data, 3).astype(np.float32)
    grid = ax.init(data=data)
    trainer = ax.Trainer(Turned(), optax.sgd(1.0), grid, loss=loss, memory=ax.MemoryConfig(offload=offload))
    want = 2.25 * np.mean(np.square(points, dtype=np.float64).sum(1))
    assert float(trainer.evaluate([points])) == pytest.approx(want, rel=1e-5)
    assert float(trainer.step(points)["loss"]) == pytest.approx(want, rel=1e-5)
    turn = 1.5 * np.eye(3) - 3.0 * points.T.astype(np.float64) @ points / len(points)
    np.testing.assert_allclose(trainer.model.turn[...], turn, atol=2e-5)
