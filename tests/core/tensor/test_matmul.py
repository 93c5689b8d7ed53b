"""Matmuls and the layers around them: values and gradients of the plain ones, on every grid."""

import dataclasses
import functools

import grids
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axonn_jax.core.grid import BATCH_AXES, GridShape
from axonn_jax.core.tensor.collectives import all_reduce
from axonn_jax.core.tensor.embedding import tied_logits
from axonn_jax.core.tensor.linear import Linear, matmul, matmul_4d
from axonn_jax.core.tensor.params import split_module
from axonn_jax.core.tensor.specs import shard_mapped
from axonn_jax.core.tensor.weight_gather import gather_weight

P = jax.sharding.PartitionSpec
EPS = {"float32": float(np.finfo(np.float32).eps), "bfloat16": 2.0**-8}
# Sums of up to 64 products, at most three matmuls deep: as in test_parity, of a result's largest entry.
TOLERANCE = 16
ROWS, HIDDEN, FFN, VOCAB = 32, 16, 64, 128
ALL = grids.GridShape(1, 1, 2, 2, 2)


def close(got, want, dtype):
    want = np.asarray(want, np.float64)
    error = np.max(np.abs(np.asarray(got, np.float64) - want)) / np.max(np.abs(want))
    assert error <= TOLERANCE * EPS[dtype], f"{error / EPS[dtype]:.0f} eps"


@pytest.mark.parametrize("dtype", EPS)
@pytest.mark.parametrize("is_turned", [False, True])
def test_few_rows_are_the_product_too(is_turned, dtype):
    """Of the transposed product, which moves to no other side of the barrier."""
    rng = np.random.default_rng(0)
    x, w = (jnp.asarray(rng.standard_normal(shape), dtype) for shape in ((12, 24), (24, 20)))
    held = w.T if is_turned else w
    program = jax.jit(lambda x, w: matmul(x, w, turned=is_turned, transpose_limit=12))
    close(program(x, held), np.asarray(x, np.float64) @ np.asarray(w, np.float64), dtype)
    dims = (((1,), (1 if is_turned else 0,)), ((), ()))
    plain = str(jax.make_jaxpr(lambda x, w: jax.lax.dot_general(x, w, dims))(x, held))
    assert str(jax.make_jaxpr(lambda x, w: matmul(x, w, turned=is_turned, transpose_limit=11))(x, held)) == plain
    assert "optimization_barrier" in str(jax.make_jaxpr(program)(x, held))


# Two linear layers and a tied table, on local shards


def layers(params, x):
    h = jnp.tanh(matmul_4d(x, params["up"], "x"))
    h = jnp.tanh(matmul_4d(h, params["down"], "y"))
    found = tied_logits(gather_weight(params["table"], x.dtype), h, "y", "x")
    return all_reduce(jnp.sum(jnp.sin(found).astype(jnp.float32)), (*BATCH_AXES, "y"))


def operands(dtype):
    rng = np.random.default_rng(0)
    shapes = {"up": (HIDDEN, FFN), "down": (FFN, HIDDEN), "table": (VOCAB, HIDDEN)}
    params = {name: jnp.asarray(rng.standard_normal(s) * s[0] ** -0.5, dtype) for name, s in shapes.items()}
    return params, jnp.asarray(rng.standard_normal((ROWS // 2, 2, HIDDEN)), dtype)


@functools.cache
def reference(dtype):
    return jax.value_and_grad(layers, (0, 1))(*operands(dtype))


def cases():
    """Quick in float32: grids of one and eight devices with no axis above 2, and those of x and y; in bfloat16: one."""
    for axes in grids.all_grids(1, 2, 4, 8):
        quick = axes.devices in (1, 8) and (max(dataclasses.astuple(axes)) <= 2 or axes.x * axes.y == 8)
        marks = [] if quick else [pytest.mark.slow]
        yield pytest.param(axes, "float32", id=grids.name(axes), marks=marks)
    for axes in grids.all_grids(1, 8):
        marks = [] if axes == ALL else [pytest.mark.slow]
        yield pytest.param(axes, "bfloat16", id=f"{grids.name(axes)}-bf16", marks=marks)


@pytest.mark.parametrize("in_axis", ["x", "y"])
@pytest.mark.parametrize("comm", ["all_reduce", "gather", "sequence"])
def test_a_layer_called_by_itself_is_the_plain_matmul(comm, in_axis):
    """In values and gradients, whichever way the residual stream is laid out that it reads or adds to."""
    rng, features, columns = np.random.default_rng(0), 16, 24
    x, weight = (jnp.asarray(rng.standard_normal(size), jnp.float32) for size in ((4, 8, features), (4, 8, columns)))
    make = functools.partial(Linear, features, columns, in_axis=in_axis, bias=True, std=1.0, comm=comm)
    parts = split_module(make(key=jax.random.key(0)))
    stream, inner = P(BATCH_AXES, "y" if comm == "sequence" else None, "x"), P(BATCH_AXES, None, "y")
    inner = P(BATCH_AXES, None, ("y", "x")) if comm == "gather" else inner
    given, made = (stream, inner) if in_axis == "x" else (inner, stream)

    split = {name for names in made if names for name in (names if isinstance(names, tuple) else (names,))}

    def loss(params, x, weight):
        return all_reduce(jnp.sum(parts.merge(params)(x) * weight), tuple(split))

    region = shard_mapped(loss, grids.lay(GridShape(data=2, y=2, x=2)).mesh, (parts.specs, given, made), P())
    got = jax.jit(jax.value_and_grad(region, (0, 1)))(parts.params, x, weight)

    def plain(params, x):
        return jnp.sum((x @ params["kernel"] + params["bias"]) * weight)

    want = jax.value_and_grad(plain, (0, 1))(parts.params, x)
    jax.tree.map(lambda got, want: close(got, want, "float32"), got, want)


@pytest.mark.parametrize(("axes", "dtype"), list(cases()))
def test_layers_on_every_grid_give_the_plain_values_and_gradients(axes, dtype):
    specs = {"up": P(("x", "z"), "y"), "down": P(("y", "z"), "x"), "table": P(("y", "z"), "x")}
    region = shard_mapped(layers, grids.lay(axes).mesh, (specs, P(BATCH_AXES, None, "x")), P())
    value, grads = jax.jit(jax.value_and_grad(region, (0, 1)))(*operands(dtype))
    want_value, want_grads = reference(dtype)
    # Of a sum of a few thousand sines that cancel, in bfloat16, little is left.
    assert abs(float(value) - float(want_value)) <= TOLERANCE * EPS[dtype] * ROWS * VOCAB**0.5
    jax.tree.map(lambda got, want: close(got, want, dtype), grads, want_grads)
