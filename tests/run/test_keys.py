"""The rule of every configuration key alone: its range and its type."""

from collections.abc import Mapping
from dataclasses import replace
from types import NoneType
from typing import get_args, get_origin

import pytest

from axonn_jax.core.errors import UserError
from axonn_jax.core.models.presets import ModelConfig
from axonn_jax.files.data.corpora import DataConfig
from axonn_jax.run import config_file
from axonn_jax.run.config import Config
from axonn_jax.run.validate import check

CONFIG = Config(model=ModelConfig(layers=2, hidden=32, heads=4, seq_len=16, vocab=264), data=DataConfig("nowhere"))


def check_with(table, key, value):
    check(replace(CONFIG, **{table: replace(getattr(CONFIG, table), **{key: value})}))


NAN, INF = float("nan"), float("inf")
RANGES = {
    "an integer from 1 to 2147483647": (
        "train.steps train.global_batch train.microbatches train.eval_batches pipeline.virtual_stages memory.bucket "
        "checkpoint.keep log.every prune.every goldfish.h",
        [0, -1, 2**31],
    ),
    "an integer from 0 to 2147483647": (
        "train.warmup train.patience train.eval_every train.sample_every pipeline.in_flight tensor.sub_batches "
        "checkpoint.every checkpoint.keep_every prune.at_step goldfish.k lora.rank",
        [-1, 2**31],
    ),
    "an integer from 0 to 4294967295": ("train.seed data.seed prune.seed", [-1, 2**32]),
    "a finite number above 0": (
        "train.lr train.eps pipeline.stall_timeout moe.capacity lora.alpha",
        [0.0, -0.001, NAN, INF],
    ),
    "a finite number of at least 0": (
        "train.weight_decay train.epochs train.clip moe.balance_weight moe.balance_rate",
        [-0.1, NAN, INF],
    ),
    "a number from 0 to 1": ("train.min_lr_ratio train.decay_share prune.threshold", [-0.1, 1.1, NAN]),
    "a probability of at least 0 and below 1": ("lora.dropout", [-0.1, 1.0, NAN]),
    "a number of at least 0 and below 1": ("train.beta1 train.beta2 train.ema", [-0.1, 1.0, NAN]),
    "a number above 0 and at most 1": ("prune.density", [0.0, 1.01, NAN]),
}
"""Of every number outside [grid] and [model]: what is accepted, the keys, and values that are not."""


@pytest.mark.parametrize("accepted", RANGES)
def test_every_number_has_a_range(accepted):
    keys, values = RANGES[accepted]
    for key in keys.split():
        for value in values:
            with pytest.raises(UserError, match=rf"^{key} = {value}: {accepted}$"):
                check_with(*key.split("."), value)


def number_fields():
    """Every numeric key; found from the types, so that none is forgotten."""
    for table, keys in config_file.tables().items():
        for key, annotation in keys.items():
            if get_origin(annotation) is Mapping:
                continue  # files/data/test_corpora.py
            for kind in {annotation, *getattr(annotation, "__args__", ())} & {int, float}:
                yield table, key, kind


def test_no_number_is_without_a_range():
    ranges = " ".join(keys for keys, _ in RANGES.values()).split()
    assert sorted(ranges) == sorted(f"{t}.{key}" for t, key, _ in number_fields() if t not in ("grid", "model"))
    bad = {int: [-1], float: [NAN, INF, -1.0]}
    for table, key, kind in number_fields():
        for value in bad[kind] if table in ("grid", "model") else ():
            with pytest.raises(UserError, match=rf"^{table}\.{key} = {value}: "):
                check_with(table, key, value)


WRONG = {int: [1.5, 1000.0, True, "ten"], float: [False, "fast"], bool: ["yes", 1], str: [5, True]}
NOUNS = {int: "an integer", float: "a number", bool: "true or false", str: "a text"}


@pytest.mark.parametrize("table", config_file.tables())
def test_every_key_takes_values_of_its_type_alone(table):
    for key, annotation in config_file.tables()[table].items():
        if get_origin(annotation) is tuple:
            for value, accepted in ((5, "a list"), ("q", "a list"), ([5], "a text")):
                with pytest.raises(UserError, match=rf"^{table}.{key}(\[0\])? = .*: {accepted}$"):
                    config_file.loads("", [(f"{table}.{key}", value)])
            continue
        if get_origin(annotation) is Mapping:
            for value, accepted in ((5, "a table"), ("q", "a table"), ({"d": []}, NOUNS[get_args(annotation)[1]])):
                with pytest.raises(UserError, match=rf"^{table}.{key}(\['d'\])? = .*: {accepted}$"):
                    config_file.loads("", [(f"{table}.{key}", value)])
            continue
        kind = next((k for k in get_args(annotation) if NoneType in get_args(annotation)), annotation)
        choices = get_args(kind)
        accepted = f"one of {', '.join(map(str, choices))}" if choices else NOUNS[kind]
        values = WRONG[type(choices[0])] + [2, "qqqq"] if choices else WRONG[kind]
        for value in values:
            with pytest.raises(UserError, match=f"^{table}.{key} = {value!r}: {accepted}$"):
                config_file.loads("", [(f"{table}.{key}", value)])
