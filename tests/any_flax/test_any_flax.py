"""`Trainer(loss=)` beside a loop with optax on one device: losses, state, numbers, checkpoints, collectives."""

import any_models as models
import grids
import hlo_text
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import axonn_jax as ax
from axonn_jax.any_flax.parallelize.api import birth
from axonn_jax.core.grid import GridShape

FULL = GridShape(data=2, z=2, x=2)
STEPS = 5


@pytest.fixture(scope="module")
def masked():
    """Loss and numbers of a plain loop on masked texts."""
    return models.plain(models.Language(nnx.Rngs(0)), models.masked_loss, optax.adamw(1e-3), models.texts(STEPS))


def language(axes, *, microbatches=4, weight=lambda batch: jnp.sum(batch["targets"] > 0), **memory):
    grid = grids.lay(axes)
    model = models.Language(nnx.Rngs(0))
    if axes.devices > 1:
        model = ax.parallelize(model, grid, call=lambda m: m(np.zeros((4, models.SEQ), np.int32)))
    options = {"microbatches": microbatches, "memory": ax.MemoryConfig(**memory)}
    return ax.Trainer(model, optax.adamw(1e-3), grid, loss=models.masked_loss, weight=weight, **options)


@pytest.mark.parametrize(
    ("axes", "memory", "tolerance"),
    [
        (GridShape(), {}, 1e-6),
        (FULL, {"precision": "fp32", "zero": 1, "offload": "optimizer"}, 1e-6),
        (GridShape(data=4, x=2), {"precision": "bf16", "zero": 1}, 1e-3),
    ],
    ids=["one device", "data 2 z 2 x 2, ZeRO, offload", "data 4, bf16, ZeRO"],
)
def test_a_masked_loss_is_that_of_a_plain_loop(axes, memory, tolerance, masked):
    trainer = language(axes, **memory)
    for batch, (loss, numbers) in zip(models.texts(STEPS), masked, strict=True):
        with jax.numpy_dtype_promotion("standard"):  # Flax's attention in half precision asks for it
            metrics = trainer.step(batch)
        assert float(metrics["loss"]) == pytest.approx(loss, rel=tolerance)
        assert float(metrics["aux"]["right"]) == pytest.approx(numbers["right"], abs=20 * tolerance)
    assert int(metrics["skipped"]) == 0


def test_a_part_without_targets_counts_for_nothing():
    """Its own mean is 0 over 0, and that of a replica's rows in a microbatch may be."""
    batches = models.texts(3)
    for batch in batches:
        batch["targets"][: models.ROWS // 8] = 0
    want = models.plain(models.Language(nnx.Rngs(0)), models.masked_loss, optax.adamw(1e-3), batches)
    trainer = language(FULL)
    for batch, (loss, numbers) in zip(batches[:2], want, strict=False):
        metrics = trainer.step(batch)
        assert float(metrics["loss"]) == pytest.approx(loss, rel=1e-6)
        assert float(metrics["aux"]["right"]) == pytest.approx(numbers["right"], abs=1e-6)
    assert trainer.evaluate(batches[2:]) == pytest.approx(want[2][0], rel=1e-6)


@pytest.mark.parametrize("zero", [0, 1])
def test_gradients_are_reduced_over_data_once(zero):
    trainer = language(FULL, zero=zero)
    program = trainer.engine.compiled_step(models.texts(1)[0])
    found = [one for one in hlo_text.collectives(program.as_text()) if one.crosses(trainer.engine.grid.mesh, "data")]
    assert not [one for one in found if one.in_loop]
    sizes = sorted(one.bytes for one in found if one.bytes > 64)
    assert len(sizes) == 1 + zero, found  # with ZeRO the gather of the weights


@pytest.mark.parametrize("axes", [GridShape(z=2, x=2), GridShape(data=2, z=2)], ids=grids.name)
def test_statistics_of_a_batch_norm_are_those_of_all_replicas(axes, tmp_path):
    batches, plain = models.pictures(4), models.Pictures(nnx.Rngs(0))
    want = [loss for loss, _ in models.plain(plain, models.pictures_loss, optax.sgd(0.1), batches[:3])]

    def trainer(axes):
        return ax.Trainer(models.Pictures(nnx.Rngs(0)), optax.sgd(0.1), grids.lay(axes), loss=models.pictures_loss)

    first = trainer(axes)
    np.testing.assert_allclose([float(first.step(batch)["loss"]) for batch in batches[:3]], want, rtol=1e-6)
    for name in ("mean", "var"):
        found = getattr(first.model.norm, name).get_value()
        np.testing.assert_allclose(found, getattr(plain.norm, name).get_value(), rtol=1e-5)
    first.save(tmp_path, 3)
    other = trainer(GridShape(data=4, y=2))
    assert other.load(tmp_path, weights_only=True) == 3  # statistics go with the weights
    np.testing.assert_allclose(float(other.evaluate(batches[:1])), float(first.evaluate(batches[:1])), rtol=1e-6)
    assert other.load(tmp_path) == 3
    np.testing.assert_allclose(float(other.evaluate(batches[:1])), float(first.evaluate(batches[:1])), rtol=1e-6)
    assert float(other.step(batches[3])["loss"]) == pytest.approx(float(first.step(batches[3])["loss"]), rel=1e-6)


def test_collections_of_linen_are_carried():
    batches = models.pictures(3)
    variables = models.LinenPictures().init(jax.random.key(0), batches[0][0])
    optimizer, params, state = optax.sgd(0.1), variables["params"], variables["batch_stats"]
    grid, moments, want = grids.lay(GridShape(data=2, z=2, x=2)), optimizer.init(params), []
    loss, placed = ax.parallelize_linen(models.linen_loss, variables, grid, batches[0])
    trainer = ax.Trainer(placed, optimizer, grid, loss=loss)
    got = [float(trainer.step(batch)["loss"]) for batch in batches]
    for batch in batches:

        def alone(params, state=state, batch=batch):
            return models.linen_loss({"params": params, "batch_stats": state}, batch)

        (value, updates), grads = jax.value_and_grad(alone, has_aux=True)(params)
        changes, moments = optimizer.update(grads, moments, params)
        params, state = optax.apply_updates(params, changes), updates["batch_stats"]
        want.append(float(value))
    np.testing.assert_allclose(got, want, rtol=1e-6)
    np.testing.assert_allclose(*(jax.tree.leaves(each)[0] for each in (trainer.model["batch_stats"], state)), rtol=1e-5)


@pytest.mark.bits
def test_convolutions_are_in_no_loop_over_microbatches():
    """XLA's CPU backend takes more than 30 times as long for them there."""
    options = {"loss": models.pictures_loss, "microbatches": 2}
    pictures = ax.Trainer(models.Pictures(nnx.Rngs(0)), optax.sgd(0.1), grids.lay(GridShape()), **options)
    assert " while(" not in pictures.engine.compiled_step(models.pictures(1)[0]).as_text()
    assert " while(" in language(GridShape(), microbatches=2).engine.compiled_step(models.texts(1)[0]).as_text()


def test_small_gradients_survive_in_fp16():
    """By the loss scale; of a step that overflows nothing is kept."""

    def losses(precision):
        model = nnx.Sequential(nnx.Linear(8, 16, rngs=nnx.Rngs(0)), nnx.Linear(16, 4, rngs=nnx.Rngs(1)))
        memory = ax.MemoryConfig(precision=precision)
        options = {"loss": lambda m, x: 1e-6 * jnp.mean(m(x).astype(jnp.float32)), "memory": memory}
        trainer = ax.Trainer(model, optax.sgd(1e4), grids.lay(GridShape(data=2, x=2)), **options)
        rows = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)
        found = [float(trainer.step(rows)["loss"]) for _ in range(4)]
        metrics = trainer.step(rows * 1e38)
        assert int(metrics["skipped"]) == 1
        return found

    np.testing.assert_allclose(losses("fp16"), losses("fp32"), rtol=5e-3)


def test_dropout_draws_alike_on_every_grid_of_as_many_parts():
    """Of microbatches and replicas together; and an evaluation draws nothing."""

    def losses(axes, microbatches):
        model = nnx.Sequential(nnx.Linear(8, 16, rngs=nnx.Rngs(0)), nnx.Dropout(0.5, rngs=nnx.Rngs(1)))
        options = {"loss": lambda m, x: jnp.mean(jnp.square(m(x) - 1)), "microbatches": microbatches}
        trainer = ax.Trainer(model, optax.sgd(0.1), grids.lay(axes), **options)
        rows = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)
        return [float(trainer.step(rows)["loss"]) for _ in range(3)] + [trainer.evaluate([rows]) for _ in range(2)]

    want = losses(GridShape(), 4)
    assert want[0] != want[3] == want[4]
    for axes, microbatches in ((GridShape(data=2, z=2, x=2), 2), (GridShape(data=4), 1)):
        np.testing.assert_allclose(losses(axes, microbatches), want, rtol=1e-6)


class Wide(nnx.Module):
    def __init__(self, rngs):
        self.first, self.norm = nnx.Linear(256, 512, rngs=rngs), nnx.BatchNorm(512, rngs=rngs)
        self.dropout, self.gain = nnx.Dropout(0.5, rngs=rngs), nnx.Param(jax.random.normal(rngs.params(), (64, 64)))

    def __call__(self, x):
        return self.dropout(self.norm(self.first(x)))


def test_each_device_makes_its_own_part_of_a_model():
    """Values are the plain model's, and no device makes a whole kernel on the way."""
    grid, call = grids.lay(GridShape(z=2, y=2, x=2)), lambda model: model(jnp.zeros((8, 256)))

    def make():
        return Wide(nnx.Rngs(0))

    born, want = ax.parallelize(make, grid, call=call), make()
    for got, plain in zip(*(jax.tree.leaves(nnx.state(model, nnx.Param)) for model in (born, want)), strict=True):
        np.testing.assert_array_equal(got, plain)
        assert plain.size < 1000 or got.sharding.shard_shape(got.shape) != plain.shape
    abstract = nnx.eval_shape(make)
    program = birth(make, ax.parallelize(abstract, grid, call=call)).lower().compile()
    kernel = want.first.kernel.get_value()
    assert program.memory_analysis().temp_size_in_bytes < kernel.size * kernel.dtype.itemsize
    trainer = ax.Trainer(make, optax.sgd(0.1), grid, loss=lambda m, x: jnp.mean(jnp.square(m(x) - 1)))
    assert float(trainer.step(np.ones((8, 256), np.float32))["loss"]) > 0


def test_parameters_without_split_layers_are_kept_in_parts(capfd):
    """Of a plain function of a tree; the arrays handed in stay."""
    params = {"w": jnp.asarray(np.random.default_rng(1).normal(size=(64, 64)), jnp.float32)}
    rows = np.random.default_rng(2).normal(size=(8, 64)).astype(np.float32)
    loss = lambda params, batch: jnp.mean(jnp.square(batch @ params["w"]))  # noqa: E731
    found = []
    for axes in (GridShape(), GridShape(data=2, z=2, y=2)):
        trainer = ax.Trainer(params, optax.sgd(0.1), grids.lay(axes), loss=loss)
        found.append([float(trainer.step(rows)["loss"]) for _ in range(3)])
    np.testing.assert_allclose(*found, rtol=1e-6)
    weight = trainer.engine.params["w"]
    assert weight.sharding.shard_shape(weight.shape) == (16, 64)
    assert "left to XLA" in capfd.readouterr().err
    assert not params["w"].is_deleted()


def test_arrays_handed_in_stay_with_the_caller():
    """Made on one device, they would share memory with its copy of a replicated layout."""
    params = {"w": jax.device_put(np.ones((6, 6), np.float32), jax.devices()[0])}
    trainer = ax.Trainer(
        params, optax.sgd(0.1), grids.lay(GridShape(data=2)), loss=lambda p, b: jnp.mean(jnp.square(b @ p["w"]))
    )
    for _ in range(2):
        trainer.step(np.ones((4, 6), np.float32))
    assert not params["w"].is_deleted()
    assert float(params["w"].sum()) == 36
