"""Optimizers that look at several parameters, or at whole ones, are known by what they do, however small that is."""

import jax
import jax.numpy as jnp
import optax
import pytest

from axonn_jax.core.engines.optimizer import make_optimizer
from axonn_jax.core.errors import UserError
from axonn_jax.core.memory.optimizer_traits import check_offload, check_separable
from axonn_jax.core.settings import TrainConfig

PARAMS = {"a.kernel": jnp.zeros((4, 8)), "a.bias": jnp.zeros(8), "b.kernel": jnp.zeros((8, 4))}


def warming(steps):
    return optax.warmup_cosine_decay_schedule(0.0, 3e-4, steps, 100_000)


def late(steps):
    return optax.join_schedules([optax.constant_schedule(0.0), optax.constant_schedule(1e-3)], [steps])


def averaged(optimizer, steps):
    return optax.MultiSteps(optimizer, steps).gradient_transformation()


def clipped(optimizer):
    return optax.chain(optax.clip_by_global_norm(1.0), optimizer)


TOGETHER = {
    **{f"clip, {steps} steps of warm-up": clipped(optax.adamw(warming(steps))) for steps in (2000, 10_000)},
    "clip and momentum": clipped(optax.sgd(warming(2000), 0.9)),
    "clip, averaged over 4 steps": averaged(clipped(optax.adamw(3e-4)), 4),
    "clip, averaged over 16 steps": averaged(clipped(optax.sgd(0.1)), 16),
    "clip, two steps at a rate of 0": clipped(optax.adamw(late(2))),
    "clip, 100 steps at a rate of 0": clipped(optax.adamw(late(100))),
}
BY_PARAMETER = {
    "adafactor": optax.adafactor(warming(2000)),
    "lamb": optax.lamb(warming(10_000)),
    "muon": optax.contrib.muon(warming(2000)),
    "lamb, averaged over 4 steps": averaged(optax.lamb(3e-4), 4),
}
BY_ELEMENT = {
    "adamw": optax.adamw(warming(10_000), weight_decay=0.1),
    "adamw, averaged over 8 steps": averaged(optax.adamw(3e-4), 8),
    "lion": optax.lion(late(50)),
    "sgd": optax.sgd(1e-8),
    "a schedule whose numbers have the digits of a size": make_optimizer(TrainConfig(lr=1e-2, steps=20)),
    "frozen but for a name": optax.multi_transform(
        {"train": optax.adamw(warming(2000)), "stay": optax.set_to_zero()},
        lambda tree: {name: "train" if name.startswith("b") else "stay" for name in tree},
    ),
}


@pytest.mark.parametrize("name", TOGETHER)
def test_an_optimizer_that_looks_at_all_parameters(name):
    with pytest.raises(UserError, match=r"clip_by_global_norm|multi_steps|MultiSteps"):
        check_offload(TOGETHER[name], "memory.offload = optimizer", PARAMS)
    with pytest.raises(UserError, match="all parameters together"):
        check_separable(TOGETHER[name], PARAMS, ["b.kernel"])


@pytest.mark.parametrize("name", BY_PARAMETER | BY_ELEMENT)
def test_an_optimizer_that_takes_parameters_one_by_one(name):
    optimizer = (BY_PARAMETER | BY_ELEMENT)[name]
    assert check_offload(optimizer, "memory.offload = optimizer", PARAMS) == (name in BY_ELEMENT)
    check_separable(optimizer, PARAMS, ["b.kernel"])


def test_the_size_of_a_vector_in_its_update_is_seen():
    by_size = optax.stateless(lambda updates, _: jax.tree.map(lambda update: update / update.size, updates))
    assert not check_offload(by_size, "memory.offload = optimizer", {"bias": jnp.zeros(8)})
