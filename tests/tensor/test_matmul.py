"""Matmuls in every layout: values and gradients of the plain ones, in layers, loops, pipelines, ordered programs."""

import dataclasses
import functools
import itertools

import grids
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import trainers
from flax import nnx
from trainers import make_trainer

from axonn_jax.grid import BATCH_AXES, GridShape
from axonn_jax.memory.host_arrays import joined
from axonn_jax.models.stacked import stack_layers
from axonn_jax.models.transformer import Transformer
from axonn_jax.state.scanned import unstack_params
from axonn_jax.tensor.collectives import all_reduce, gather_weight
from axonn_jax.tensor.embedding import tied_logits
from axonn_jax.tensor.linear import Linear, matmul_4d, with_layouts
from axonn_jax.tensor.matmul import AS_WRITTEN, FORMS, PLAIN, Form, MatmulLayouts, matmul, multiply, products
from axonn_jax.tensor.params import split_module
from axonn_jax.tensor.specs import shard_mapped
from axonn_jax.train.engines.program import StageProgram
from axonn_jax.train.matmul_layouts import local_products

P = jax.sharding.PartitionSpec
EPS = {"float32": float(np.finfo(np.float32).eps), "bfloat16": 2.0**-8}
# Sums of up to 64 products, at most three matmuls deep: as in test_parity, of a result's largest entry.
TOLERANCE = 16
ROWS, HIDDEN, FFN, VOCAB = 32, 16, 64, 128
ALL = grids.GridShape(1, 1, 2, 2, 2)


def turned(wanted, shift=0):
    """A table in which no product is computed as written: all other forms in turn."""
    return MatmulLayouts(tuple((one, FORMS[1 + (shift + i) % 7]) for i, one in enumerate(wanted)))


def close(got, want, dtype):
    want = np.asarray(want, np.float64)
    error = np.max(np.abs(np.asarray(got, np.float64) - want)) / np.max(np.abs(want))
    assert error <= TOLERANCE * EPS[dtype], f"{error / EPS[dtype]:.0f} eps"


@pytest.mark.parametrize("dtype", EPS)
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_every_form_is_the_product(form, dtype):
    a, b = np.random.default_rng(0).standard_normal((2, 24, 24)).astype(np.float32)
    a = a[:12]
    for stored in ("NN", "NT", "TN"):
        left, right = (jnp.asarray(v.T if way == "T" else v, dtype) for v, way in zip((a, b), stored, strict=True))
        exact = np.asarray(jnp.asarray(a, dtype), np.float64) @ np.asarray(jnp.asarray(b, dtype), np.float64)
        close(multiply(left, right, stored, form), exact, dtype)


@pytest.mark.parametrize("is_turned", [False, True])
def test_with_nothing_chosen_the_program_is_the_plain_one(is_turned):
    x, w = jnp.ones((4, 6)), jnp.ones((5, 6) if is_turned else (6, 5))
    dims = (((1,), (1 if is_turned else 0,)), ((), ()))

    def program(f):
        return str(jax.make_jaxpr(jax.grad(lambda x, w: jnp.sum(jnp.sin(f(x, w))), (0, 1)))(x, w))

    other = MatmulLayouts(((products(4, 6, 7, "float32")[0], FORMS[1]),))
    plain = program(lambda x, w: jax.lax.dot_general(x, w, dims))
    for layouts in (PLAIN, other):
        assert program(lambda x, w, layouts=layouts: matmul(x, w, layouts, turned=is_turned)) == plain


def test_gradients_are_computed_in_the_forms_chosen():
    three = products(4, 6, 5, "float32")
    layouts = MatmulLayouts(((three[2], Form(left=True)),))
    closed = jax.make_jaxpr(
        jax.grad(lambda x, w: jnp.sum(jnp.sin(matmul(x, w, layouts))), (0, 1))
    )(jnp.ones((4, 6)), jnp.ones((6, 5)))  # fmt: skip
    names = [eqn.primitive.name for eqn in closed.jaxpr.eqns]
    assert names.count("dot_general") == 3  # in the open, where policies, cuts and orders look for them
    (barrier,) = (eqn for eqn in closed.jaxpr.eqns if eqn.primitive.name == "optimization_barrier")
    assert barrier.outvars[0].aval.shape == (6, 4)
    (dw,) = (eqn for eqn in closed.jaxpr.eqns if barrier.outvars[0] in eqn.invars)
    assert dw.params["dimension_numbers"] == (((1,), (0,)), ((), ()))


# Two linear layers and a tied table, on local shards


def layers(layouts):
    def loss(params, x):
        h = jnp.tanh(matmul_4d(x, params["up"], "x", layouts))
        h = jnp.tanh(matmul_4d(h, params["down"], "y", layouts))
        found = tied_logits(gather_weight(params["table"], x.dtype), h, "y", "x", layouts)
        return all_reduce(jnp.sum(jnp.sin(found).astype(jnp.float32)), (*BATCH_AXES, "y"))

    return jax.value_and_grad(loss, (0, 1)), loss


def operands(dtype):
    rng = np.random.default_rng(0)
    shapes = {"up": (HIDDEN, FFN), "down": (FFN, HIDDEN), "table": (VOCAB, HIDDEN)}
    params = {name: jnp.asarray(rng.standard_normal(s) * s[0] ** -0.5, dtype) for name, s in shapes.items()}
    return params, jnp.asarray(rng.standard_normal((ROWS // 2, 2, HIDDEN)), dtype)


@functools.cache
def reference(dtype):
    return layers(PLAIN)[0](*operands(dtype))


def cases():
    """Quick in float32: grids of one and eight devices with no axis above 2, and those of x and y; in bfloat16: one."""
    for shift, axes in enumerate(grids.all_grids(1, 2, 4, 8)):
        quick = axes.devices in (1, 8) and (max(dataclasses.astuple(axes)) <= 2 or axes.x * axes.y == 8)
        marks = [] if quick else [pytest.mark.slow]
        yield pytest.param(axes, "float32", shift, id=grids.name(axes), marks=marks)
    for shift, axes in enumerate(grids.all_grids(1, 8)):
        marks = [] if axes == ALL else [pytest.mark.slow]
        yield pytest.param(axes, "bfloat16", shift, id=f"{grids.name(axes)}-bf16", marks=marks)


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


@pytest.mark.parametrize(("axes", "dtype", "shift"), list(cases()))
def test_layers_on_every_grid_give_the_plain_values_and_gradients(axes, dtype, shift):
    tokens = ROWS // axes.batch_shards
    wanted = [
        *products(tokens, HIDDEN // axes.x, FFN // axes.y, dtype),
        *products(tokens, FFN // axes.y, HIDDEN // axes.x, dtype),
        *products(tokens, HIDDEN // axes.x, VOCAB // axes.y, dtype, turned=True),
    ]
    _, loss = layers(turned(wanted, shift))
    specs = {"up": P(("x", "z"), "y"), "down": P(("y", "z"), "x"), "table": P(("y", "z"), "x")}
    region = shard_mapped(loss, grids.lay(axes).mesh, (specs, P(BATCH_AXES, None, "x")), P())
    value, grads = jax.jit(jax.value_and_grad(region, (0, 1)))(*operands(dtype))
    want_value, want_grads = reference(dtype)
    # Of a sum of a few thousand sines that cancel, in bfloat16, little is left.
    assert abs(float(value) - float(want_value)) <= TOLERANCE * EPS[dtype] * ROWS * VOCAB**0.5
    jax.tree.map(lambda got, want: close(got, want, dtype), grads, want_grads)


# The whole model


def results(model, axes, layouts_for, *, scanned=False, **options):
    shape, grid = grids.MODELS[model], grids.lay(axes)
    parts = options.get("sub_batches", 1)
    wanted = local_products(shape, axes, 8 // axes.batch_shards // parts * shape.seq_len, "float32")
    made = split_module(grids.model_on(shape, grid))
    abstract = with_layouts(nnx.eval_shape(lambda: Transformer(shape, rngs=nnx.Rngs(0))), layouts_for(wanted))
    parts = split_module(abstract)
    stack = stack_layers(parts.merge(made.params), made) if scanned else None
    program = StageProgram(stack.parts if stack else parts, grid, jnp.dtype("float32"), **options)
    params = stack.join(made.params, grid.mesh) if stack else made.params
    batch = jax.device_put(grids.tokens(shape.vocab, 2, 8, shape.seq_len), program.batch_sharding())
    grads, loss, norm = jax.jit(program.gradients)(params, batch, None)
    grads = joined(unstack_params(stack, grads)) if stack else grads
    return {name: np.asarray(g, np.float64) for name, g in grads.items()}, float(loss), float(norm)


@functools.cache
def plain_results(model):
    return results(model, grids.GridShape(), lambda _: PLAIN)


def model_cases():
    few = [
        ("gpt", ALL, {"scanned": True}),
        ("llama", ALL, {"activations": "save_collectives"}),
        ("gpt", grids.GridShape(1, 2, 2, 1, 2), {"sub_batches": 2, "ordered": True}),
    ]
    for number, (model, axes, options) in enumerate(few):
        marks = [pytest.mark.slow] if number else []
        yield pytest.param(model, axes, options, id="-".join([model, grids.name(axes), *options]), marks=marks)
    for model, axes in itertools.product(grids.MODELS, grids.all_grids(1, 2, 4, 8)):
        yield pytest.param(model, axes, {}, id=f"{model}-{grids.name(axes)}", marks=pytest.mark.slow)


@pytest.mark.parametrize(("model", "axes", "options"), list(model_cases()))
def test_a_model_gives_the_plain_gradients(model, axes, options):
    grads, loss, norm = results(model, axes, turned, **options)
    want_grads, want_loss, want_norm = plain_results(model)
    eps = EPS["float32"]
    assert abs(loss - want_loss) <= 4 * eps * want_loss
    assert abs(norm - want_norm) <= 4 * eps * want_norm
    assert grads.keys() == want_grads.keys()
    for name, grad in grads.items():
        close(grad, want_grads[name], "float32")


def dots(closed, found):
    """Sizes of all products without a batch dim, loops and calls included: (sizes not summed over, summed over)."""
    for eqn in closed.eqns:
        if eqn.primitive.name == "dot_general" and not eqn.params["dimension_numbers"][1][0]:
            over = eqn.params["dimension_numbers"][0][0]
            shape = eqn.invars[0].aval.shape
            found.append((tuple(sorted(eqn.outvars[0].aval.shape)), shape[over[0]]))
        for inner in jax.tree.leaves(eqn.params, is_leaf=lambda leaf: hasattr(leaf, "eqns") or hasattr(leaf, "jaxpr")):
            if hasattr(inner, "eqns") or hasattr(inner, "jaxpr"):
                dots(getattr(inner, "jaxpr", inner), found)
    return found


@pytest.mark.parametrize("model", grids.MODELS)
@pytest.mark.parametrize("axes", [grids.GridShape(), ALL, grids.GridShape(1, 2, 1, 4, 1)], ids=grids.name)
def test_the_products_listed_are_those_of_the_program(model, axes):
    shape, grid = grids.MODELS[model], grids.lay(axes)
    parts = split_module(nnx.eval_shape(lambda: Transformer(shape, rngs=nnx.Rngs(0))))
    program = StageProgram(parts, grid, jnp.dtype("float32"))
    batch = jax.ShapeDtypeStruct((2, 8, shape.seq_len + 1), jnp.int32)
    traced = dots(jax.make_jaxpr(program.gradients)(parts.params, batch, None).jaxpr, [])
    listed = local_products(shape, axes, 8 // axes.batch_shards * shape.seq_len, "float32")
    want = [(tuple(sorted((one.m, one.n))), one.k) for one, times in listed.items() for _ in range(times)]
    assert sorted(traced) == sorted(want)


@pytest.mark.slow
@pytest.mark.parametrize("split", [True, False])
def test_a_pipeline_computes_in_them_too(split):
    from axonn_jax.train.config import PipelineConfig

    shape = dataclasses.replace(grids.GPT, seq_len=8)
    batch = np.random.default_rng(0).integers(0, shape.vocab, (8, 9))
    losses = []
    for axes, layouts_for in (({}, lambda _: PLAIN), ({"pipe": 2, "x": 2}, turned)):
        axes = grids.GridShape(**axes)
        layouts = layouts_for(local_products(shape, axes, 4 * 8, "float32"))
        model = with_layouts(Transformer(shape, rngs=nnx.Rngs(0)), layouts)
        pipeline = PipelineConfig(split_backward=split)
        made = make_trainer(model, optax.adamw(3e-3), axes, microbatches=2, precision="fp32", pipeline=pipeline)
        losses.append(trainers.losses(made, [batch] * 4))
        made.close()
    np.testing.assert_allclose(losses[1], losses[0], rtol=2e-6)


def test_only_layers_with_a_weight_take_layouts():
    layouts = turned(products(4, 6, 5, "float32"))
    model = nnx.eval_shape(lambda: with_layouts(Transformer(grids.LLAMA, rngs=nnx.Rngs(0)), layouts))
    assert model.blocks[1].mlp.gate.layouts == model.head.layouts == model.embedding.layouts == layouts
    assert layouts.of(products(4, 6, 5, "float32")[1]) == FORMS[2]
    assert layouts.of(products(4, 6, 6, "float32")[1]) == AS_WRITTEN
