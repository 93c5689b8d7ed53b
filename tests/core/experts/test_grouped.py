"""Grouped matmuls against a float64 loop over tokens and experts, values and gradients."""

import re

import grids
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from axonn_jax.core.experts import grouped
from axonn_jax.core.experts.grouped import grouped_mlp
from axonn_jax.core.grid import GridShape
from axonn_jax.core.tensor.collectives import all_reduce, mark_varying
from axonn_jax.core.tensor.specs import shard_mapped

HIDDEN, FFN = 24, 40
EPS = float(np.finfo(np.float32).eps)
# Sums of up to 200 products a row, or as many rows, in float32: sqrt(200) eps = 14; of three products in a row.
TOLERANCE = 40 * EPS


def plain(x, choices, weights, gate, up, down, activation):
    y = jnp.zeros_like(x)
    for number in range(up.shape[0]):
        h = x @ up[number]
        inner = h if gate is None else x @ gate[number]
        acted = jax.nn.silu(inner) if activation == "swiglu" else jax.nn.gelu(inner, approximate=True)
        out = (acted if gate is None else acted * h) @ down[number]
        y = y + jnp.sum(jnp.where(choices == number, weights, 0.0), -1, keepdims=True) * out
    return y


def arguments(tokens, k, experts, *, activation="swiglu", seed=0):
    keys = jax.random.split(jax.random.key(seed), 6)
    choices = jnp.argsort(jax.random.uniform(keys[0], (tokens, experts)), -1)[:, :k].astype(jnp.int32)
    kernels = [0.2 * jax.random.normal(key, (experts, HIDDEN, FFN)) for key in keys[1:3]]
    down = 0.2 * jax.random.normal(keys[3], (experts, FFN, HIDDEN))
    x, weights = jax.random.normal(keys[4], (tokens, HIDDEN)), jax.random.uniform(keys[5], (tokens, k))
    return x, choices, weights, None if activation == "gelu" else kernels[0], kernels[1], down


def results(f, given, activation):
    """Value and gradients of all but the choices, float64."""
    x, choices, *rest = given

    def total(x, rest):
        y = f(x, choices, *rest, activation)
        return jnp.sum(jnp.sin(y.astype(jnp.float32) if y.dtype == jnp.bfloat16 else y))

    value = f(x, choices, *rest, activation)
    return jax.tree.map(lambda a: np.asarray(a, np.float64), (value, jax.grad(total, argnums=(0, 1))(x, rest)))


def check(given, activation="swiglu", tolerance=TOLERANCE):
    got = results(jax.jit(grouped_mlp, static_argnums=6), given, activation)
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda a: a if a.dtype == jnp.int32 else jnp.asarray(a, jnp.float64), given)
        want = results(plain, wide, activation)
    for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert np.max(np.abs(ours - theirs)) <= tolerance * max(np.max(np.abs(theirs)), 1e-30)


@pytest.mark.parametrize("activation", ["gelu", "swiglu", "geglu"])
def test_activations(activation):
    check(arguments(75, 2, 4, activation=activation), activation)


def test_all_tokens_may_choose_one_expert_and_none_another():
    x, _, weights, *kernels = arguments(150, 1, 3)
    check((x, jnp.ones((150, 1), jnp.int32), weights, *kernels))


def test_choices_of_other_devices_count_nothing():
    x, choices, *rest = arguments(200, 4, 16)
    check((x, jnp.where(choices < 8, choices, choices - 40), *rest))


def test_more_experts_than_tokens():
    check(arguments(3, 2, 12))


def test_half_precision():
    # Inner features, their gradients and results have 8 bits, three of them in a row; a result of up to 8 turns the
    # sine's derivative by as many of its own roundings.
    half = [a.astype(jnp.bfloat16) if a.dtype == jnp.float32 and a.ndim != 2 else a for a in arguments(100, 2, 4)]
    check((half[0].astype(jnp.bfloat16), *half[1:]), tolerance=8 * 2**-8)


@pytest.mark.parametrize("varying", ["tokens", "experts"])
def test_tokens_or_experts_over_devices(varying):
    """Gradients of what the other side is the same for are sums over the devices."""
    grid, given = grids.lay(GridShape(y=2)), arguments(64, 2, 4)

    def total(x, choices, *rest):
        return jnp.sum(jnp.sin(grouped_mlp(x, choices, *rest, "swiglu")))

    def local(x, choices, weights, *kernels):
        if varying == "tokens":
            return all_reduce(total(x, choices, weights, *kernels), "y")
        first = 2 * jax.lax.axis_index("y")
        y = grouped_mlp(x, mark_varying(choices, ("y",)) - first, weights, *kernels, "swiglu")
        return jnp.sum(jnp.sin(all_reduce(y, "y")))

    split = P("y")
    specs = (*[split if varying == "tokens" else P()] * 3, *[P() if varying == "tokens" else split] * 3)
    region = shard_mapped(local, grid.mesh, specs, P())
    x, choices, *rest = given
    got = jax.jit(jax.grad(lambda x, rest: region(x, choices, *rest), argnums=(0, 1)))(x, rest)
    want = jax.grad(lambda x, rest: total(x, choices, *rest), argnums=(0, 1))(x, rest)
    for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=TOLERANCE * float(jnp.max(jnp.abs(theirs))))


def test_nothing_of_the_inner_width_is_kept_and_loops_do_not_communicate():
    tokens, experts = 1024, 8
    given = arguments(tokens, 2, experts)

    def total(x, choices, *rest):
        return jnp.sum(grouped_mlp(x, choices, *rest, "swiglu"))

    text = jax.jit(jax.grad(total, argnums=(0, 2, 3, 4, 5))).lower(*given).compile().as_text()
    sizes = {tuple(map(int, dims.split(","))) for dims in re.findall(r"f32\[([\d,]+)\]", text)}
    assert (tokens, HIDDEN) in sizes
    assert not {size for size in sizes if FFN in size and np.prod(size) > experts * HIDDEN * FFN}
    assert not {size for size in sizes if size[0] == experts and np.prod(size) > experts * HIDDEN * FFN}
    assert not re.search(r"all-(reduce|gather|to-all)|reduce-scatter|collective-permute", text)


def test_an_expert_reaches_the_tokens_that_chose_it_alone():
    """Kernels that are NaN, of an expert that one token of 64 chose: its row, and the expert's own gradients."""
    rng = np.random.default_rng(0)
    x, choices = rng.normal(size=(64, 4)).astype(np.float32), np.full((64, 1), 1, np.int32)
    choices[5] = 0
    up, down = np.ones((2, 4, 4), np.float32), np.ones((2, 4, 4), np.float32)
    up[0] = down[0] = np.nan

    def total(x, up, down):
        y = grouped_mlp(x, jnp.asarray(choices), jnp.ones((64, 1)), None, up, down, "gelu")
        return jnp.sum(y), y

    grads, y = jax.grad(total, argnums=(0, 1, 2), has_aux=True)(*map(jnp.asarray, (x, up, down)))
    others = np.arange(64) != 5
    assert np.isfinite(np.asarray(y)[others]).all()
    assert not np.isfinite(np.asarray(y)[5]).any()
    assert np.isfinite(np.asarray(grads[0])[others]).all()
    assert np.isfinite(np.asarray(grads[1])[1]).all()
    assert np.isfinite(np.asarray(grads[2])[1]).all()


@pytest.mark.parametrize(("tokens", "k", "experts", "rows"), [(1, 2, 8, 1), (8, 8, 128, 8), (600, 2, 8, 128)])
def test_a_tile_has_no_more_rows_than_there_are_tokens(tokens, k, experts, rows):
    assert grouped._tile(tokens, k, experts) == rows
