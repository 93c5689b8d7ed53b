"""metrics.jsonl, loss.png, progress and peaks."""

import dataclasses
import json
import math
import os
import struct
import warnings
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from axonn_jax.errors import UserError
from axonn_jax.hardware import peak_flops
from axonn_jax.options import Schedule
from axonn_jax.terminal import duration
from axonn_jax.train import metrics
from axonn_jax.train.config import Config, DataConfig, LogConfig, TrainConfig
from axonn_jax.train.config_file import to_toml
from axonn_jax.train.metrics import MetricsLog, plot_loss, read_metrics
from axonn_jax.train.optimizer import changed_rate, learning_rate
from axonn_jax.train.progress import Progress
from axonn_jax.train.validate import check

EPS = float(np.finfo(np.float32).eps)


def test_each_record_is_a_line_at_once_and_json(tmp_path):
    log = MetricsLog(tmp_path)
    log.write({"step": 1, "loss": 2.5})
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {"step": 1, "loss": 2.5}
    log.write({"step": 2, "loss": math.nan})
    log.close()
    assert read_metrics(tmp_path)[1] == {"step": 2, "loss": None}


def logged(folder, *records, **options):
    log = MetricsLog(folder, **options)
    for record in records:
        log.write(record)
    log.close()


def test_an_earlier_runs_metrics_are_kept(tmp_path):
    for value in (1.0, 2.0, 3.0):
        logged(tmp_path, {"step": 1, "loss": value})
    assert read_metrics(tmp_path)[0]["loss"] == 3.0
    assert json.loads((tmp_path / "metrics.1.jsonl").read_text())["loss"] == 1.0
    assert json.loads((tmp_path / "metrics.2.jsonl").read_text())["loss"] == 2.0


def shown(folder):
    """Steps of the losses that TensorBoard shows: a session's start drops what came before from its step on."""
    from tensorboardX.proto.event_pb2 import Event

    steps = []
    for path in sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime_ns):
        raw = path.read_bytes()
        while raw:
            (size,) = struct.unpack("<Q", raw[:8])
            event, raw = Event.FromString(raw[12 : 12 + size]), raw[16 + size :]
            if event.session_log.status == event.session_log.START and event.HasField("session_log"):
                steps = [step for step in steps if step < event.step]
            steps += [event.step for value in event.summary.value if value.tag == "loss"]
    return steps


def test_tensorboard_shows_a_resumed_runs_steps_once_and_no_other_runs(tmp_path):
    for first, resumed in ((1, 0), (4, 3), (1, 0)):
        records = ({"step": step, "loss": 1.0 / step} for step in range(first, first + 5))
        logged(tmp_path, *records, tensorboard=True, resumed=resumed)
    assert shown(tmp_path / "tensorboard.1") == [1, 2, 3, 4, 5, 6, 7, 8]
    assert shown(tmp_path / "tensorboard") == [1, 2, 3, 4, 5]


DAMAGES = {
    "a number": b"12\n",
    "not UTF-8": b"\xff\xfe\x00\n",
    "no step": b'{"loss": 1.0}\n',
    "a step that is none": b'{"step": true, "loss": 1.0}\n',
    "not finite": b'{"step": 3, "loss": 1e999}\n',
    "deep": b"[" * 200_000 + b"\n",
    "a list": b'["step"]\n',
    "half a line": b'"step": 2}\n',
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("at", ["middle", "end"])
def test_a_run_goes_on_with_the_lines_that_can_be_read(damage, at, tmp_path):
    lines = [b'{"step": 1, "loss": 2.0}\n', b'{"step": 2, "loss": 1.0}\n']
    lines.insert(1 if at == "middle" else 2, DAMAGES[damage])
    path, told = tmp_path / "metrics.jsonl", []
    path.write_bytes(b"".join(lines))
    logged(tmp_path, {"step": 3, "loss": 0.5}, resumed=2, warn=told.append)
    assert [record["step"] for record in read_metrics(tmp_path)] == [1, 2, 3]
    assert (tmp_path / "metrics.1.jsonl").read_bytes() == b"".join(lines), "nothing of a user's is lost"
    (line,) = told
    assert "metrics.jsonl is damaged and kept as metrics.1.jsonl; lines left out: 1, the first line " in line


@pytest.mark.parametrize("kind", ["directory", "pipe", "dangling link"])
def test_what_is_no_log_is_kept_under_another_name(kind, tmp_path):
    path, told = tmp_path / "metrics.jsonl", []
    if kind == "directory":
        path.mkdir()
        (path / "notes.txt").write_text("mine")
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(tmp_path / "nowhere")
    logged(tmp_path, {"step": 3, "loss": 0.5}, resumed=2, warn=told.append)
    assert [record["step"] for record in read_metrics(tmp_path)] == [3]
    assert (tmp_path / "metrics.1.jsonl").is_symlink() or (tmp_path / "metrics.1.jsonl").exists()
    assert kind != "directory" or (tmp_path / "metrics.1.jsonl/notes.txt").read_text() == "mine"
    assert len(told) == 1


def test_a_line_cut_off_by_a_kill_is_left_out_and_no_damage(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "lo')
    assert read_metrics(tmp_path) == [{"step": 1, "loss": 2.0}]
    told = []
    logged(tmp_path, resumed=1, warn=told.append)
    assert not told
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


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
    logged(tmp_path, *({"step": step, "loss": 8.0 / step} for step in range(1, 30)), {"step": 29, "eval_loss": 0.5})
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
