"""Sub-batches and a fixed order change nothing but the order: same gradients, same collectives."""

import functools
from dataclasses import replace
from itertools import product

import grids
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from axonn_jax import compat
from axonn_jax.models.presets import preset
from axonn_jax.models.transformer import Transformer
from axonn_jax.tensor.overlap.op_cost import axes_of, is_collective
from axonn_jax.tensor.params import split_module
from axonn_jax.train.engines.program import StageProgram, exposed

GRIDS = [grids.GridShape(1, 1, 1, 1, 1), grids.GridShape(1, 1, 2, 2, 2), grids.GridShape(1, 2, 2, 1, 2)]


def results(model, axes, dropout=0.0, **options):
    shape, grid = grids.MODELS[model], grids.lay(axes)
    if dropout:
        shape = replace(shape, dropout=dropout)
    with jax.set_mesh(grid.mesh):
        parts = split_module(Transformer(shape, rngs=nnx.Rngs(0)))
    program = StageProgram(parts, grid, jnp.dtype("float32"), **options)
    batch = jax.device_put(grids.tokens(shape.vocab, 2, 8, shape.seq_len), program.batch_sharding())
    key = jax.random.key(3) if dropout else None
    grads, loss, norm = jax.jit(program.gradients)(parts.params, batch, key)
    return {name: np.asarray(g, np.float64) for name, g in grads.items()}, float(loss), float(norm)


@functools.cache
def reference(model, dropout):
    return results(model, grids.GridShape(), dropout)


def cases():
    """Two; the others, which compile for long and add little, are slow."""
    for axes, model, activations in product(GRIDS, grids.MODELS, ["none", "full", "dots", "save_collectives"]):
        few = (axes, model, activations) in ((GRIDS[2], "gpt", "none"), (GRIDS[1], "llama", "save_collectives"))
        marks = [] if few else [pytest.mark.slow]
        yield pytest.param(axes, model, activations, marks=marks, id=f"{grids.name(axes)}-{model}-{activations}")


@pytest.mark.parametrize(("axes", "model", "activations"), list(cases()))
def test_two_sub_batches_in_order_give_the_gradients_of_one_device(model, axes, activations):
    got = results(model, axes, sub_batches=2, ordered=True, activations=activations)
    grids.check_gradients(got, reference(model, 0.0))


def test_replicas_add_up_beside_the_last_microbatchs_backward_pass():
    """Of a step as large as people run: bytes of reductions over `data` that a matmul still follows."""
    shape, grid = preset("gpt-1.3b", layers=4, vocab=8192), grids.lay(grids.GridShape(1, 2, 2, 2, 1))
    parts = split_module(nnx.eval_shape(lambda: Transformer(shape, rngs=nnx.Rngs(0))))
    program = StageProgram(parts, grid, jnp.dtype("bfloat16"), bucket=4_000_000, sub_batches=2, ordered=True)
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
    known = compat.overlap_options("cuda")
    assert compat.known_options({**known, "xla_gpu_no_such_option": 1}) == known


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"sub_batches": 2}, marks=pytest.mark.slow),
        pytest.param({"ordered": True}, marks=pytest.mark.slow),
        {"sub_batches": 2, "ordered": True},
    ],
    ids=str,
)
def test_dropout_drops_the_same_entries(options):
    grids.check_gradients(results("gpt", GRIDS[1], 0.25, **options), reference("gpt", 0.25))


@pytest.mark.parametrize("activations", ["none", pytest.param("full", marks=pytest.mark.slow)])
def test_the_order_alone_changes_no_bit(activations):
    axes = grids.GridShape(1, 1, 2, 2, 2)
    plain = results("llama", axes, sub_batches=2, activations=activations)
    ordered = results("llama", axes, sub_batches=2, activations=activations, ordered=True)
    # XLA fuses the two programs differently, so sums of a fusion may be rounded in another order.
    grids.check_gradients(ordered, plain)
