"""Optax optimizers and learning-rate schedules of a config, and the checks of a user's optimizer."""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from axonn_jax.core.documents import parse_toml
from axonn_jax.core.errors import UserError
from axonn_jax.core.memory.optimizer_traits import Arrays, check_offload, check_optimizer_type, check_update
from axonn_jax.core.models.protocol import Model
from axonn_jax.core.options import Optimizer, is_muons
from axonn_jax.core.pruned.config import PruneConfig
from axonn_jax.core.settings import MemoryConfig, TrainConfig
from axonn_jax.core.tensor.params import SplitModule

_OF_RATE = ("lr", "warmup", "steps", "schedule", "min_lr_ratio", "decay_share")


def learning_rate(config: TrainConfig) -> optax.Schedule:
    """Return the learning-rate schedule of a config, as an optax schedule.

    The rate rises linearly in the warm-up and then follows `train.schedule` until the last step. `wsd` is the
    warm-up-stable-decay schedule of MiniCPM (arXiv 2404.06395), `inverse_sqrt` that of the Transformer (arXiv
    1706.03762, section 5.3), which peaks at the end of the warm-up.

    Args:
        config: The table [train].

    Returns:
        A function of the number of updates so far, which does not count skipped steps.
    """
    warmup = min(config.warmup, config.steps)
    span = max(config.steps - warmup, 1)
    end = config.lr * config.min_lr_ratio

    def rate(step: int | jax.Array) -> jax.Array:
        # For a Python number the rate is computed on the host: logging it must not wait for the devices.
        numbers = jnp if isinstance(step, jax.Array) else np
        at = numbers.asarray(step, numbers.float32)
        remaining = 1 - numbers.clip((at - warmup) / span, 0, 1)
        if config.schedule == "cosine":
            decayed_rate = end + (config.lr - end) * (1 - numbers.cos(numbers.pi * remaining)) / 2
        elif config.schedule == "linear":
            decayed_rate = end + (config.lr - end) * remaining
        elif config.schedule == "wsd":
            decay_steps = max(round(config.decay_share * config.steps), 1)
            decayed_rate = end + (config.lr - end) * numbers.clip((config.steps - at) / decay_steps, 0, 1)
        elif config.schedule == "inverse_sqrt":
            decayed_rate = config.lr * (max(warmup, 1) / numbers.maximum(at, max(warmup, 1))) ** 0.5
        else:
            decayed_rate = numbers.full_like(at, config.lr)
        if warmup == 0:
            return decayed_rate
        # Rate 0 in the first step of a warm-up would waste the step, so the ramp starts one notch up.
        return numbers.where(at < warmup, config.lr * (at + 1) / warmup, decayed_rate)

    return rate


def changed_rate(config: TrainConfig, previous: Any, updates: int) -> str:
    """Describe the change of a resumed run's learning rate, if its config has changed it.

    Args:
        config: The table [train] of the resumed run.
        previous: TOML text of the config that wrote the checkpoint.
        updates: Number of updates so far.

    Returns:
        The end of a line with the last update's rate and the next one's, or an empty text.
    """
    try:
        table = parse_toml(previous)["train"]
        previous_values = {key: table[key] for key in _OF_RATE if type(table[key]) is type(getattr(config, key))}
        previous_rate = learning_rate(replace(config, **previous_values))
        previous_lr, planned_lr = (float(previous_rate(update)) for update in (max(updates - 1, 0), updates))
    # The checkpoint may be of another version or from a stranger; a note is not worth an error.
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError):
        return ""
    changes = [f"train.{key} was {value}" for key, value in previous_values.items() if value != getattr(config, key)]
    new_lr = float(learning_rate(config)(updates))
    return (
        "" if new_lr == planned_lr else f"; learning rate {previous_lr:.3g}, now {new_lr:.3g}, as {', '.join(changes)}"
    )


def decayed(params: Mapping[str, object]) -> dict[str, bool]:
    """Return the mask of weight decay by parameter name: False for biases and norms, True for all others."""
    return {name: name.rsplit(".", 1)[-1] not in ("bias", "scale", "shift") for name in params}


def _decay(c: TrainConfig) -> dict[str, object]:
    return {"weight_decay": c.weight_decay, "mask": None if c.decay_norms else decayed}


def _adafactor(rate: optax.ScalarOrSchedule, c: TrainConfig) -> optax.GradientTransformation:
    """Return Adafactor (arXiv 1804.04235) with decoupled weight decay, without relative steps or parameter scaling."""
    factored = optax.scale_by_factored_rms()
    parts = (factored, optax.clip_by_block_rms(1.0), optax.add_decayed_weights(**_decay(c)))
    return optax.chain(*parts, optax.scale_by_learning_rate(rate))


def _muon(rate: optax.ScalarOrSchedule, c: TrainConfig) -> optax.GradientTransformation:
    """Return Muon for the kernels of hidden layers, with updates at AdamW's scale (arXiv 2502.16982).

    AdamW updates embedding tables, the head, vectors and experts' kernels.
    """

    def labels(params: Mapping[str, object]) -> dict[str, str]:
        # optax also calls this with masked leaves, which have no rank.
        ranks = {name: getattr(p, "ndim", 0) for name, p in params.items()}
        return {name: "muon" if is_muons(name, rank) else "adam" for name, rank in ranks.items()}

    # Not `optax.contrib.muon`: its fallback optimizer uses Nesterov momentum and decays norms and biases whatever the
    # mask says. Transformations and labels keep its order, so that checkpoints have the same names.
    match_adamw_rms = optax.stateless_with_tree_map(lambda update, _: 0.2 * max(update.shape) ** 0.5 * update)
    rows_and_columns = partial(jax.tree.map, lambda _: optax.contrib.MuonDimensionNumbers())
    whitened = optax.contrib.scale_by_muon(beta=c.beta1, eps=c.eps, weight_dimension_numbers=rows_and_columns)
    muon = optax.chain(
        whitened, match_adamw_rms, optax.add_decayed_weights(**_decay(c)), optax.scale_by_learning_rate(rate)
    )
    return optax.partition({"muon": muon, "adam": OPTIMIZERS["adamw"](rate, c)}, labels)


OPTIMIZERS: Mapping[Optimizer, Callable[[optax.ScalarOrSchedule, TrainConfig], optax.GradientTransformation]] = {
    "adamw": lambda rate, c: optax.adamw(rate, c.beta1, c.beta2, c.eps, **_decay(c)),
    "adam": lambda rate, c: optax.adam(rate, c.beta1, c.beta2, c.eps),
    "sgd": lambda rate, c: optax.sgd(rate, momentum=c.beta1 or None),
    "lion": lambda rate, c: optax.lion(rate, c.beta1, c.beta2, **_decay(c)),
    "adafactor": _adafactor,
    "muon": _muon,
    "adamw_bf16": lambda rate, c: optax.adamw(rate, c.beta1, c.beta2, c.eps, mu_dtype=jnp.bfloat16, **_decay(c)),
}
"""Constructor of each optimizer of `train.optimizer`, from a learning-rate schedule and the table [train]."""


def make_optimizer(config: TrainConfig) -> optax.GradientTransformation:
    """Return the optimizer of the table [train], without clipping, which the trainer does."""
    return OPTIMIZERS[config.optimizer](learning_rate(config), config)


def layers_once(params: Arrays) -> Arrays:
    """Return one representative of all parameters that have the same shape and the same name except for numbers.

    Layers repeat the same parameters, so one layer stands for all of them in a check.
    """
    first = {(re.sub(r"\d+", "0", name), p.shape): name for name, p in params.items()}
    return {name: params[name] for name in first.values()}


def check_optimizer(
    optimizer: optax.GradientTransformation, model: Model, parts: SplitModule, memory: MemoryConfig, prune: PruneConfig
) -> None:
    """Check that an optimizer can run in a step, and with offload and pruning where those are on.

    Args:
        optimizer: The user's optimizer.
        model: The model.
        parts: The model's parameters; shapes are enough.
        memory: Table [memory].
        prune: Table [prune].

    Raises:
        UserError: The optimizer needs more than a step provides, or does not work on the parts that offload or pruning
            pass to it.
    """
    params = parts.trained
    check_update(optimizer, params)
    if memory.offload != "none":
        check_offload(optimizer, "memory.offload = optimizer", layers_once(params))
    if prune.prunes and parts.adapters:
        raise UserError("prune.density", prune.density, "1 with adapters, beside which no weight is trained")
    if prune.prunes and not model.layer_period:
        raise UserError("prune.density", prune.density, "1 with a model other than a Transformer")
    check_elementwise(optimizer, params, prune)


def check_elementwise(optimizer: optax.GradientTransformation, params: Arrays, prune: PruneConfig) -> None:
    """Check that an optimizer is elementwise, which pruning needs, since only the unpruned entries are stored.

    Args:
        optimizer: The user's optimizer.
        params: The trained parameters by name; shapes are enough.
        prune: Table [prune].

    Raises:
        UserError: Pruning is on, and an update depends on more than its own element.
    """
    if prune.prunes and not check_offload(optimizer, "prune.density below 1", layers_once(params)):
        accepted = "one that treats every element by itself where prune.density is below 1"
        raise UserError("optimizer", "a transformation that looks at whole parameters", accepted)


class Averaged(NamedTuple):
    """State of an optimizer that also averages the weights."""

    average: optax.Params
    """Moving average of the weights, in the tree of the parameters."""
    state: optax.OptState
    """State of the wrapped optimizer."""


def averaging(optimizer: optax.GradientTransformation, decay: float) -> optax.GradientTransformationExtraArgs:
    """Wrap an optimizer so that its state includes a moving average of the weights (Polyak and Juditsky, 1992).

    After each update, `average = decay * average + (1 - decay) * weights`; the average starts as the initial weights.

    Args:
        optimizer: The optimizer of the weights.
        decay: Decay of the average.

    Raises:
        UserError: `optimizer` is not an optax transformation.
    """
    check_optimizer_type(optimizer)
    tx = optax.with_extra_args_support(optimizer)

    def init(params: optax.Params) -> Averaged:
        return Averaged(params, tx.init(params))

    def update(
        grads: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,
        biases: Mapping[str, jax.Array] = MappingProxyType({}),
        **extra: object,
    ) -> tuple[optax.Updates, Averaged]:
        updates, inner = tx.update(grads, state.state, params, **extra)
        # Router biases bypass the optimizer: `experts.load` computes their updates, and the average includes them.
        updates = {**updates, **biases} if biases else updates
        new_params = optax.apply_updates(params, updates)
        average = jax.tree.map(lambda old, new: decay * old + (1 - decay) * new, state.average, new_params)
        return updates, Averaged(average, inner)

    return optax.GradientTransformationExtraArgs(init, update)
