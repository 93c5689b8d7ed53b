"""What a user gets wrong about a pipeline of their own model: one line, before anything is compiled."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import staged_models as models
from flax import linen, nnx

import axonn_jax as ax
from axonn_jax.core.errors import UserError


def trainer(model=lambda: models.Vision(nnx.Rngs(0)), loss=models.label_loss, axes=None, **options):
    return ax.Trainer(
        model, optax.sgd(0.1), ax.init(**(axes or {"pipe": 2})), loss=loss, **({"microbatches": 4} | options)
    )


def contrastive(model, batch):
    out = model(batch["image"])
    return jnp.mean(out @ out.T)


def masked(model, batch):
    weights = (batch["label"] > 3).astype(jnp.float32)
    losses = optax.softmax_cross_entropy_with_integer_labels(model(batch["image"]), batch["label"])
    return jnp.sum(losses * weights) / jnp.sum(weights)


class Shared(nnx.Module):
    """Statistics that two stages write."""

    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(4, 4, rngs=rngs) for _ in range(2)])
        self.seen = nnx.BatchStat(jnp.zeros(()))

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
            self.seen[...] = self.seen[...] + jnp.mean(x)
        return x


class Writes(nnx.Module):
    """A call that writes a parameter."""

    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(4, 4, rngs=rngs) for _ in range(2)])

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        self.layers[0].kernel[...] = self.layers[0].kernel[...] * 0.9
        return x


class Waves(nnx.Module):
    """Complex numbers between layers."""

    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(4, 4, rngs=rngs) for _ in range(2)])

    def __call__(self, x):
        waves = jnp.fft.fft(x.astype(jnp.complex64))
        for layer in self.layers:
            waves = waves * layer.kernel[0].astype(jnp.complex64)
        return jnp.abs(waves)


def square(model, batch):
    return jnp.mean(model(batch["x"]) ** 2)


CASES = {
    "rows whole": ({"rows": "whole"}, "auto or parts in a pipeline"),
    "pruned": ({"prune": ax.PruneConfig(density=0.5)}, "prune.density"),
    "average": ({"ema": 0.9}, "train.ema"),
    "experts axis": ({"axes": {"pipe": 2, "expert": 2}}, "grid.expert"),
    "a class": ({"model": models.Vision}, "flax.nnx.Module"),
    "a Linen module": ({"model": linen.Dense(3)}, "tree of Linen parameters"),
    "a number": ({"model": 3}, "tree of Linen parameters"),
    "offloaded activations": ({"memory": ax.MemoryConfig(activations="offload")}, "memory.activations"),
    "an order": ({"tensor": ax.TensorConfig(order="package")}, "tensor.order"),
    "sub-batches": ({"tensor": ax.TensorConfig(sub_batches=2)}, "tensor.sub_batches"),
    "no parameters": ({"model": lambda: nnx.Dropout(0.1, rngs=nnx.Rngs(0))}, "one with parameters"),
    "virtual stages of a plain order": ({"pipeline": ax.PipelineConfig(policy="1f1b", virtual_stages=2)}, "virtual"),
    "no microbatch": ({"microbatches": 0}, "microbatches"),
    "a loss of nothing": ({"loss": lambda: 1}, "function of \\(model, batch\\)"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_mistake_is_one_line_ahead_of_all_work(case):
    options, words = CASES[case]
    with pytest.raises(UserError, match=words) as error:
        trainer(**options)
    assert "\n" not in str(error.value)


AT_THE_STEP = {
    "a loss that couples rows": (
        {"loss": contrastive, "axes": {"pipe": 2, "data": 2}},
        "pictures",
        "no stage.*sees all",
    ),
    "a masked mean": ({"loss": masked, "axes": {"pipe": 2, "data": 2}}, "pictures", "weight="),
    "more stages than layers": ({"axes": {"pipe": 6}}, "pictures", "at most 5"),
    "a split of another length": ({"pipeline": ax.PipelineConfig(split="2,2,1")}, "pictures", "pipeline.split"),
    "a split of words": ({"pipeline": ax.PipelineConfig(split="a,b")}, "pictures", "pipeline.split"),
    "a split that does not add up": ({"pipeline": ax.PipelineConfig(split="1,1")}, "pictures", "add up"),
    "statistics of two stages": ({"model": lambda: Shared(nnx.Rngs(0)), "loss": square}, "x", "state that one stage"),
    "a written parameter": ({"model": lambda: Writes(nnx.Rngs(0)), "loss": square}, "x", "a call writes"),
    "complex numbers between stages": (
        {"model": lambda: Waves(nnx.Rngs(0)), "loss": square},
        "x",
        "real numbers between",
    ),
    "a loss of each row": ({"loss": lambda model, batch: model(batch["image"])[:, 0]}, "pictures", "scalar"),
    "a batch of another tree": ({"loss": square}, "pictures", "batch"),
}


@pytest.mark.parametrize("case", AT_THE_STEP)
def test_a_mistake_that_a_batch_shows_is_one_line(case):
    options, kind, words = AT_THE_STEP[case]
    batch = models.pictures(1)[0] if kind == "pictures" else {"x": np.ones((16, 4), np.float32)}
    mistaken = trainer(**options)
    with pytest.raises(UserError, match=words) as error:
        mistaken.step(batch)
    mistaken.close()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        ({"image": np.ones((6, 8, 8, 3), np.float32), "label": np.zeros(6, np.int32)}, "multiple of 4"),
        ({"image": np.ones((8, 8, 8, 3), np.float32), "label": np.zeros(4, np.int32)}, "same rows in front"),
        (None, "batch"),
        ({"image": np.ones((8, 8, 8, 3), np.float32), "label": jax.random.split(jax.random.key(0), 8)}, "batch"),
    ],
    ids=["rows that do not divide", "uneven rows", "nothing", "keys"],
)
def test_a_batch_that_does_not_fit_is_one_line(batch, words):
    pipelined = trainer()
    with pytest.raises(UserError, match=words):
        pipelined.step(batch)
    pipelined.close()


def test_what_needs_a_batch_says_so(tmp_path):
    pipelined = trainer()
    for ask in (lambda: pipelined.model, lambda: pipelined.save(tmp_path, 1)):
        with pytest.raises(UserError, match="a step or an evaluation first"):
            ask()
    with pytest.raises(UserError, match="the trainer's own in a pipeline"):
        pipelined.evaluate(models.pictures(1), loss=masked)
    pipelined.close()


def test_parallelize_leaves_a_pipeline_to_the_trainer():
    grid, words = ax.init(pipe=2), r"in a pipeline ax\.Trainer"
    with pytest.raises(UserError, match=words):
        ax.parallelize(models.Vision(nnx.Rngs(0)), grid)
    with pytest.raises(UserError, match=words):
        ax.parallelize_linen(models.linen_loss, models.linen_params(), grid, models.texts(1)[0])


def test_a_list_of_layers_of_images_is_led_to_the_loss():
    def model():
        layers = [nnx.Linear(64, 32, rngs=nnx.Rngs(0)), nnx.Linear(32, 10, rngs=nnx.Rngs(0))]
        return ax.models.SequenceModel(layers, optax.softmax_cross_entropy_with_integer_labels)

    with pytest.raises(UserError, match=r"layers\[0\].*fails on token ids.*loss=loss\) takes any batch"):
        ax.Trainer(model, optax.sgd(0.1), ax.init(pipe=2), microbatches=2)
