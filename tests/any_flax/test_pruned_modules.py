"""Pruned training with `Trainer(loss=)`: a plain loop with the same masks, on every grid; checkpoints; a late start."""

import any_models as models
import grids
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

import axonn_jax as ax
from axonn_jax.core.grid import GridShape

DENSITY, STEPS = 0.25, 20
PRUNE = ax.PruneConfig(density=DENSITY)
FULL = GridShape(data=2, z=2, y=2)
KERNELS = {f"block.attention.{name}.kernel" for name in ("query", "key", "value", "out")}
KERNELS |= {"block.up.kernel", "block.down.kernel"}
"""Of the model; its table, norms, biases and own parameter stay dense."""


def optimizer():
    return optax.adamw(1e-3, weight_decay=0.1)


def largest(value):
    """A mask by numpy: of the largest magnitudes."""
    order, mask = np.argsort(-np.abs(value).reshape(-1), kind="stable"), np.zeros(value.size, np.float32)
    mask[order[: round(value.size * DENSITY)]] = 1
    return jnp.asarray(mask.reshape(value.shape))


def plain_loop(loss, params, prunes, batches):
    """Losses and parameters of dense training from masked weights, with gradients times the masks."""
    paths, tree = jax.tree_util.tree_flatten_with_path(params)
    names = [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in paths]
    masks = [largest(value) if prunes(name) else 1.0 for name, (_, value) in zip(names, paths, strict=True)]
    params, masks = jax.tree.map(jnp.multiply, params, jax.tree.unflatten(tree, masks)), jax.tree.unflatten(tree, masks)
    own, losses = optimizer(), []
    state = own.init(params)

    @jax.jit
    def step(params, state, batch):
        value, grads = jax.value_and_grad(loss)(params, batch)
        updates, state = own.update(jax.tree.map(jnp.multiply, grads, masks), state, params)
        return optax.apply_updates(params, updates), state, value

    with jax.numpy_dtype_promotion("standard"):  # as users have it
        for batch in batches:
            params, state, value = step(params, state, batch)
            losses.append(float(value))
    return losses, dict(zip(names, jax.tree.leaves(params), strict=True))


@pytest.fixture(scope="module")
def plain():
    graph, params, rest = nnx.split(models.Language(nnx.Rngs(0)), nnx.Param, ...)
    named = {".".join(map(str, path)): var.get_value() for path, var in nnx.to_flat_state(params)}
    paths = {".".join(map(str, path)): (path, var) for path, var in nnx.to_flat_state(params)}

    def loss(values, batch):
        state = nnx.from_flat_state([(paths[name][0], paths[name][1].replace(v)) for name, v in values.items()])
        return models.language_loss(nnx.merge(graph, state, rest, copy=True), batch)

    return plain_loop(loss, named, KERNELS.__contains__, models.texts(STEPS))


def language(axes, prune=PRUNE, **memory):
    grid = grids.lay(axes)
    options = {"microbatches": 2, "prune": prune, "memory": ax.MemoryConfig(**memory)}
    return ax.Trainer(models.Language(nnx.Rngs(0)), optimizer(), grid, loss=models.language_loss, **options)


@pytest.mark.parametrize(
    ("axes", "memory"),
    [(GridShape(), {}), (FULL, {"zero": 1, "offload": "optimizer"}), (GridShape(data=2, z=2, x=2), {"zero": 1})],
    ids=["one device", "data 2 z 2 y 2, ZeRO, offload", "data 2 z 2 x 2, ZeRO"],
)
def test_a_plain_loop_with_the_same_masks(axes, memory, plain):
    losses, params = plain
    trainer = language(axes, **memory)
    got = [float(trainer.step(batch)["loss"]) for batch in models.texts(STEPS)]
    np.testing.assert_allclose(got, losses, rtol=2e-6)
    assert set(trainer.engine.store.forms.shapes) == KERNELS
    for name, value in trainer.engine.params.items():
        # Of a key's bias gradients are rounding only, which Adam makes as large as others.
        np.testing.assert_allclose(value, params[name], atol=1e-2 if "key.bias" in name else 5e-5, err_msg=name)
        if name in KERNELS:
            np.testing.assert_array_equal(np.asarray(value) != 0, params[name] != 0, err_msg=name)
    held = nnx.state(trainer.model, nnx.Param)
    assert np.count_nonzero(held["block"]["up"]["kernel"].get_value()) == round(DENSITY * 2 * models.WIDTH**2)


def test_a_run_goes_on_on_another_grid(plain, tmp_path):
    losses, _ = plain
    batches, first = models.texts(STEPS), language(FULL, zero=1)
    for batch in batches[:10]:
        first.step(batch)
    first.save(tmp_path, 10)
    second = language(GridShape(data=4, x=2), offload="optimizer")
    assert second.load(tmp_path) == 10
    evaluated = second.evaluate(batches[10:11])
    got = [float(second.step(batch)["loss"]) for batch in batches[10:]]
    np.testing.assert_allclose([evaluated, *got], [losses[10], *losses[10:]], rtol=2e-6)


def test_pruning_begins_behind_a_step():
    """Of state in host memory, too."""
    trainer = language(FULL, ax.PruneConfig(density=DENSITY, at_step=2), offload="optimizer")
    dense, batches = language(FULL, ax.PruneConfig(), offload="optimizer"), models.texts(4)
    for batch in batches[:2]:
        assert float(trainer.step(batch)["loss"]) == float(dense.step(batch)["loss"])
    weights, pruned = (jax.tree.map(np.asarray, each.engine.params) for each in (dense, trainer))
    for name in KERNELS:
        np.testing.assert_array_equal(pruned[name], weights[name] * largest(weights[name]), err_msg=name)
    assert any("pruned 6 kernels to 0.25" in line for line in trainer.pruning.lines())
    assert np.isfinite([float(trainer.step(batch)["loss"]) for batch in batches[2:]]).all()
    after = jax.tree.map(np.asarray, trainer.engine.params)
    assert all(np.array_equal(after[name] != 0, pruned[name] != 0) for name in KERNELS)


class Net(linen.Module):
    @linen.compact
    def __call__(self, ids):
        x = linen.Embed(models.VOCAB, models.WIDTH)(ids)
        x = x + linen.Dense(models.WIDTH)(linen.gelu(linen.Dense(2 * models.WIDTH)(linen.LayerNorm()(x))))
        return linen.DenseGeneral((8, 8))(x).reshape(*ids.shape, models.VOCAB)


def linen_loss(params, batch):
    return models.cross_entropy(Net().apply(params, batch["ids"]), batch["targets"]).mean()


@pytest.mark.parametrize("axes", [GridShape(), GridShape(data=2, z=2, y=2)], ids=grids.name)
def test_kernels_of_linen(axes):
    batches = models.texts(5)
    variables = Net().init(jax.random.key(0), batches[0]["ids"])
    losses, params = plain_loop(linen_loss, variables, lambda name: "Dense" in name and "kernel" in name, batches)
    grid = grids.lay(axes)
    loss, placed = ax.parallelize_linen(linen_loss, variables, grid, batches[0])
    trainer = ax.Trainer(placed, optimizer(), grid, loss=loss, prune=PRUNE)
    np.testing.assert_allclose([float(trainer.step(batch)["loss"]) for batch in batches], losses, rtol=2e-6)
    for name, value in trainer.engine.params.items():
        np.testing.assert_allclose(value, params[name], atol=5e-5, err_msg=name)
