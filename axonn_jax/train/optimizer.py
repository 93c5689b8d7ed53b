"""Optimizers of a config, from optax, and learning-rate schedules."""

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

from axonn_jax.documents import parse_toml
from axonn_jax.errors import UserError
from axonn_jax.memory.optimizer_traits import check_offload, check_optimizer_type, check_update
from axonn_jax.models.protocol import Model
from axonn_jax.options import Optimizer, is_muons
from axonn_jax.pruned.config import PruneConfig
from axonn_jax.settings import MemoryConfig, TrainConfig
from axonn_jax.tensor.params import SplitModule

_OF_RATE = ("lr", "warmup", "steps", "schedule", "min_lr_ratio", "decay_share")


def learning_rate(config: TrainConfig) -> Callable[[Any], Any]:
    """Learning rate by update, an optax schedule: linear warm-up, then as `train.schedule` says to the last step.

    `wsd` is warm-up, stable, decay of MiniCPM (arXiv 2404.06395); `inverse_sqrt` that of the Transformer (arXiv
    1706.03762, section 5.3), whose peak ends the warm-up. A skipped step is no update. For a host's number the rate is
    computed on the host, without waiting for devices.
    """
    warmup = min(config.warmup, config.steps)
    span = max(config.steps - warmup, 1)
    end = config.lr * config.min_lr_ratio

    def rate(step: Any) -> Any:
        numbers: Any = jnp if isinstance(step, jax.Array) else np
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
        # Step 0 of a warm-up would have rate 0 and change nothing, so the ramp starts one notch up.
        return numbers.where(at < warmup, config.lr * (at + 1) / warmup, decayed_rate)

    return rate


def changed_rate(config: TrainConfig, previous: Any, updates: int) -> str:
    """Return a note on a resumed run's learning rate, if the config has changed the rate.

    Args:
        config: the settings now.
        before: TOML of the settings before.
        updates: number of updates done.

    Returns:
        A part of a line with the last update's rate and the next one's, or nothing.
    """
    try:
        table = parse_toml(previous)["train"]
        previous_values = {key: table[key] for key in _OF_RATE if type(table[key]) is type(getattr(config, key))}
        previous_rate = learning_rate(replace(config, **previous_values))
        previous_lr, planned_lr = (float(previous_rate(update)) for update in (max(updates - 1, 0), updates))
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError):  # of another version, or a stranger's
        return ""
    changes = [f"train.{key} was {value}" for key, value in previous_values.items() if value != getattr(config, key)]
    new_lr = float(learning_rate(config)(updates))
    return (
        "" if new_lr == planned_lr else f"; learning rate {previous_lr:.3g}, now {new_lr:.3g}, as {', '.join(changes)}"
    )


def decayed(params: Mapping[str, Any]) -> dict[str, bool]:
    """Return True by name for all parameters but biases and norms."""
    return {name: name.rsplit(".", 1)[-1] not in ("bias", "scale", "shift") for name in params}


def _decay(c: TrainConfig) -> dict[str, Any]:
    """Return optax's arguments of weight decay."""
    return {"weight_decay": c.weight_decay, "mask": None if c.decay_norms else decayed}


def _adafactor(rate: Any, c: TrainConfig) -> optax.GradientTransformation:
    """Return Adafactor (arXiv 1804.04235) with decoupled weight decay, its rate neither scaled nor its updates."""
    factored = optax.scale_by_factored_rms()
    parts = (factored, optax.clip_by_block_rms(1.0), optax.add_decayed_weights(**_decay(c)))
    return optax.chain(*parts, optax.scale_by_learning_rate(rate))


def _muon(rate: Any, c: TrainConfig) -> optax.GradientTransformation:
    """Return Muon for kernels, matrices that are multiplied with, at AdamW's scale of updates (arXiv 2502.16982).

    Tables, the head, vectors and experts' kernels are AdamW's.
    """

    def labels(params: Mapping[str, Any]) -> dict[str, str]:
        ranks = {name: getattr(p, "ndim", 0) for name, p in params.items()}  # optax also asks with parts masked
        return {name: "muon" if is_muons(name, rank) else "adam" for name, rank in ranks.items()}

    # Not `optax.contrib.muon`: its other optimizer has Nesterov's momentum, and decays norms and biases whatever a mask
    # says. Links and labels are in its order, so that a checkpoint has the same names.
    match_adamw_rms = optax.stateless_with_tree_map(lambda update, _: 0.2 * max(update.shape) ** 0.5 * update)
    rows_and_columns = partial(jax.tree.map, lambda _: optax.contrib.MuonDimensionNumbers())
    whitened = optax.contrib.scale_by_muon(beta=c.beta1, eps=c.eps, weight_dimension_numbers=rows_and_columns)
    muon = optax.chain(
        whitened, match_adamw_rms, optax.add_decayed_weights(**_decay(c)), optax.scale_by_learning_rate(rate)
    )
    return optax.partition({"muon": muon, "adam": OPTIMIZERS["adamw"](rate, c)}, labels)


OPTIMIZERS: Mapping[Optimizer, Callable[[Any, TrainConfig], optax.GradientTransformation]] = {
    "adamw": lambda rate, c: optax.adamw(rate, c.beta1, c.beta2, c.eps, **_decay(c)),
    "adam": lambda rate, c: optax.adam(rate, c.beta1, c.beta2, c.eps),
    "sgd": lambda rate, c: optax.sgd(rate, momentum=c.beta1 or None),
    "lion": lambda rate, c: optax.lion(rate, c.beta1, c.beta2, **_decay(c)),
    "adafactor": _adafactor,
    "muon": _muon,
    "adamw_bf16": lambda rate, c: optax.adamw(rate, c.beta1, c.beta2, c.eps, mu_dtype=jnp.bfloat16, **_decay(c)),
}
"""Functions of a learning rate's schedule and the settings that make the optimizers of `train.optimizer`."""


def make_optimizer(config: TrainConfig) -> optax.GradientTransformation:
    """The optax transformation a config names; clipping is the trainer's."""
    return OPTIMIZERS[config.optimizer](learning_rate(config), config)


def layers_once(params: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return one of the parameters whose names differ in numbers alone, as those of layers do, of each shape."""
    first = {(re.sub(r"\d+", "0", name), p.shape): name for name, p in params.items()}
    return {name: params[name] for name in first.values()}


def check_optimizer(
    optimizer: optax.GradientTransformation, model: Model, parts: SplitModule, memory: MemoryConfig, prune: PruneConfig
) -> None:
    """Raise ``UserError`` where an optimizer asks for more than a step has, or offload or pruning of it at a time.

    Of the parameters shapes are enough.
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


def check_elementwise(optimizer: optax.GradientTransformation, params: Mapping[str, Any], prune: PruneConfig) -> None:
    """Raise ``UserError`` where an optimizer looks at whole parameters, of which pruning leaves some entries."""
    if prune.prunes and not check_offload(optimizer, "prune.density below 1", layers_once(params)):
        accepted = "one that treats every element by itself where prune.density is below 1"
        raise UserError("optimizer", "a transformation that looks at whole parameters", accepted)


class Averaged(NamedTuple):
    """State of an optimizer that averages the weights."""

    average: Any
    """Average of the weights after each update, in their tree."""
    state: Any
    """State of the optimizer itself."""


def averaging(optimizer: optax.GradientTransformation, decay: float) -> optax.GradientTransformationExtraArgs:
    """Return an optimizer whose state also has a moving average of the weights (Polyak and Juditsky, 1992).

    Args:
        optimizer: The optimizer of the weights.
        decay: Share of the average that stays: `average = decay * average + (1 - decay) * weights` after each update;
            the first average is the weights at the start.
    """
    check_optimizer_type(optimizer)
    tx = optax.with_extra_args_support(optimizer)

    def init(params: Any) -> Averaged:
        return Averaged(params, tx.init(params))

    def update(
        grads: Any, state: Any, params: Any = None, biases: Any = MappingProxyType({}), **extra: Any
    ) -> tuple[Any, Averaged]:
        updates, inner = tx.update(grads, state.state, params, **extra)
        updates = {**updates, **biases} if biases else updates  # updates of routers' biases, of `experts.load`
        new_params = optax.apply_updates(params, updates)
        average = jax.tree.map(lambda old, new: decay * old + (1 - decay) * new, state.average, new_params)
        return updates, Averaged(average, inner)

    return optax.GradientTransformationExtraArgs(init, update)
