"""Every grid of up to 8 devices computes the plain model's loss, gradients and global norm."""

import functools

import grids
import jax
import jax.numpy as jnp
import numpy as np
import plain
import pytest

from axonn_jax.tensor.params import split_module
from axonn_jax.train.engines.program import StageProgram

EPS = float(np.finfo(np.float32).eps)

# A gradient is a sum of rows * seq = 256 float32 products; rounding errors of n terms add up to about sqrt(n) eps.
# Measured over all grids and both models: at most 6.2 eps of a gradient's largest entry.
GRADIENT_TOLERANCE = 16 * EPS
# Loss and norm are averages over everything, so single roundings remain. Measured: at most 1.3 eps.
SCALAR_TOLERANCE = 4 * EPS


@functools.cache
def reference(model: str):
    shape = grids.MODELS[model]
    params = grids.host_params(shape)
    batch = grids.tokens(shape.vocab, 2, 8, shape.seq_len)
    return plain.reference(params, shape, batch.reshape(-1, shape.seq_len + 1))


@pytest.mark.parametrize(("model", "axes"), grids.some_grids(1, 2, 4, 8))
def test_loss_gradients_and_norm_equal_the_plain_model(model, axes):
    shape, grid = grids.MODELS[model], grids.lay(axes)
    shape.check_grid(axes)
    parts = split_module(grids.model_on(shape, grid))
    program = StageProgram(parts, grid, jnp.dtype("float32"), bucket=3000)  # small: several buckets
    batch = jax.device_put(grids.tokens(shape.vocab, 2, 8, shape.seq_len), program.batch_sharding())
    grads, loss, norm = jax.jit(program.gradients)(parts.params, batch, None)

    want_loss, want_grads, want_norm = reference(model)
    assert abs(float(loss) - want_loss) <= SCALAR_TOLERANCE * want_loss
    assert abs(float(norm) - want_norm) <= SCALAR_TOLERANCE * want_norm
    assert grads.keys() == want_grads.keys()
    for name, grad in grads.items():
        assert grad.sharding.is_equivalent_to(program.shardings()[name], grad.ndim), name
        want = want_grads[name]
        error = np.max(np.abs(np.asarray(grad, np.float64) - want)) / np.max(np.abs(want))
        assert error <= GRADIENT_TOLERANCE, f"{name}: {error / EPS:.0f} eps"


@pytest.mark.parametrize("model", grids.MODELS)
def test_parameters_are_born_sharded_and_do_not_depend_on_the_grid(model):
    shape = grids.MODELS[model]
    whole = split_module(grids.make_model(shape, grids.lay(grids.GridShape()))).params
    grid = grids.lay(grids.GridShape(1, 1, 2, 2, 2))
    parts = split_module(grids.make_model(shape, grid))
    for name, value in parts.params.items():
        np.testing.assert_array_equal(np.asarray(value), np.asarray(whole[name]), err_msg=name)
        spec_sharding = jax.sharding.NamedSharding(grid.mesh, parts.specs[name])
        assert value.sharding.is_equivalent_to(spec_sharding, value.ndim), name


def test_global_norm_counts_every_parameter_once():
    """The norm of the returned gradients, taken on the host, is the norm the program returned."""
    shape, grid = grids.GPT, grids.lay(grids.GridShape(1, 2, 2, 2, 1))
    parts = split_module(grids.model_on(shape, grid))
    program = StageProgram(parts, grid, jnp.dtype("float32"))
    batch = jax.device_put(grids.tokens(shape.vocab, 2, 8, shape.seq_len), program.batch_sharding())
    grads, _, norm = jax.jit(program.gradients)(parts.params, batch, None)
    want = np.sqrt(sum(np.sum(np.asarray(g, np.float64) ** 2) for g in grads.values()))
    assert abs(float(norm) - want) <= SCALAR_TOLERANCE * want
