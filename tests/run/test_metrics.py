"""loss.png, progress, schedules and peaks."""

import dataclasses
import json
import math
import warnings
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from axonn_jax.core.engines.optimizer import changed_rate, learning_rate
from axonn_jax.core.errors import UserError
from axonn_jax.core.hardware import peak_flops
from axonn_jax.core.options import Schedule
from axonn_jax.core.settings import TrainConfig
from axonn_jax.core.terminal import duration
from axonn_jax.files.data.corpora import DataConfig
from axonn_jax.run import metrics
from axonn_jax.run.config import Config, LogConfig
from axonn_jax.run.config_file import to_toml
from axonn_jax.run.metrics import plot_loss
from axonn_jax.run.progress import Progress
from axonn_jax.run.validate import check

EPS = float(np.finfo(np.float32).eps)


def test_losses_that_cannot_be_drawn_do_not_hinder_the_picture(tmp_path):
    losses = ["2.0", "1" + "0" * 400, '"low"', "1.7e308", "-1.7e308", "[1]", "true", "null", "1e999", "1.0"]
    lines = [f'{{"step": {step}, "loss": {loss}}}\n' for step, loss in enumerate(losses)]
    (tmp_path / "metrics.jsonl").write_text("".join(lines) + "12\n")
    assert plot_loss(tmp_path, 6.0).exists()


def test_a_run_without_a_finite_loss_is_drawn_without_a_warning(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": null}\n')
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert plot_loss(tmp_path, 6.0).exists()


def test_the_plot_is_a_picture(tmp_path):
    records = [*({"step": step, "loss": 8.0 / step} for step in range(1, 30)), {"step": 29, "eval_loss": 0.5}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    assert plot_loss(tmp_path, 6.0).read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_progress_away_from_a_terminal_is_plain_lines(capsys):
    with Progress(100, interval=3600) as progress:
        for step in range(1, 101):
            progress.update(step, 2.0, 1000.0, 0.5)
    assert capsys.readouterr().err.splitlines() == [
        "step 1/100  loss 2.0000  1,000 tokens/s",
        "step 100/100  loss 2.0000  1,000 tokens/s  0:00 left",
    ]


def test_the_time_left_is_told_from_steps_that_do_not_compile(capsys):
    with Progress(1000, interval=0.0) as progress:
        for step, seconds in enumerate([60.0, 30.0, 0.5, 0.5, 20.0, 0.5], 1):
            progress.update(step, 2.0, 1000.0, seconds)
    left = [line.split("tokens/s")[1].strip() for line in capsys.readouterr().err.splitlines()]
    assert left == ["", "", "", "8:18 left", "8:18 left", "8:17 left"]


def test_other_ranks_are_silent(capsys):
    with Progress(1, shown=False) as progress:
        progress.say("x")
        progress.update(1, 2.0, 1.0, 1.0)
    assert capsys.readouterr().err == ""


def test_duration():
    assert [duration(s) for s in (0, 61, 3723)] == ["0:00", "1:01", "1:02:03"]


def test_tensorboard_without_its_package_is_one_line(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    config = Config(data=DataConfig("nowhere"), log=LogConfig(tensorboard=True))
    with pytest.raises(UserError, match=r"log.tensorboard = True: false, or `pip install"):
        check(config)


@pytest.mark.parametrize(
    ("kind", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA A100-SXM4-40GB", 312e12),
        ("TPU v4", 275e12),
        ("TPU v5 lite", 197e12),
        ("TPU v5p", 459e12),
        ("TPU v5", 459e12),
        ("TPU v6 lite", 918e12),
        ("TPU v3", None),
        ("cpu", None),
    ],
)
def test_peaks(kind, peak):
    assert peak_flops(kind) == peak


@pytest.mark.parametrize("schedule", get_args(Schedule))
def test_schedules(schedule):
    rate = learning_rate(TrainConfig(steps=100, warmup=10, lr=1.0, min_lr_ratio=0.1, schedule=schedule))
    assert [round(float(rate(step)), 6) for step in (0, 4, 9, 10)] == [0.1, 0.5, 1.0, 1.0]
    middle, last = {
        "cosine": (0.55, 0.1),
        "linear": (0.55, 0.1),
        "constant": (1.0, 1.0),
        "wsd": (1.0, 0.1),
        "inverse_sqrt": ((10 / 55) ** 0.5, (10 / 100) ** 0.5),
    }[schedule]
    assert (float(rate(55)), float(rate(100))) == pytest.approx((middle, last), abs=1e-6)


@pytest.mark.parametrize("schedule", get_args(Schedule))
@pytest.mark.parametrize("warmup", [0, 1, 10])
def test_the_rate_that_a_run_reports_is_that_of_the_step_and_computed_without_a_device(schedule, warmup):
    rate = learning_rate(TrainConfig(steps=100, warmup=warmup, lr=3e-3, min_lr_ratio=0.1, schedule=schedule))
    steps = range(0, 101, 5)
    reported = [rate(step) for step in steps]
    assert not any(isinstance(value, jax.Array) for value in reported)
    # A few roundings of the largest rate.
    np.testing.assert_allclose(jax.vmap(rate)(jnp.arange(0, 101, 5)), reported, rtol=0, atol=4 * EPS * 3e-3)
    np.testing.assert_allclose(reported, [by_optax(schedule, warmup)(step) for step in steps], atol=4 * EPS * 3e-3)


def by_optax(schedule, warmup):
    rest = 100 - warmup
    after = {
        "cosine": optax.cosine_decay_schedule(3e-3, rest, 0.1),
        "linear": optax.linear_schedule(3e-3, 3e-4, rest),
        "constant": optax.constant_schedule(3e-3),
        "wsd": optax.join_schedules(
            [optax.constant_schedule(3e-3), optax.linear_schedule(3e-3, 3e-4, 20)], [80 - warmup]
        ),
        "inverse_sqrt": lambda at: 3e-3 * np.sqrt(max(warmup, 1) / np.maximum(at + warmup, max(warmup, 1))),
    }[schedule]
    ramp = optax.linear_schedule(3e-3 / max(warmup, 1), 3e-3, max(warmup - 1, 1))
    return optax.join_schedules([ramp, after], [warmup])


def test_a_run_that_goes_on_by_another_schedule_says_both_rates():
    """Of 4 updates and then 8: where a cosine of 4 ended, and where one of 8 is."""
    then, now = (TrainConfig(steps=steps, lr=1e-2, min_lr_ratio=0.1) for steps in (4, 8))
    had = to_toml(Config(train=then, data=DataConfig(path="text")))
    last, following = (1e-3 + 9e-3 * (1 + math.cos(math.pi * at)) / 2 for at in (3 / 4, 4 / 8))
    assert changed_rate(now, had, 4) == f"; learning rate {last:.3g}, now {following:.3g}, as train.steps was 4"
    assert changed_rate(then, had, 2) == ""
    constant = dataclasses.replace(then, schedule="constant", lr=2e-2)
    assert changed_rate(constant, had, 1).endswith(", now 0.02, as train.lr was 0.01, train.schedule was cosine")
    for broken in (
        None,
        "",
        "train = 3",
        "[train]\nlr = 1",
        f"[train]\n{'steps = 9' * 400}",
        had.replace("= 4", f"= {10**400}"),
    ):
        assert changed_rate(now, broken, 4) == ""


@pytest.mark.parametrize("steps", [1, 10, 40, 200])
def test_the_running_mean_of_a_short_run_is_on_its_curve(steps):
    losses = tuple(2.0 + 6.0 * 0.9**step for step in range(steps))
    assert np.abs(np.array(metrics._running_mean(losses)) - losses).max() < 0.6  # a step's fall at its steepest
