"""Types of rows: verdicts on idioms, on random programs beside their numbers, and on every primitive that jax has."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.extend.core import primitives
from row_idioms import IDIOMS, ROWS, Net, batches

from axonn_jax.any_flax.dependence.equation import Equation
from axonn_jax.any_flax.dependence.row_loops import CALLED
from axonn_jax.any_flax.dependence.row_rules import SUPPORTED, types_of
from axonn_jax.any_flax.dependence.row_types import Fault, Rows, RowType
from axonn_jax.any_flax.dependence.rows import rows_verdict

AXIS = "parts"


def verdict(run, given, batch, parts=3, weight=None):
    """The verdict on a function of trees of no row and of a batch, which returns the mean and the state."""

    def results(given, batch):
        mean, state = run(given, batch)
        return (() if weight is None else (weight(batch),)), mean, state

    rows = len(jax.tree.leaves(batch)[0])
    sizes = (rows, rows // parts)
    whole, tree = jax.make_jaxpr(results, return_shape=True)(given, batch)
    part = jax.make_jaxpr(results)(given, jax.tree.map(lambda leaf: leaf[: sizes[1]], batch))
    count = len(jax.tree.leaves(batch))
    of_rows = [False] * (len(whole.jaxpr.invars) - count) + [True] * count
    roles = ["weight"] * len(tree[0]) + ["mean"] * len(jax.tree.leaves(tree[1]))
    roles += ["state"] * len(jax.tree.leaves(tree[2]))
    return rows_verdict(whole, part, of_rows, of_rows, roles, sizes, in_turn=False, shared_axis=AXIS)


@pytest.mark.parametrize("name", IDIOMS)
def test_an_idiom_has_its_verdict(name):
    idiom = IDIOMS[name]
    graph, params, state = nnx.split(Net(), nnx.Param, ...)

    def run(given, batch):
        model = nnx.merge(graph, *given[:2], copy=True)
        key = (given[2],) if len(inspect.signature(idiom.loss).parameters) == 3 else ()
        return idiom.loss(model, batch, *key), nnx.to_pure_dict(nnx.state(model, nnx.Not(nnx.Param)))

    found = verdict(run, (params, state, jax.random.key(0)), batches(1)[0], weight=idiom.weight)
    assert found.kind == idiom.kind, found
    assert idiom.said in found.reason


OPERATIONS = {
    "tanh": lambda z, w, p: jnp.tanh(z),
    "layer": lambda z, w, p: z @ w,
    "norm": lambda z, w, p: z - z.mean(-1, keepdims=True),
    "softmax": lambda z, w, p: jax.nn.softmax(z, -1),
    "softmax of rows": lambda z, w, p: jax.nn.softmax(z, 0),
    "mask": lambda z, w, p: jnp.where(z > 0.1, z, 0.0),
    "quotient": lambda z, w, p: z / (1 + jnp.abs(z).sum(-1, keepdims=True)),
    "quotient of all": lambda z, w, p: z / (1 + jnp.abs(z).sum()),
    "sorted": lambda z, w, p: jnp.sort(z, -1),
    "sorted rows": lambda z, w, p: jnp.sort(z, 0),
    "reversed": lambda z, w, p: z[:, ::-1],
    "rolled rows": lambda z, w, p: jnp.roll(z, 1, 0),
    "swapped": lambda z, w, p: jnp.swapaxes(jnp.swapaxes(z, 0, 1) * 2, 0, 1),
    "grouped": lambda z, w, p: jnp.repeat(z.reshape(-1, 2, z.shape[1]).mean(1), 2, 0),
    "doubled": lambda z, w, p: jnp.concatenate([z, -z])[: len(z)],
    "looked up": lambda z, w, p: z[jnp.arange(len(z))[:, None], jnp.argsort(z, -1)],
    "branch": lambda z, w, p: jax.lax.cond(p > 0, jnp.sin, jnp.cos, z),
    "branch of rows": lambda z, w, p: jax.lax.cond(z.sum() > 0, jnp.sin, jnp.cos, z),
    "scan of columns": lambda z, w, p: jax.lax.scan(lambda c, x: (c + x, c * x), z[:, 0], z.T)[1].T,
    "scan of rows": lambda z, w, p: jax.lax.scan(lambda c, x: (c, jnp.cos(x) * c.sum()), w, z)[1],
    "running over rows": lambda z, w, p: jax.lax.scan(lambda c, x: (c + x, c + x), z[0] * 0, z)[1],
    "mapped": lambda z, w, p: jax.vmap(lambda r: jnp.outer(r, r).sum(0))(z),
    "square of rows": lambda z, w, p: (z @ z.T) @ z / len(z),
    "ones": lambda z, w, p: z + jnp.ones(z.shape) / 3,
    "places": lambda z, w, p: z * jnp.arange(1.0, 1 + len(z))[:, None],
    "by how many": lambda z, w, p: z * len(z),
    "remat": lambda z, w, p: jax.checkpoint(lambda z: jnp.sin(z @ w))(z),
    "segments": lambda z, w, p: z + jax.ops.segment_sum(z, jnp.zeros(len(z), int), 2)[0] / len(z),
    "set": lambda z, w, p: z.at[:, 0].set(0.5),
    "set a row": lambda z, w, p: z.at[0].set(0.5),
    "padded": lambda z, w, p: jnp.pad(z, ((0, 0), (1, 1)))[:, 1:-1],
    "read backwards": lambda z, w, p: z * z[-jnp.arange(len(z))],
    "behind a barrier": lambda z, w, p: jax.lax.optimization_barrier((p, z * p))[1],
    "while": lambda z, w, p: jax.lax.fori_loop(0, 3, lambda _, z: z * 0.9, z),
}
ENDS = {
    "mean": lambda z, w, p: z.mean(),
    "sum": lambda z, w, p: z.sum(),
    "mean of sums": lambda z, w, p: jnp.square(z).sum(-1).mean(),
    "mean and norm": lambda z, w, p: z.mean() + jnp.square(w).sum(),
    "sum by rows": lambda z, w, p: z.sum() / len(z) / 2,
    "root": lambda z, w, p: jnp.sqrt(1 + jnp.square(z).mean()),
    "scan": lambda z, w, p: jax.lax.scan(lambda c, r: (c + jnp.sin(r).sum(), None), 0.0, z)[0] / len(z),
    "largest": lambda z, w, p: z.max(),
    "product": lambda z, w, p: z.mean() * p,
    "two": lambda z, w, p: jnp.tanh(z).mean() - z[:, 0].mean() * jnp.square(w).mean(),
}


def programs(count, seed):
    draw = np.random.default_rng(seed)
    for _ in range(count):
        names = draw.choice(list(OPERATIONS), draw.integers(1, 4), replace=False)
        yield [*names, str(draw.choice(list(ENDS)))]


def differs(run, given, batch, parts):
    """True if the mean of parts or of their gradients is another than that of all rows, beyond rounding."""
    loss = jax.value_and_grad(lambda given, batch: run(given, batch)[0])
    whole = jax.tree.leaves(loss(given, batch))
    each = [jax.tree.leaves(loss(given, piece)) for piece in jnp.split(batch, parts)]
    means = [np.mean(values, 0) for values in zip(*each, strict=True)]
    return any(not np.allclose(a, b, rtol=1e-3, atol=1e-5) for a, b in zip(whole, means, strict=True))


def check_random_programs(count, seed):
    draw, kinds = np.random.default_rng(seed), {"proven": 0, "differs": 0, "all": 0}
    given = (jnp.asarray(draw.normal(size=(4, 4)) / 2, jnp.float32), jnp.float32(0.7))
    data = [jnp.asarray(draw.normal(size=(12, 4)), jnp.float32) for _ in range(3)]
    for names in programs(count, seed):

        def run(given, z, names=names):
            w, p = given
            for name in names[:-1]:
                z = OPERATIONS[name](z, w, p)
            return ENDS[names[-1]](z, w, p), ()

        found = verdict(run, given, data[0], parts=2)
        other = any(differs(run, given, batch, 2) for batch in data)
        assert not (found.kind == "proven" and other), (names, found)
        assert found.kind != "not understood", (names, found)
        kinds["proven"] += found.kind == "proven"
        kinds["differs"] += other
        kinds["all"] += 1
    return kinds


def test_numbers_never_contradict_a_proof():
    assert check_random_programs(20, seed=0)["proven"] > 0


@pytest.mark.slow
def test_numbers_of_many_programs_never_contradict_a_proof():
    kinds = check_random_programs(400, seed=1)
    # The verdict does not hide behind caution: the others sort or roll rows that are added up behind it.
    assert kinds["proven"] >= 0.7 * (kinds["all"] - kinds["differs"]), kinds


def test_every_primitive_of_jax_has_a_rule_or_is_not_understood():
    """A new one, or one that is left out, is no error: its result says that it is not understood."""
    names = {getattr(primitives, name).name for name in dir(primitives) if name.endswith("_p")}
    assert len(names) > 150
    shapes = ((ROWS, 4, 4), (ROWS // 3, 4, 4))
    for name in sorted(names - SUPPORTED - CALLED | {"of a later jax"}):
        kinds: list[RowType] = [Rows(0)]
        eqn = Equation(name, ({}, {}), kinds, [shapes], [shapes], [jnp.float32] * 2, [0], [False], 1, (ROWS, ROWS // 3))
        (found,) = types_of(eqn, AXIS)
        assert isinstance(found, Fault), name
        assert found.verdict == "not understood", name
    left_out = sorted(names - SUPPORTED - CALLED)
    assert "dot_general" not in left_out
    assert len(left_out) < 60, left_out
