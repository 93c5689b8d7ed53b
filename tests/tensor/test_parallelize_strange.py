"""Modules of other people behind `parallelize`: types derived from Flax layers, parameters of their own, stacks."""

import functools

import grids
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import axonn_jax as ax
from axonn_jax.grid import GridShape

HIDDEN, HEADS, VOCAB, ROWS, LENGTH, LAYERS = 32, 4, 64, 8, 6, 3
LOSS_TOLERANCE = 1e-6
GRADIENT_TOLERANCE = 1e-5  # of a parameter's largest entry: sums of another order


class Wide(nnx.Linear):
    """An `__init__` of its own."""

    def __init__(self, features: int, rngs: nnx.Rngs):
        super().__init__(features, 2 * features, use_bias=False, rngs=rngs)


class Scaled(nnx.Linear):
    """Work before and after the layer's, with a parameter of its own."""

    def __init__(self, *args, rngs: nnx.Rngs):
        super().__init__(*args, rngs=rngs)
        self.shift = nnx.Param(jnp.full(self.out_features, 0.1))

    def __call__(self, x):
        return 2.0 * super().__call__(jnp.tanh(x)) + self.shift[...]


class Twice(Scaled):
    """Derived from a derived type, compiled and called by keyword."""

    @nnx.jit
    def __call__(self, x):
        return super().__call__(x=x) + 1.0


class Padded(nnx.Conv):
    """A convolution that adds to its result, of single examples too."""

    def __call__(self, x):
        return super().__call__(x) + 1.0


class Squared(nnx.Linear):
    """Its kernel's squares multiply, without the layer's own method."""

    def __call__(self, x):
        return x @ jnp.square(self.kernel[...]) + self.bias[...]


class Unit(nnx.Embed):
    """Methods of its own around the table."""

    def encode(self, ids):
        return self(ids) * jnp.sqrt(jnp.float32(self.features))

    def decode(self, x):
        return self.attend(x) + 1e-3 * x @ self.embedding[...].T


class Offset(nnx.RMSNorm):
    """Gemma's norm, of a weight around zero."""

    def __call__(self, x):
        return super().__call__(x) + x


class Derived(nnx.Module):
    """A model of derived layers."""

    def __init__(self, rngs: nnx.Rngs):
        self.table = Unit(VOCAB, HIDDEN, rngs=rngs)
        self.norm = Offset(HIDDEN, rngs=rngs)
        self.up = Wide(HIDDEN, rngs)
        self.scaled = Scaled(2 * HIDDEN, HIDDEN, rngs=rngs)
        self.twice = Twice(HIDDEN, HIDDEN, rngs=rngs)
        self.conv = Padded(HIDDEN, HIDDEN, (3,), feature_group_count=HIDDEN, rngs=rngs)
        self.square = Squared(HIDDEN, HIDDEN, rngs=rngs)
        self.lora = nnx.LoRALinear(HIDDEN, HIDDEN, lora_rank=4, rngs=rngs)
        self.lora.lora.lora_b[...] = 0.1 * jnp.cos(jnp.arange(4.0 * HIDDEN).reshape(4, HIDDEN))

    def __call__(self, ids):
        x = self.norm(self.table.encode(ids))
        x = x + self.twice(self.scaled(nnx.gelu(self.up(x))))
        x = x + jax.vmap(self.conv)(self.conv(x))  # an example at a time
        return self.table.decode(self.lora(self.square(x)))


class Product(nnx.Module):
    """A strangers' einsum layer."""

    def __init__(self, string, shape, rngs):
        self.string, self.w = string, nnx.Param(0.2 * jax.random.normal(rngs.params(), shape))

    def __call__(self, x):
        return jnp.einsum(self.string, x, self.w[...])


class Rms(nnx.Module):
    """A strangers' norm."""

    def __init__(self, features):
        self.scale = nnx.Param(jnp.ones(features))

    def __call__(self, x):
        return self.scale[...] * x * jax.lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + 1e-6)


class Own(nnx.Module):
    """A language model as tunix writes them: nothing but parameters, of which one is used twice."""

    def __init__(self, rngs: nnx.Rngs):
        head = HIDDEN // HEADS
        self.input_embedding = nnx.Param(0.2 * jax.random.normal(rngs.params(), (VOCAB, HIDDEN)))
        self.norm = Rms(HIDDEN)
        self.qkv = nnx.List([Product("btd,dnh->btnh", (HIDDEN, HEADS, head), rngs) for _ in range(3)])
        self.out = Product("btnh,nhd->btd", (HEADS, head, HIDDEN), rngs)
        self.mlp = nnx.List([nnx.Linear(HIDDEN, 2 * HIDDEN, rngs=rngs), nnx.Linear(2 * HIDDEN, HIDDEN, rngs=rngs)])

    def __call__(self, ids):
        x = self.input_embedding[ids]
        h = self.norm(x)
        x = x + self.out(nnx.dot_product_attention(*(layer(h) for layer in self.qkv)))
        x = x + self.mlp[1](nnx.gelu(self.mlp[0](x)))
        return x @ self.input_embedding[...].T


class Block(nnx.Module):
    """A transformer's block."""

    def __init__(self, rngs: nnx.Rngs):
        self.norm_1, self.norm_2 = nnx.LayerNorm(HIDDEN, rngs=rngs), nnx.RMSNorm(HIDDEN, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(HEADS, HIDDEN, decode=False, rngs=rngs)
        self.up = Scaled(HIDDEN, 2 * HIDDEN, rngs=rngs)
        self.conv = nnx.Conv(2 * HIDDEN, 2 * HIDDEN, (3,), feature_group_count=2 * HIDDEN, rngs=rngs)
        self.down = nnx.Linear(2 * HIDDEN, HIDDEN, rngs=rngs)

    def __call__(self, x):
        x = x + self.attention(self.norm_1(x))
        return x + self.down(nnx.gelu(self.conv(self.up(self.norm_2(x)))))


class Stacked(nnx.Module):
    """Blocks stacked by `nnx.vmap` and run by `nnx.scan`; heads stacked and run by `nnx.vmap`."""

    def __init__(self, rngs: nnx.Rngs):
        @nnx.split_rngs(splits=LAYERS)
        @nnx.vmap(in_axes=0, out_axes=0)
        def blocks(rngs):
            return Block(rngs)

        @nnx.split_rngs(splits=2)
        @nnx.vmap(in_axes=0, out_axes=0)
        def heads(rngs):
            return nnx.Linear(HIDDEN, VOCAB, rngs=rngs)

        self.table = nnx.Embed(VOCAB, HIDDEN, rngs=rngs)
        self.blocks, self.heads = blocks(rngs), heads(rngs)

    def __call__(self, ids):
        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        def run(block, x):
            return block(x)

        @nnx.vmap(in_axes=(0, None))
        def project(head, x):
            return head(x)

        return jnp.sum(jnp.sin(project(self.heads, run(self.blocks, self.table(ids)))), 0)


MODELS = {"derived": Derived, "own": Own, "stacked": Stacked}
IDS = np.random.default_rng(0).integers(0, VOCAB, (ROWS, LENGTH), dtype=np.int32)


def _loss(model, ids):
    logp = jax.nn.log_softmax(model(ids)[:, :-1])
    return -jnp.mean(jnp.take_along_axis(logp, ids[:, 1:, None], -1))


def _step(model, ids):
    loss, grads = nnx.jit(nnx.value_and_grad(_loss))(model, ids)
    return loss, {".".join(map(str, path)): np.asarray(g.get_value()) for path, g in nnx.to_flat_state(grads)}


@functools.cache
def _plain(kind):
    return _step(MODELS[kind](nnx.Rngs(0)), IDS)


def _made(kind, *axes, with_call=True):
    grid = grids.lay(GridShape(1, *axes))
    call = (lambda m: m(IDS)) if with_call else None
    return grid, ax.parallelize(MODELS[kind](nnx.Rngs(0)), grid, call=call)


SLOW = [(kind, (2, 2, 2, 1), True) for kind in MODELS] + [(kind, (1, 2, 2, 2), False) for kind in MODELS]
CASES = [
    *((kind, axes, True) for kind in MODELS for axes in ((1, 2, 2, 2), (2, 2, 1, 2))),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW),
]


@pytest.mark.parametrize(("kind", "axes", "with_call"), CASES, ids=str)
def test_loss_and_gradients_are_the_plain_models(kind, axes, with_call):
    grid, model = _made(kind, *axes, with_call=with_call)
    loss, grads = _step(model, grid.shard_batch(IDS))
    want_loss, want = _plain(kind)
    np.testing.assert_allclose(loss, want_loss, rtol=LOSS_TOLERANCE)
    assert grads.keys() == want.keys()
    for name, grad in want.items():
        scale = max(np.abs(grad).max(), 1e-2)  # a key's bias has rounding only
        assert np.abs(grads[name] - grad).max() <= GRADIENT_TOLERANCE * scale, name


def _roles(model):
    return {entry.path: entry.roles for entry in ax.sharding_report(model).entries}


def test_a_derived_layer_is_split_where_its_call_comes_to_the_layers():
    _, model = _made("derived", 1, 2, 2, 2)
    roles = _roles(model)
    by_order = _roles(_made("derived", 1, 2, 2, 2, with_call=False)[1])  # where code alone says so
    assert {path for path in roles if "->" in roles[path]} == {path for path in by_order if "->" in by_order[path]}
    assert roles["up"] == "x -> y"
    assert roles["scaled"] == "y -> x"
    assert roles["twice"] == roles["lora"] == "x -> y"
    assert roles["norm"] == "x"
    assert roles["conv"] == "x -> x"
    assert roles["square"] == "left to the compiler"
    assert isinstance(model.scaled, Scaled)
    assert "a Squared has a __call__ of its own" in str(ax.sharding_report(model))


def test_a_derived_layer_with_a_method_of_the_layers_is_left_alone():
    class Rotated(nnx.Embed):
        def eval(self, **kwargs):
            return super().eval(**kwargs)

    grid = grids.lay(GridShape(1, 1, 2, 2, 2))
    model = ax.parallelize(nnx.Sequential(Rotated(8, 8, rngs=nnx.Rngs(0)), nnx.Linear(8, 8, rngs=nnx.Rngs(0))), grid)
    assert "layers.0: a Rotated has eval of its own and not Embed's; 256 B whole" in str(ax.sharding_report(model))


def test_a_device_holds_little_more_than_its_part():
    report = ax.sharding_report(_made("own", 1, 2, 2, 2)[1])
    assert report.over_ideal <= 1.10, str(report)
    (whole,) = [entry for entry in report.entries if entry.whole]
    assert whole.reason == f"a Rms has no sharded form; {report.whole} B whole"
    text = str(report).splitlines()
    reason = "a Product has no sharded form; kept w over x, y, z, and gathered by the compiler"
    assert f"out: {reason}" in text
    assert f"{report.over_ideal:.2f} of an equal part, {report.whole} B whole" in text[-1]


def test_spread_parameters_and_their_moments_stay_where_they_lie():
    grid, model = _made("own", 1, 2, 2, 2)
    assert model.input_embedding.get_value().sharding.spec == P(("z", "y", "x"), None)
    optimizer = nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)
    params = nnx.to_flat_state(nnx.state(model, nnx.Param))
    before = {path: p.get_value().sharding for path, p in params if path[0] != "norm"}  # whole, for XLA to lay out

    @nnx.jit
    def step(model, optimizer, ids):
        loss, grads = nnx.value_and_grad(_loss)(model, ids)
        with jax.numpy_dtype_promotion("standard"):  # optax needs it
            optimizer.update(model, grads)
        return loss

    for _ in range(2):
        step(model, optimizer, grid.shard_batch(IDS))
    for tree in (nnx.state(model, nnx.Param), optimizer.opt_state[0].mu, optimizer.opt_state[0].nu):
        held = dict(nnx.to_flat_state(tree))
        for path, sharding in before.items():
            assert held[path].get_value().sharding.is_equivalent_to(sharding, held[path].ndim), path


def test_a_stacks_dim_stays_whole_in_front():
    _, model = _made("stacked", 1, 2, 2, 2)
    assert model.blocks.down.kernel.get_value().sharding.spec == P(None, ("y", "z"), "x")
    assert model.blocks.attention.query.kernel.get_value().sharding.spec == P(None, ("x", "z"), "y", None)
    assert model.blocks.norm_1.scale.get_value().sharding.spec == P(None, "x")
    assert model.heads.kernel.get_value().sharding.spec == P(None, ("x", "z"), "y")
    (down,) = [entry for entry in ax.sharding_report(model).entries if entry.path == "blocks.down"]
    assert down.plan.sizes == (LAYERS * ROWS * LENGTH * 2 * HIDDEN, LAYERS * ROWS * LENGTH * HIDDEN)
