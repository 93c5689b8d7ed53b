"""What an optimizer sees of a model: its parameters in their own tree, so that masks and labels select as in Flax."""

import any_models as models
import grids
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx, traverse_util

import axonn_jax as ax
from axonn_jax.core.grid import GridShape

X = np.random.default_rng(0).normal(size=(8, 6)).astype(np.float32)


class Net(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.body, self.head = (
            nnx.LoRALinear(6, 16, lora_rank=2, rngs=rngs),
            nnx.LoRALinear(16, 6, lora_rank=2, rngs=rngs),
        )
        self.norm = nnx.LayerNorm(16, rngs=rngs)

    def __call__(self, x):
        return self.head(self.norm(self.body(x)))


def loss(model, batch):
    return jnp.mean(jnp.square(model(batch) - batch))


def by_path(select):
    """A label function as scripts of NNX have it."""
    return lambda params: jax.tree_util.tree_map_with_path(lambda path, _: select(jax.tree_util.keystr(path)), params)


def of_state(params):
    return nnx.map_state(lambda path, _: "train" if path[0] == "head" else "freeze", params)


OPTIMIZERS = {
    "decay by path": lambda: optax.adamw(0.1, weight_decay=1.0, mask=by_path(lambda path: "kernel" in path)),
    "labels by path": lambda: optax.multi_transform(
        {"fast": optax.sgd(0.1), "slow": optax.adam(0.01)}, by_path(lambda path: "fast" if "norm" in path else "slow")
    ),
    "labels by nnx.map_state": lambda: optax.multi_transform(
        {"train": optax.sgd(0.1), "freeze": optax.set_to_zero()}, of_state
    ),
    "a schedule that is injected": lambda: optax.inject_hyperparams(optax.adam)(optax.linear_schedule(0.1, 0.0, 4)),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("memory", [{}, {"zero": 1, "offload": "optimizer"}], ids=["devices", "ZeRO, offload"])
def test_masks_and_labels_select_as_in_flax(name, memory):
    make = OPTIMIZERS[name]
    plain = Net()
    want = models.plain(plain, loss, make(), [X] * 3)
    trainer = ax.Trainer(Net(), make(), grids.lay(GridShape(data=2, x=2)), loss=loss, memory=ax.MemoryConfig(**memory))
    np.testing.assert_allclose(
        [float(trainer.step(X)["loss"]) for _ in range(3)], [value for value, _ in want], rtol=1e-5
    )
    for got, value in zip(*(jax.tree.leaves(nnx.state(m, nnx.Param)) for m in (trainer.model, plain)), strict=True):
        np.testing.assert_allclose(got, value, rtol=1e-4, atol=1e-5)


def decayed(params):
    """The idiom of transformers' run_clm_flax.py."""
    flat = traverse_util.flatten_dict(params)
    return traverse_util.unflatten_dict(
        {path: path[-1] != "bias" and path[-2:] != ("Dense_0", "scale") for path in flat}
    )


def kernels(params):
    return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key == "kernel", params)


@pytest.mark.parametrize("memory", [{}, {"offload": "optimizer"}], ids=["devices", "offload"])
@pytest.mark.parametrize("mask", [decayed, kernels, None], ids=["flatten_dict", "path[-1].key", "all"])
def test_masks_of_linen_select_as_in_flax(mask, memory):
    batch = models.pictures(1)[0]
    variables = models.LinenPictures().init(jax.random.key(0), batch[0])
    tx = optax.adamw(0.1, weight_decay=1.0, mask=mask)
    zeros = jax.tree.map(jnp.zeros_like, variables["params"])
    with jax.numpy_dtype_promotion("standard"):  # as users have it
        updates, _ = tx.update(zeros, tx.init(variables["params"]), variables["params"])
    want = {name for name, value in traverse_util.flatten_dict(updates, sep=".").items() if jnp.abs(value).max() > 0}

    def still(variables, batch):
        value, state = models.linen_loss(variables, batch)
        return 0 * value, state

    trainer = ax.Trainer(variables, tx, grids.lay(GridShape()), loss=still, memory=ax.MemoryConfig(**memory))
    trainer.step(batch)
    before, after = (traverse_util.flatten_dict(tree["params"], sep=".") for tree in (variables, trainer.model))
    assert {name for name in before if not np.array_equal(before[name], after[name])} == want


def exchanged(params):
    return {name: "bias" if name == "weight" else "weight" for name in params}


RATE = optax.linear_schedule(0.1, 0.0, 5)
LOOKALIKES = {
    "labels that are names": (
        dict,
        lambda: optax.multi_transform({"weight": optax.adam(RATE), "bias": optax.sgd(0.1, 0.9)}, exchanged),
    ),
    "a chain of as many links": (tuple, lambda: optax.chain(optax.scale_by_adam(), optax.scale_by_learning_rate(RATE))),
    "a chain of counters": (
        tuple,
        lambda: optax.chain(optax.scale_by_schedule(RATE), optax.scale_by_learning_rate(RATE)),
    ),
}


@pytest.mark.parametrize("name", LOOKALIKES)
def test_states_that_look_like_the_tree_are_none(name, tmp_path):
    make_tree, make = LOOKALIKES[name]
    arrays = {"weight": jnp.ones((6, 3)), "bias": jnp.zeros(3)}
    tree = arrays if make_tree is dict else tuple(arrays.values())

    def linear(tree, batch):
        weight, bias = jax.tree.leaves(tree)[:: -1 if make_tree is dict else 1]
        return jnp.mean(jnp.square(batch @ weight + bias - batch[:, :3]))

    def trainer(axes):
        memory = ax.MemoryConfig(offload="optimizer", zero=1)
        return ax.Trainer(tree, make(), grids.lay(axes), loss=linear, memory=memory)

    want, state, tx = [], make().init(tree), make()
    plain = tree
    for _ in range(4):
        value, grads = jax.value_and_grad(linear)(plain, X)
        want.append(float(value))
        with jax.numpy_dtype_promotion("standard"):
            updates, state = tx.update(grads, state, plain)
        plain = optax.apply_updates(plain, updates)
    first, then = trainer(GridShape(data=2)), trainer(GridShape())
    got = [float(first.step(X)["loss"]) for _ in range(2)]
    first.save(tmp_path, 2)
    then.load(tmp_path)
    np.testing.assert_allclose(got + [float(then.step(X)["loss"]) for _ in range(2)], want, rtol=1e-5)


@pytest.mark.parametrize("axes", [GridShape(), GridShape(data=2, z=2)], ids=grids.name)
def test_what_is_not_trained_has_no_gradient_no_state_and_no_share_in_the_norm(axes, tmp_path):
    wrt, model = nnx.LoRAParam, Net()
    state = nnx.Optimizer(model, optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(0.1, 0.9)), wrt=wrt)
    trainer = ax.Trainer(Net(), optax.sgd(0.1, 0.9), grids.lay(axes), loss=loss, wrt=wrt, clip=0.1)
    for _ in range(3):
        value, grads = nnx.value_and_grad(loss, argnums=nnx.DiffState(0, wrt))(model, X)
        metrics = trainer.step(X)
        assert float(metrics["loss"]) == pytest.approx(float(value), rel=1e-5)
        assert float(metrics["grad_norm"]) == pytest.approx(float(optax.tree.norm(grads)), rel=1e-5)
        state.update(model, grads)
    assert all("lora" in name for name in trainer.engine.params)
    assert all("lora" in name for name in trainer.engine.opt_state[0].trace)
    trainer.save(tmp_path, 3)
    other = ax.Trainer(Net(), optax.sgd(0.1, 0.9), grids.lay(GridShape(z=2)), loss=loss, wrt=wrt, clip=0.1)
    other.load(tmp_path)
    assert float(other.step(X)["loss"]) == pytest.approx(float(trainer.step(X)["loss"]), rel=1e-5)


@pytest.mark.parametrize("memory", [{}, {"zero": 1, "offload": "optimizer"}], ids=["plain", "zero, offload"])
def test_a_learning_rate_that_is_set_counts_from_the_next_step_on(memory):
    rates = optax.piecewise_constant_schedule(1e-2, {2: 10.0})
    want = [value for value, _ in models.plain(Net(), loss, optax.adam(rates), [X] * 4)]
    tx = optax.inject_hyperparams(optax.adam)(learning_rate=1e-2)
    trainer = ax.Trainer(Net(), tx, grids.lay(GridShape(data=2, z=2)), loss=loss, memory=ax.MemoryConfig(**memory))
    got = [float(trainer.step(X)["loss"]) for _ in range(2)]
    trainer.set(learning_rate=0.1)
    np.testing.assert_allclose(got + [float(trainer.step(X)["loss"]) for _ in range(2)], want, rtol=1e-5)
    with pytest.raises(ax.UserError, match="set = 'rate': b1, b2, eps, eps_root, learning_rate"):
        trainer.set(rate=1.0)
    with pytest.raises(ax.UserError, match="inject_hyperparams"):
        ax.Trainer(Net(), optax.sgd(0.1), grids.lay(GridShape()), loss=loss).set(learning_rate=0.1)


def test_an_average_of_the_weights_is_evaluated_saved_and_loaded(tmp_path):
    def trainer(axes, **options):
        return ax.Trainer(Net(), optax.adam(1e-2), grids.lay(axes), loss=loss, ema=0.9, **options)

    model = Net()
    state = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    average = jax.tree.map(jnp.copy, nnx.state(model, nnx.Param))
    for _ in range(4):
        with jax.numpy_dtype_promotion("standard"):
            state.update(model, nnx.grad(loss)(model, X))
        average = jax.tree.map(lambda old, new: 0.9 * old + 0.1 * new, average, nnx.state(model, nnx.Param))
    trained = float(loss(model, X))
    nnx.update(model, average)
    memory = ax.MemoryConfig(zero=1, offload="optimizer")
    first, other = trainer(GridShape(data=2, z=2), memory=memory), trainer(GridShape(x=2))
    for each in (first, other):
        each.step(X)
        each.step(X)
        if each is first:
            each.save(tmp_path, 2)
            other.load(tmp_path)
    assert first.evaluate([X]) != pytest.approx(trained, rel=1e-2)
    assert other.engine.steps_done == 4
    assert other.evaluate([X]) == pytest.approx(float(loss(model, X)), rel=1e-5)
    assert float(loss(other.averaged, X)) == pytest.approx(float(loss(model, X)), rel=1e-5)
    assert float(loss(other.model, X)) == pytest.approx(trained, rel=1e-5)
    for options in ({"ema": 1.0}, {"ema": 0.9, "prune": ax.PruneConfig(density=0.5)}):
        with pytest.raises(ax.UserError, match="ema = "):
            ax.Trainer(Net(), optax.adam(1e-2), grids.lay(GridShape()), loss=loss, **options)
    with pytest.raises(ax.UserError, match="clip = nan: "):
        ax.Trainer(Net(), optax.adam(1e-2), grids.lay(GridShape()), loss=loss, clip=float("nan"))
    with pytest.raises(ax.UserError, match="ema = 0: a decay"):
        _ = ax.Trainer(Net(), optax.adam(1e-2), grids.lay(GridShape()), loss=loss).averaged
