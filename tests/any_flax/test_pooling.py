"""Maxima over windows in a trainer's loss: values and gradients of XLA's, without its loop over elements."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import axonn_jax as ax
from axonn_jax.any_flax.rewriting import in_fast_forms


@pytest.mark.parametrize(
    ("shape", "window", "strides", "padding"),
    [
        ((2, 9, 8, 3), (2, 2), (2, 2), "VALID"),
        ((2, 9, 9, 3), (3, 3), (3, 3), "SAME"),
        ((2, 8, 9, 2), (2, 3), (2, 3), "VALID"),
        ((2, 8, 8, 2), (3, 3), (2, 2), "SAME"),  # these overlap: as they were
    ],
)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_values_and_gradients_are_the_same_to_the_bit_where_numbers_are_equal(shape, window, strides, padding, dtype):
    draw = np.random.default_rng(0)
    x = jnp.asarray(draw.integers(-2, 3, shape), dtype)  # 4 to 9 numbers of 5 values: most windows have equal ones

    def loss(x):
        pooled = nnx.max_pool(jnp.tanh(x), window, strides, padding)
        return jnp.sum(pooled * jnp.arange(pooled.size, dtype=dtype).reshape(pooled.shape)), pooled

    (want, plain), d_want = jax.value_and_grad(loss, has_aux=True)(x)
    (got, pooled), d_got = jax.value_and_grad(in_fast_forms(loss), has_aux=True)(x)
    assert want == got
    assert (pooled == plain).all()
    assert (d_got == d_want).all()


class Net(nnx.Module):
    def __init__(self, rngs):
        self.convs = nnx.List([nnx.Conv(a, b, (3, 3), rngs=rngs) for a, b in ((1, 8), (8, 8))])
        self.out = nnx.Linear(4 * 4 * 8, 4, rngs=rngs)

    def __call__(self, x):
        for conv in self.convs:
            x = nnx.max_pool(nnx.relu(conv(x)), (2, 2), (2, 2))
        return self.out(x.reshape(len(x), -1))


def loss_of(model, batch):
    return optax.softmax_cross_entropy_with_integer_labels(model(batch["x"]), batch["y"]).mean()


@pytest.mark.parametrize(
    "axes",
    [pytest.param({}, marks=pytest.mark.slow), {"data": 2}, pytest.param({"y": 2, "x": 2}, marks=pytest.mark.slow)],
)
def test_a_trainer_learns_what_flax_does_without_a_scatter(axes):
    draw = np.random.default_rng(0)
    batch = {"x": draw.standard_normal((8, 16, 16, 1), np.float32), "y": draw.integers(0, 4, 8, dtype=np.int32)}
    model = Net(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    trainer = ax.Trainer(Net(nnx.Rngs(0)), optax.sgd(0.1), ax.init(**axes), loss=loss_of, rows="parts")
    for _ in range(3):
        want, grads = nnx.value_and_grad(loss_of)(model, batch)
        optimizer.update(model, grads)
        np.testing.assert_allclose(trainer.step(batch)["loss"], want, rtol=1e-5)
    assert "select-and-scatter" not in trainer.engine.compiled_step(batch).as_text()
