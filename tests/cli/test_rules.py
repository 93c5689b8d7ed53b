"""Rules between settings: each refuses what it says, in a run's file and in a `Trainer`, and nothing else."""

from dataclasses import fields, replace
from typing import Annotated, Literal, get_args, get_origin, get_type_hints

import grids
import optax
import pytest
from flax import nnx

import axonn_jax as ax
from axonn_jax.core.adapters.config import LoraConfig
from axonn_jax.core.engines import rules
from axonn_jax.core.engines.rules import LOSS, PRUNED, RULES, Rule, RunSettings, check_rules
from axonn_jax.core.errors import UserError

PLAIN = RunSettings(ax.GridShape(data=2))
BESIDE = {
    rules.PIPE: {"grid": ax.GridShape(pipe=2)},
    rules.OFFLOAD: {"memory": ax.MemoryConfig(offload="optimizer")},
    rules.NO_OFFLOAD: {},
    rules.ONCE: {},
    rules.ADAPTED: {"lora": LoraConfig(rank=4)},
    PRUNED: {"prune": ax.PruneConfig(density=0.5)},
    LOSS: {"loss": True},
    rules.LOSS_AT_ONCE: {"loss": True},
    rules.LOSS_IN_STAGES: {"loss": True, "grid": ax.GridShape(pipe=2)},
    rules.DENSE: {"experts": False},
}
PRUNING = {"density": 0.5}
"""Settings of pruning without which others of its table have no use."""


def refused_value(rule: Rule):
    """A value of the setting's type that the rule does not accept."""
    table, _, name = rule.key.partition(".")
    kind = get_type_hints(type(getattr(PLAIN, table)), include_extras=True)[name]
    if get_origin(kind) is Annotated:
        kind = get_args(kind)[0]
    if get_origin(kind) is Literal:
        return next(value for value in reversed(get_args(kind)) if value not in rule.accepted)
    return {int: 2, float: 0.5, bool: True, str: "28GB"}[kind]


def broken(rule: Rule) -> tuple[RunSettings, object]:
    """Settings that break one rule alone, and the value that does."""
    chosen, value = replace(PLAIN, **BESIDE[rule.condition]), refused_value(rule)
    table, _, name = rule.key.partition(".")
    if not name:
        return replace(chosen, **{table: value}), value
    extra = PRUNING if table == "prune" else {}
    return replace(chosen, **{table: replace(getattr(chosen, table), **{name: value}, **extra)}), value


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{rule.key} {rule.condition.words}")
def test_each_rule_refuses_in_one_line(rule):
    chosen, value = broken(rule)
    with pytest.raises(UserError) as caught:
        check_rules(chosen)
    assert (caught.value.field, caught.value.value) == (rule.key, value)
    assert caught.value.accepted.endswith(f"{rule.condition.words}{rule.why}")
    table, _, name = rule.key.partition(".")
    for good in rule.accepted if name and table != "prune" else ():
        check_rules(replace(chosen, **{table: replace(getattr(chosen, table), **{name: good})}))


def test_settings_without_a_rule_between_them_pass():
    check_rules(PLAIN)
    for words in BESIDE.values():
        check_rules(replace(PLAIN, **words))


IN_PYTHON = [rule for rule in RULES if rule.key.split(".")[0] in ("memory", "tensor", "prune", "grid")]


@pytest.mark.parametrize("rule", IN_PYTHON, ids=lambda rule: f"{rule.key} {rule.condition.words}")
def test_a_trainer_refuses(rule):
    chosen, _ = broken(rule)
    settings = {name: getattr(chosen, name) for name in ("memory", "tensor", "prune")}
    loss = {"loss": lambda model, x: model(x).mean()} if chosen.loss else {}
    with pytest.raises(UserError) as caught:
        ax.Trainer(
            lambda: nnx.Linear(4, 2, rngs=nnx.Rngs(0)), optax.sgd(0.1), grids.lay(chosen.grid), **loss, **settings
        )
    assert caught.value.field == rule.key


OF_PYTHON = (LOSS, rules.LOSS_AT_ONCE, rules.LOSS_IN_STAGES, PRUNED)
IN_A_FILE = [rule for rule in RULES if "." in rule.key and rule.condition not in OF_PYTHON]


@pytest.mark.parametrize("rule", IN_A_FILE, ids=lambda rule: f"{rule.key} {rule.condition.words}")
def test_a_run_refuses(write_config, refused, rule):
    chosen, value = broken(rule)
    changed = {}
    for table in ("grid", "memory", "tensor", "prune", "lora", "moe", "train"):
        settings = getattr(chosen, table)
        own = {f.name: getattr(settings, f.name) for f in fields(settings)}
        given = {key: one for key, one in own.items() if one != getattr(getattr(PLAIN, table), key)}
        if table == "grid":
            given = {"pipe": 2, "data": 1} if chosen.grid.pipe > 1 else {}
        changed[table] = [
            f"{key} = {str(one).lower() if isinstance(one, bool) else repr(one)}" for key, one in given.items()
        ]
    if rule.key == "train.sample_every":
        changed["train"] += ["sample_prompts = 'none.txt'"]
    write_config({table: lines for table, lines in changed.items() if lines})
    refused(["train", "run.toml"], f"{rule.key} = {value!r}: ", str(rule))
