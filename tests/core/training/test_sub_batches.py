"""Sub-batches and a fixed order: what is hidden behind computation, and what is said where nothing is."""

import grids
import jax
import jax.numpy as jnp
from flax import nnx

from axonn_jax.core.backend.compiler_options import step_options, supported_options
from axonn_jax.core.engines.program import exposed
from axonn_jax.core.tensor.overlap.op_cost import axes_of, is_collective
from axonn_jax.core.tensor.params import split_module
from axonn_jax.models import Transformer, preset


def test_replicas_add_up_beside_the_last_microbatchs_backward_pass():
    """Of a step as large as people run: bytes of reductions over `data` that a matmul still follows."""
    shape, grid = preset("gpt-1.3b", layers=4, vocab=8192), grids.lay(grids.GridShape(1, 2, 2, 2, 1))
    parts = split_module(nnx.eval_shape(lambda: Transformer(shape, rngs=nnx.Rngs(0))))
    program = grids.program_of(parts, grid, "bfloat16", bucket=4_000_000, sub_batches=2, ordered=True)
    tokens = jax.ShapeDtypeStruct((2, 16, shape.seq_len + 1), jnp.int32)
    (region,) = jax.make_jaxpr(program.gradients)(parts.params, tokens, None).jaxpr.eqns
    eqns = region.params["jaxpr"].eqns
    last = max(i for i, eqn in enumerate(eqns) if eqn.primitive.name == "dot_general")
    sums = [(i, eqn.invars[0].aval.size) for i, eqn in enumerate(eqns) if is_collective(eqn) and "data" in axes_of(eqn)]
    assert sum(size for i, size in sums if i < last) >= 0.6 * sum(size for _, size in sums)


def test_a_device_with_one_long_sequence_is_told_that_nothing_is_hidden(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    grid = grids.GridShape(x=2)
    (line,) = exposed(0, grid, 1)
    assert line.startswith("overlap: 1 sequence of a microbatch on a device cannot be halved: nothing is computed")
    assert exposed(0, grid, 2) == exposed(1, grid, 1) == exposed(0, grids.GridShape(data=2, z=2), 1) == []


def test_an_option_that_xla_does_not_have_is_left_out():
    known = step_options("cuda", ordered=True)
    assert supported_options({**known, "xla_gpu_no_such_option": 1}) == known
