"""The optimizers and learning-rate schedules that a config can name, from optax."""

from collections.abc import Mapping

import jax
import optax

from axonn_jax.train.config import TrainConfig


def learning_rate(config: TrainConfig) -> optax.Schedule:
    """Learning rate by step: linear warm-up from 0, then cosine, linear or constant to the last step."""
    rest = config.steps - config.warmup
    end = config.lr * config.min_lr_ratio
    after: optax.Schedule
    if config.schedule == "cosine":
        after = optax.cosine_decay_schedule(config.lr, max(rest, 1), config.min_lr_ratio)
    elif config.schedule == "linear":
        after = optax.linear_schedule(config.lr, end, max(rest, 1))
    else:
        after = optax.constant_schedule(config.lr)
    if config.warmup == 0:
        return after
    # Step 0 of a warm-up would have rate 0 and change nothing, so the ramp starts one notch up.
    ramp = optax.linear_schedule(config.lr / config.warmup, config.lr, max(config.warmup - 1, 1))
    return optax.join_schedules([ramp, after], [config.warmup])


def decayed(params: Mapping[str, jax.Array]) -> dict[str, bool]:
    """Which parameters weight decay applies to: matrices, not biases or norms."""
    return {name: p.ndim >= 2 for name, p in params.items()}


def make_optimizer(config: TrainConfig) -> optax.GradientTransformation:
    """The optax transformation a config names; clipping is the trainer's."""
    rate = learning_rate(config)
    if config.optimizer == "adamw":
        return optax.adamw(rate, config.beta1, config.beta2, config.eps, weight_decay=config.weight_decay, mask=decayed)
    if config.optimizer == "adam":
        return optax.adam(rate, config.beta1, config.beta2, config.eps)
    if config.optimizer == "lion":
        return optax.lion(rate, config.beta1, config.beta2, weight_decay=config.weight_decay, mask=decayed)
    return optax.sgd(rate, momentum=config.beta1 or None)
