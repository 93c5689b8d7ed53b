"""A Linen model's loss over a grid has the plain loss and gradients."""

import functools

import grids
import hlo_text
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import axonn_jax as ax

VOCAB, HIDDEN, LENGTH, ROWS = 64, 32, 6, 8
GRIDS = [(1, 2, 2, 2), (2, 2, 1, 2)]
# Of a parameter's largest entry: sums of another order, through a dozen layers.
GRADIENT_TOLERANCE = 1e-5


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        h = nn.LayerNorm()(x)
        x = x + nn.MultiHeadDotProductAttention(num_heads=4, qkv_features=HIDDEN)(h, h)
        return x + nn.Dense(HIDDEN)(nn.gelu(nn.Dense(2 * HIDDEN)(nn.LayerNorm()(x)))), None


class TiedLM(nn.Module):
    """Stacked blocks, their layers in a dim of the parameters, under remat; logits by the table of tokens."""

    stacked_at: int = 0

    @nn.compact
    def __call__(self, ids):
        tokens = nn.Embed(VOCAB, HIDDEN)
        blocks = nn.scan(
            nn.remat(Block), variable_axes={"params": self.stacked_at}, split_rngs={"params": True}, length=3
        )
        x, _ = blocks()(tokens(ids), None)
        return tokens.attend(nn.RMSNorm()(x))


class ConvNet(nn.Module):
    """Convolutions, with groups too; the masked one and the norms have no sharded form."""

    batch_norm: bool = False

    @nn.compact
    def __call__(self, x):
        bias = not self.batch_norm  # whose gradient would be rounding
        x = nn.Conv(16, (1, 1), mask=np.tri(16)[None, None], use_bias=bias)(nn.Conv(16, (3, 3), use_bias=bias)(x))
        x = nn.BatchNorm(use_running_average=False)(x) if self.batch_norm else nn.GroupNorm(num_groups=4)(x)
        x = nn.Conv(16, (3, 3), feature_group_count=16)(nn.relu(x))
        return nn.Dense(8)(nn.ConvTranspose(8, (3, 3), strides=(2, 2))(x).mean((1, 2)))


def _ids(*shape):
    return np.random.default_rng(0).integers(0, VOCAB, (*shape, ROWS, LENGTH), dtype=np.int32)


def _images(*shape):
    rng = np.random.default_rng(0)
    draws = {"image": (*shape, ROWS, 6, 6, 3), "target": (*shape, ROWS, 8)}
    return {name: rng.standard_normal(size).astype(np.float32) for name, size in draws.items()}


def _lm_loss(model):
    def loss(params, ids):
        logits = model.apply({"params": params}, ids)
        return optax.softmax_cross_entropy_with_integer_labels(logits, jnp.roll(ids, 1, -1)).mean()

    return loss


def _conv_loss(model):
    def loss(variables, batch):
        out, updated = model.apply(variables, batch["image"], mutable=["batch_stats"])
        return jnp.mean(jnp.square(out - batch["target"])), updated

    return loss


@functools.cache
def _case(name):
    """Loss, parameters and a function for batches of the given leading dims."""
    if name.startswith("lm"):
        model = TiedLM(int(name[2:] or 0))
        return _lm_loss(model), model.init(jax.random.key(0), _ids())["params"], _ids
    model = ConvNet(name == "batch norm")
    return _conv_loss(model), model.init(jax.random.key(0), _images()["image"]), _images


def _value(out):
    return out[0] if isinstance(out, tuple) else out


def _gradients(loss, params, batch):
    return jax.jit(jax.value_and_grad(lambda p, b: _value(loss(p, b))))(params, batch)


def _assert_same(got, want):
    np.testing.assert_allclose(got[0], want[0], rtol=1e-6)
    largest = max(float(jnp.abs(g).max()) for g in jax.tree.leaves(want[1]))
    for (path, exact), here in zip(jax.tree.leaves_with_path(want[1]), jax.tree.leaves(got[1]), strict=True):
        scale = max(float(jnp.abs(exact).max()), 1e-2 * largest)  # a key's bias has rounding only
        assert float(jnp.abs(np.asarray(here) - exact).max()) <= GRADIENT_TOLERANCE * scale, path


@pytest.mark.parametrize(
    ("name", "axes"), [("lm", GRIDS[0]), ("lm1", GRIDS[1]), ("conv", GRIDS[0]), ("conv", GRIDS[1])], ids=str
)
def test_loss_and_gradients_are_the_plain_ones(name, axes):
    (loss, params, batches), grid = _case(name), grids.over(*axes)
    sharded, placed = ax.parallelize_linen(loss, params, grid, batches())
    got = _gradients(sharded, placed, grid.shard_batch(batches()))
    _assert_same(got, _gradients(loss, params, batches()))
    assert jax.tree.structure(placed) == jax.tree.structure(params)
    for value, gradient, leaf in zip(*map(jax.tree.leaves, (placed, got[1], sharded.layouts)), strict=True):
        assert not leaf.in_layer or gradient.sharding.is_equivalent_to(value.sharding, value.ndim)
    report = ax.sharding_report(sharded)
    whole = {entry.path for entry in report.entries if not entry.plan.sharded}
    assert whole == ({"params.Conv_0", "params.GroupNorm_0"} if name == "conv" else set())
    assert report.bytes == 4 * sum(value.size for value in jax.tree.leaves(params))


@pytest.mark.parametrize("name", ["lm", "batch norm"])
def test_replicas_under_vmap_reduce_over_data_once(name):
    """Microbatches of two replicas, their rows over `z` alone."""
    (loss, params, batches), grid, replicas = _case(name), grids.over(2, 2, 1, 2), 2
    batch = batches(2)
    sharded, placed = ax.parallelize_linen(loss, params, grid, jax.tree.map(lambda b: b[0, ::replicas], batch))
    sharded = sharded.with_row_axes(("z",), "data")

    def replica(params, batch):
        def add(carry, rows):
            value, gradient = jax.value_and_grad(lambda p: _value(sharded(p, rows)))(params)
            return jax.tree.map(jnp.add, carry, (value, gradient)), None

        zeros = (jnp.float32(0), jax.tree.map(lambda p: 0 * p, params))
        return jax.lax.scan(add, zeros, batch)[0]

    def step(params, batch):
        def lay(value, spec):
            value = jnp.broadcast_to(value, (replicas, *value.shape))
            return jax.lax.with_sharding_constraint(value, NamedSharding(grid.mesh, P("data", *spec)))

        own = jax.tree.map(lay, params, sharded.specs)
        mapped = jax.vmap(replica, in_axes=(0, 1), axis_name="data", spmd_axis_name="data")
        return jax.tree.map(lambda sums: sums.mean(0) / 2, mapped(own, batch))

    def split(value):
        value = value.reshape(2, replicas, -1, *value.shape[2:])
        return jax.device_put(value, NamedSharding(grid.mesh, P(None, "data", "z")))

    given = placed, jax.tree.map(split, batch)
    program = jax.jit(step).lower(*given).compile()
    one_by_one = [_gradients(loss, params, jax.tree.map(lambda b, i=i: b[i], batch)) for i in range(2)]
    _assert_same(program(*given), jax.tree.map(lambda a, b: (a + b) / 2, *one_by_one))
    moved = hlo_text.collectives(program.as_text())
    looped = [each for each in moved if each.in_loop and each.crosses(grid.mesh, "data")]
    assert len(looped) == (2 if name == "batch norm" else 0)  # that one's statistics are the global batch's
    assert {each.kind for each in moved} <= {"all-reduce", "all-gather", "reduce-scatter"}


class Twice(nn.Dense):
    """A subclass that wraps the call."""

    @nn.compact
    def __call__(self, inputs):
        return 2 * super().__call__(inputs)


class Own(nn.Dense):
    """A subclass that replaces the call."""

    @nn.compact
    def __call__(self, inputs):
        return inputs @ self.param("kernel", self.kernel_init, (inputs.shape[-1], self.features)) ** 2


class Annotated(nn.Module):
    """Layers that name axes of meshes that are not there; stacks by nn.vmap; branches."""

    def setup(self):
        lecun = nn.initializers.lecun_normal()
        self.up = nn.Dense(32, kernel_init=nn.with_partitioning(lecun, (None, "model")))
        self.mid = Twice(32, kernel_init=nn.with_logical_partitioning(lecun, ("embed", "mlp")))
        stack = nn.vmap(
            nn.Dense, variable_axes={"params": 0}, split_rngs={"params": True}, in_axes=None, out_axes=-2, axis_size=2
        )
        self.heads, self.own = stack(16), Own(16)
        self.out = nn.DenseGeneral(64, axis=(-2, -1), kernel_init=nn.with_partitioning(lecun, ("model", None)))

    def __call__(self, x):
        x = nn.with_logical_constraint(nn.relu(self.up(x)), ("batch", "mlp"))
        x = nn.cond(jnp.sum(x) > 0, lambda m, x: m.mid(x), lambda m, x: 3 * m.mid(x), self, x)
        return self.own(self.out(nn.relu(self.heads(x))))


def _annotated():
    model, x = Annotated(), np.random.default_rng(0).standard_normal((ROWS, 16)).astype(np.float32)
    return model, model.init(jax.random.key(0), x), x


def _gathered(sharded, params, batch):
    return sharded(sharded.gather_spread(params), batch)


def test_axis_names_subclasses_stacks_and_branches():
    (model, boxed, x), grid = _annotated(), grids.over(1, 2, 2, 2)
    compiled = jax.jit(model.apply)

    def loss(params, x):
        with nn.logical_axis_rules((("batch", "data"), ("embed", "model"), ("mlp", "model"))):
            return jnp.mean(jnp.square(compiled(params, x)))

    params = nn.unbox(boxed)
    want = _gradients(loss, params, x)  # which leaves the compiled function's trace with jax
    with jax.set_mesh(grid.mesh):
        sharded, placed = ax.parallelize_linen(loss, boxed, grid, x)
        assert "shard_map" in str(jax.make_jaxpr(sharded)(placed, x))
        _assert_same(_gradients(sharded, placed, grid.shard_batch(x)), want)
    assert "shard_map" not in str(jax.make_jaxpr(loss)(params, x))
    specs = sharded.specs["params"]
    assert specs["up"]["kernel"] == P(("x", "z"), "y")
    assert specs["mid"]["kernel"] == P(("y", "z"), "x")
    assert specs["heads"]["kernel"] == P(None, ("x", "z"), "y")
    assert specs["own"]["kernel"] == P(("z", "y", "x"), None)
    gathered = functools.partial(_gathered, sharded)
    _assert_same(_gradients(gathered, placed, grid.shard_batch(x)), want)
    entries = {entry.path: entry.plan for entry in ax.sharding_report(sharded).entries}
    assert [path for path, plan in entries.items() if not plan.sharded] == ["params.own"]
    assert entries["params.own"].kind == "Own"


def test_stacked_parameters_are_laid_out_behind_their_layers():
    loss, params, batches = _case("lm1")
    sharded, _ = ax.parallelize_linen(loss, params, grids.over(1, 2, 2, 2), batches())
    block = sharded.specs["ScanCheckpointBlock_0"]
    assert sharded.specs["Embed_0"]["embedding"] == P(("y", "z"), "x")
    assert block["Dense_1"]["kernel"] == P(("x", "z"), None, "y")
    assert block["MultiHeadDotProductAttention_0"]["out"]["kernel"] == P(("y", "z"), None, None, "x")
    (entry,) = [e for e in ax.sharding_report(sharded).entries if e.path.endswith("Dense_1")]
    (call,) = entry.plan.calls
    assert (call.in_size, call.out_size) == (3 * ROWS * LENGTH * HIDDEN, 3 * ROWS * LENGTH * 2 * HIDDEN)
    assert sum(t.bytes for t in entry.transfers if not t.backward and t.axes == ("z",)) == 3 * 4 * HIDDEN * HIDDEN // 4


class Unread(nn.Module):
    """A step of a scan, with a result that nothing reads."""

    @nn.compact
    def __call__(self, carry, _):
        return (nn.Dense(16)(carry[0]), nn.Dense(8)(carry[0])), None


def test_overrides_are_by_path_in_the_tree():
    grid, x = grids.over(1, 2, 2, 2), np.ones((ROWS, 16), np.float32)
    model = nn.scan(Unread, variable_axes={"params": 0}, split_rngs={"params": True}, length=64)()
    params = model.init(jax.random.key(0), (x, np.zeros((ROWS, 8), np.float32)), None)

    def loss(params, x):
        (y, _), _ = model.apply(params, (x, jnp.zeros((ROWS, 8))), None)
        return jnp.mean(y)

    sharded, _ = ax.parallelize_linen(loss, params, grid, x, overrides={"params.Dense_1": "replicated"})
    assert sharded.specs["params"]["Dense_0"]["kernel"] == P(None, ("x", "z"), "y")
    assert not any(sharded.specs["params"]["Dense_1"]["kernel"])
    with pytest.raises(ax.UserError, match="did you mean"):
        ax.parallelize_linen(loss, params, grid, x, overrides={"Dense_1": "replicated"})


class ByHand(nn.Module):
    """Logits by a product of its own with the table."""

    @nn.compact
    def __call__(self, ids):
        table = nn.Embed(VOCAB, HIDDEN)
        return nn.relu(nn.Dense(HIDDEN)(table(ids))) @ table.embedding.T


def test_a_table_that_a_product_reads_too_is_gathered_over_z():
    """XLA multiplies wrong with one that `z` and both other axes split, on a mesh with `data` too."""
    model, ids, grid = ByHand(), _ids(), grids.over(1, 2, 2, 2)
    params = model.init(jax.random.key(0), ids)

    def loss(params, ids):
        squares = sum(jnp.sum(jnp.square(p)) for p in jax.tree.leaves(params))
        return jnp.mean(jnp.square(model.apply(params, ids))) + 1e-3 * squares

    sharded, placed = ax.parallelize_linen(loss, params, grid, ids)
    shared = jax.tree.map(lambda leaf: leaf.shared, sharded.layouts)
    assert shared == jax.tree.map_with_path(lambda path, _: path[-1].key == "embedding", params)
    assert "sharding_constraint" in str(jax.make_jaxpr(sharded)(placed, ids))
    got = _gradients(sharded, placed, grid.shard_batch(ids))
    _assert_same(got, _gradients(loss, params, ids))


def test_modules_beside_each_other_overrides_and_dtypes():
    """Two models in one loss, their layers of one path; a dtype; shapes in place of arrays."""
    grid, x = grids.over(1, 2, 2, 2), np.ones((ROWS, 16), np.float32)
    first, second = nn.Dense(16), nn.Dense(16)
    params = {"a": first.init(jax.random.key(0), x), "b": second.init(jax.random.key(1), x), "gain": jnp.ones(16)}

    def loss(params, x):
        y = second.apply(params["b"], first.apply(params["a"], x) * params["gain"])
        return jnp.mean(jnp.square(y.astype(jnp.float32))), y

    sharded, placed = ax.parallelize_linen(loss, params, grid, x, overrides={"b.*": "replicated"})
    assert sharded.specs["b"]["params"]["kernel"] == sharded.specs["a"]["params"]["kernel"]
    _assert_same(_gradients(sharded, placed, x), _gradients(loss, params, x))
    sharded, placed = ax.parallelize_linen(loss, params, grid, x)
    half = sharded.with_dtype(jnp.bfloat16)
    assert half(placed, x)[1].dtype == jnp.bfloat16
    assert {g.dtype for g in jax.tree.leaves(_gradients(half, placed, x)[1])} == {jnp.dtype(jnp.float32)}
    np.testing.assert_allclose(half(placed, x)[0], loss(params, x)[0], rtol=0.02)
    _, shapes = ax.parallelize_linen(loss, jax.eval_shape(lambda: params), grid, jax.eval_shape(lambda: x))
    assert jax.tree.map(lambda p: p.sharding, placed) == jax.tree.map(lambda s: s.sharding, shapes)
