"""The order found for a program is one of its orders, and leaves collectives something to run beside."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Var
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from axonn_jax.core.backend.workarounds import depend_on
from axonn_jax.core.tensor.overlap.reorder import in_order, reorder
from axonn_jax.core.tensor.specs import shard_mapped

STEPS = 4


def mesh():
    return Mesh(np.array(jax.devices()[:2]), ("x",), axis_types=(jax.sharding.AxisType.Auto,))


def chain(x, weights):
    x = jax.lax.pcast(x, ("x",), to="varying")
    for w in weights:
        x = jnp.tanh(jax.lax.psum(x @ w[0], "x") * 0.1)
        x = jax.lax.pcast(x, ("x",), to="varying")
    return jax.lax.psum(jnp.sum(x), "x")


def two_chains(xs, weights):
    return [chain(x, weights) for x in xs]


def arguments():
    keys = jax.random.split(jax.random.key(0), STEPS + 2)
    weights = [jax.random.normal(key, (2, 64, 64)) for key in keys[:STEPS]]  # a matrix a device
    return [jax.random.normal(key, (32, 64)) for key in keys[STEPS:]], weights


@pytest.fixture(scope="module")
def ordered():
    def f(xs, weights):
        return tuple(two_chains(xs, weights))

    seen = []

    def spy(xs, weights):
        closed = jax.make_jaxpr(f)(xs, weights)
        seen.append((closed, reorder(closed)))
        return f(xs, weights)

    # Large on paper: sums of a few numbers are a matter of latency, and nothing is held for them.
    xs = [jax.ShapeDtypeStruct((4096, 2048), jnp.float32)] * 2
    weights = [jax.ShapeDtypeStruct((2, 2048, 2048), jnp.float32)] * STEPS
    specs = ([P()] * 2, [P("x")] * STEPS)
    jax.eval_shape(shard_mapped(spy, mesh(), specs, (P(), P())), xs, weights)
    return seen[0]


def kinds(closed):
    return [eqn.primitive.name for eqn in closed.jaxpr.eqns]


def test_every_equation_is_there_once_and_after_its_inputs(ordered):
    before, depend_on = ordered
    counts = {name: kinds(depend_on).count(name) for name in set(kinds(before)) - {"jit", "pjit"}}
    assert counts == {name: kinds(before).count(name) for name in counts}
    known = {*depend_on.jaxpr.invars, *depend_on.jaxpr.constvars}
    for eqn in depend_on.jaxpr.eqns:
        assert all(v in known for v in eqn.invars if isinstance(v, Var)), eqn
        known.update(eqn.outvars)


def test_each_all_reduce_of_one_chain_has_a_matmul_of_the_other_beside_it(ordered):
    """What uses an all-reduced value is tied to a matmul between the two, except after a chain's last matmul."""
    _, depend_on = ordered
    eqns = depend_on.jaxpr.eqns
    large = [i for i, eqn in enumerate(eqns) if eqn.primitive.name.startswith("psum") and eqn.outvars[0].aval.size > 1]
    covered = 0
    for i in large:
        users = [j for j, eqn in enumerate(eqns) if eqns[i].outvars[0] in eqn.invars]
        covered += any(eqn.primitive.name == "dot_general" for eqn in eqns[i + 1 : min(users)])
    assert len(large) == 2 * STEPS
    assert covered >= len(large) - 1


def test_values_are_those_of_the_plain_program():
    xs, weights = arguments()
    specs = ([P()] * 2, [P("x")] * STEPS)

    def gradients(xs, weights):
        return jax.value_and_grad(lambda w: sum(two_chains(xs, w)))(weights)

    out = (P(), [P("x")] * STEPS)
    plain = jax.jit(shard_mapped(gradients, mesh(), specs, out))(xs, weights)
    found = jax.jit(shard_mapped(in_order(gradients), mesh(), specs, out))(xs, weights)
    # The same operations on the same values; fusions may round the scaling and tanh differently.
    for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(found), strict=True):
        scale = float(np.max(np.abs(a)))
        assert np.max(np.abs(np.asarray(a) - np.asarray(b))) <= 8 * np.finfo(np.float32).eps * scale


def test_what_is_recomputed_on_purpose_stays_recomputed():
    """Inlined calls of `jax.checkpoint` keep a barrier: without it XLA would take the first computation's results."""
    _, weights = arguments()
    seen = []

    def f(w, x):
        return jax.grad(lambda w: jnp.sum(jax.lax.psum(jax.checkpoint(lambda w: jnp.tanh(x @ w[0]))(w), "x")))(w)

    def spy(w, x):
        seen.append(reorder(jax.make_jaxpr(f)(w, x)))
        return f(w, x)

    jax.eval_shape(shard_mapped(spy, mesh(), (P("x"), P()), P("x")), weights[0], jnp.ones((8, 64)))
    assert "optimization_barrier" in kinds(seen[0])


def test_what_comes_after_a_value_does_not_depend_on_it():
    """Not on its NaN either; and for a GPU nothing is computed."""
    x, bad = jnp.arange(3.0), jnp.full((2, 2), jnp.nan)
    np.testing.assert_array_equal(jax.jit(depend_on)(x, bad), x)
    text = jax.jit(depend_on).trace(x, bad).lower(lowering_platforms=("cuda",)).as_text()
    found = re.findall(r"stablehlo\.(\w+)", text)
    assert found == ["optimization_barrier"]


def test_a_loop_over_layers_gets_an_order_inside():
    """Of the body of a loop that communicates; values are those of the loop as it was."""
    xs, weights = arguments()
    stacked = jnp.stack(weights)

    def loop(xs, weights):
        def body(xs, w):
            return [jax.lax.pcast(jnp.tanh(jax.lax.psum(x @ w[0], "x") * 0.1), ("x",), to="varying") for x in xs], None

        xs = [jax.lax.pcast(x, ("x",), to="varying") for x in xs]
        xs, _ = jax.lax.scan(body, xs, weights)
        return [jax.lax.psum(jnp.sum(x), "x") for x in xs]

    specs = (P(), P(None, "x"))
    run = {f: jax.jit(shard_mapped(g, mesh(), specs, P())) for f, g in (("plain", loop), ("ordered", in_order(loop)))}
    np.testing.assert_allclose(run["ordered"](xs, stacked), run["plain"](xs, stacked), rtol=1e-6)
    text = str(jax.make_jaxpr(run["ordered"])(xs, stacked))
    assert text.count(" tie ") > 0
    assert "tie" not in str(jax.make_jaxpr(run["plain"])(xs, stacked))


def normalised(x, weights):
    """A chain whose large sums are each followed by elementwise work and a small sum, as a norm's are."""
    for w in weights:
        x = jnp.tile(x, (1, w.shape[1] // x.shape[1]))
        y = jax.lax.psum((jax.lax.pcast(x, ("x",), to="varying") @ w[0]).reshape(1, len(x), -1), "x")[0]
        part = jax.lax.pcast(jnp.sum(y * y, -1, keepdims=True), ("x",), to="varying")
        x = y * jax.lax.rsqrt(jax.lax.psum(part, "x"))
    return x


def large_arguments():
    """As large as it takes: 6 MiB summed in less time than a matmul of 26 GFLOPs takes."""
    keys = jax.random.split(jax.random.key(1), 4)
    xs = [jax.random.normal(key, (768, 8192)) for key in keys[:2]]
    return xs, [jax.random.normal(key, (2, 8192, 2048)) for key in keys[2:]]


def test_a_small_collective_that_is_due_goes_before_a_large_one():
    """Else it would wait for the large one's links, and its chain's next matmul with it."""
    seen = []

    def spy(xs, weights):
        seen.append(reorder(jax.make_jaxpr(lambda xs, ws: tuple(normalised(x, ws) for x in xs))(xs, weights)))
        return xs

    xs, weights = jax.eval_shape(large_arguments)
    jax.eval_shape(shard_mapped(spy, mesh(), ([P()] * 2, [P("x")] * 2), P()), xs, weights)
    eqns = seen[0].jaxpr.eqns
    produced = {v: eqn for eqn in eqns for v in eqn.outvars}
    sums = [eqn for eqn in eqns if eqn.primitive.name.startswith("psum")]
    large = [eqn for eqn in sums if eqn.outvars[0].aval.shape[-1] > 1]
    ties = [produced[eqn.invars[0]] for eqn in large if produced[eqn.invars[0]].primitive.name == "tie"]
    depend_on = [produced[tie.invars[1]] for tie in ties]
    assert len(large) == 4
    assert depend_on
    assert all(eqn in sums and eqn not in large for eqn in depend_on)


def test_values_where_large_collectives_give_way():
    xs, weights = large_arguments()

    def f(xs, weights):
        return tuple(normalised(x, weights) for x in xs)

    specs = ([P()] * 2, [P("x")] * 2)
    ordered = jax.jit(shard_mapped(in_order(f), mesh(), specs, P()))
    plain = jax.jit(shard_mapped(f, mesh(), specs, P()))(xs, weights)
    for a, b in zip(plain, ordered(xs, weights), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5 * float(jnp.max(jnp.abs(a))))
