"""scripts/sweep: what it draws, that small settings pass, and that what is off is told from what is within rounding."""

from dataclasses import replace
from pathlib import Path
from runpy import run_path
from types import SimpleNamespace

import pytest

from axonn_jax.core.experts.shape import MoeConfig
from axonn_jax.core.grid import GridShape
from axonn_jax.core.models.config import ModelShape

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
SHAPE = ModelShape(
    layers=1, hidden=6, heads=1, kv_heads=1, ffn=5, vocab=11, seq_len=4,
    positions="rope", norm="rmsnorm", mlp="swiglu", bias="none", tied=False, head_dim=2,
)  # fmt: skip


@pytest.fixture
def sweep(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return SimpleNamespace(**run_path(str(SCRIPTS / "sweep")))


def test_draws(sweep, capsys):
    assert sweep.main(["--seed", "1", "--count", "30", "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [int(line.split()[0]) for line in lines] == list(range(1, 31))
    words = ("pipe", "expert ", "z ", "y ", "x ", "packed", "capacity", "density", "bf16", "fp16", "zero", "offload")
    for word in words:
        assert any(f" {word}" in line for line in lines), word
    assert sweep.main(["--seed", "1", "--count", "40", "--only", "3,20", "--list"]) == 0
    assert capsys.readouterr().out.splitlines() == [lines[2], lines[19]]


def test_small_settings_are_within_rounding(sweep, capsys):
    experts = replace(SHAPE, experts=3, expert_ffn=2, experts_per_token=2)
    settings = [
        sweep.Setting(1, SHAPE, GridShape(data=2), rows=2, microbatches=1),
        sweep.Setting(2, experts, GridShape(), 2, 1, packed=True, moe=MoeConfig(1.0, sweep.RATE, "capacity", 0.5)),
    ]
    assert sweep.run(settings) == 0
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines()[:2]] == ["ok", "ok"]


def test_a_wrong_step_is_beyond(sweep, capsys, monkeypatch):
    right = sweep.trained

    def wrong(setting, weights):
        step = right(setting, weights)
        return step._replace(grads=step.grads | {"norm.scale": step.grads["norm.scale"] * 1.001})

    monkeypatch.setitem(sweep.run.__globals__, "trained", wrong)
    assert sweep.run([sweep.Setting(1, SHAPE, GridShape(data=2), rows=2, microbatches=1)]) == 1
    assert capsys.readouterr().out.split()[1:4:2] == ["BEYOND", "norm.scale"]


def test_bad_input_is_one_line(sweep, capsys):
    with pytest.raises(SystemExit) as done:
        sweep.main(["--seed", "1", "--count", "3", "--only", "4"])
    assert done.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1
