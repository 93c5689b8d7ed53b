"""Gradients add up over tokens, devices and microbatches in what `memory.accumulate` says, not as layers compute."""

import re

import grids
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from axonn_jax.core.engines.program import StageProgram
from axonn_jax.core.memory.precision import precisions
from axonn_jax.core.models.transformer import Transformer
from axonn_jax.core.tensor.embedding import lookup
from axonn_jax.core.tensor.linear import Linear
from axonn_jax.core.tensor.params import split_module

Z = grids.GridShape(z=2)


def lowered(accumulate, *, apart=False):
    """The gradients of two microbatches in bf16 as they are handed to XLA, which on CPUs widens what is bf16."""
    shape, grid = grids.GPT, grids.lay(Z)
    dtypes = precisions("bf16", accumulate, separate_masters=apart)
    parts = split_module(nnx.eval_shape(lambda: Transformer(shape, rngs=nnx.Rngs(0))))
    program = StageProgram(parts, grid, dtypes)
    sharding = program.shardings()
    params = {n: jax.ShapeDtypeStruct(p.shape, dtypes.weights, sharding=sharding[n]) for n, p in parts.params.items()}
    tokens = jax.ShapeDtypeStruct((2, 4, shape.seq_len + 1), jnp.int32, sharding=program.batch_sharding())
    return jax.jit(program.gradients).lower(params, tokens, None).as_text()


@pytest.mark.parametrize(
    ("accumulate", "apart", "dtype"), [("fp32", False, "f32"), ("fp32", True, "f32"), ("compute", False, "bf16")]
)
def test_weights_gradients_are_scattered_in_the_dtype_they_add_up_in(accumulate, apart, dtype):
    text = lowered(accumulate, apart=apart)
    found = re.findall(r"stablehlo\.reduce_scatter.*?\}\) : \(tensor<[0-9x]*x(\w+)>\)", text, re.S)
    kernels = 4 * grids.GPT.layers + 2  # and the tables of tokens and positions
    assert set(found) == {dtype}
    assert len(found) >= kernels


def test_a_bias_adds_up_its_gradient_in_float32():
    """Over 16,384 tokens, where a sum in bf16 loses what is small beside it."""
    tokens, width = 16_384, 4
    layer = Linear(2, width, in_axis="x", bias=True, std=0.0, key=jax.random.key(0))
    dy = jnp.asarray(1.0 + np.random.default_rng(0).random((tokens, width)), jnp.bfloat16)

    def product(layer):
        return jnp.sum((layer(jnp.zeros((tokens, 2), jnp.bfloat16)) * dy).astype(jnp.float32))

    found = nnx.grad(product)(layer).bias.get_value()
    exact = np.sum(np.asarray(dy, np.float64), 0)
    np.testing.assert_allclose(found, exact, rtol=tokens * 2.0**-24)


def test_a_row_that_many_tokens_read_adds_up_its_gradient_in_float32():
    tokens, width = 16_384, 4
    ids = jnp.zeros(tokens, jnp.int32)
    dy = jnp.asarray(1.0 + np.random.default_rng(1).random((tokens, width)), jnp.bfloat16)

    def product(table):
        return jnp.sum((lookup(table, ids, "y") * dy).astype(jnp.float32))

    found = jax.grad(product)(jnp.zeros((2, width), jnp.bfloat16))
    exact = np.sum(np.asarray(dy, np.float64), 0)
    np.testing.assert_allclose(np.asarray(found[0], np.float64), exact, rtol=2.0**-8)  # rounded once, at the end
