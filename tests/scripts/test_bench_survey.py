"""The survey's judge, on figures recorded by hand, its heats, and bad input; no contestant runs."""

import json
import os
import sys
from pathlib import Path
from runpy import run_path

import numpy as np
import pytest
from surveying.contestant import FOLDER, found, lines_of_code
from surveying.judge import page, split
from surveying.race import heats, in_rounds
from surveying.workloads import LEAST, RATE, WARM_UP, rate

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "bench" / "survey"


def row(seconds, user, system=0.0, state=2**20):
    steps = [{"seconds": s, "user": user, "system": system, "sent": 2e6} for s in seconds]
    return {"steps": steps, "start_s": 1.0, "first_s": 2.0, "state": state, "resident": 2**28}


def fact(framework, ranks, serial="", **more):
    return {
        "framework": framework, "ranks": ranks, "serial": serial, "follows": "a page", "lines": 7,
        "mpi": False, **more,
    }  # fmt: skip


@pytest.fixture
def work():
    return {
        "title": "a model", "unit": "tokens", "per_step": 1000, "checked_steps": 20,
        "rows": {
            "torch-serial": row([4.0, 4.0, 4.0], 3.9),
            "torch-ddp": row([2.5, 2.5, 2.5], 2.2, 0.25),
            "ours-data": row([2.0, 2.5, 5.0], 1.9),
            "ours-best": row([2.0, 2.0, 2.0], 1.9),
        },
        "failed": {"torch-tp": "losses differ by 2.0e-02"},
        "facts": {
            "torch-serial": fact("torch", 1), "torch-ddp": fact("torch", 2, "torch-serial"),
            "ours-data": fact("axonn_jax", 2), "ours-best": fact("axonn_jax", 2, mpi=True),
            "torch-tp": fact("torch", 2),
        },
        "ratios": [{"ours": "ours-data", "peer": "torch-ddp", "rounds": [1.25, 1.0, 0.5]}],
        "differences": {"torch-serial": 0.0, "torch-ddp": 5e-7, "ours-data": 5e-7, "torch-tp": 2e-2},
    }  # fmt: skip


@pytest.fixture
def text(work):
    return page(
        {"workloads": {"L1": work}, "device": "two cores", "load": 0.1, "not_run": {"maxtext": "no CPU"},
         "command": "scripts/bench/survey", "versions": {"jax": "1"}}
    )  # fmt: skip


@pytest.mark.parametrize(
    "line",
    [
        "|torch-ddp|400 (400 to 400)|1.60|2.0|1.0 + 2.0|7|",  # 4 s alone, 2.5 s on two
        "|ours-data|400 (267 to 444)|-|2.0|1.0 + 2.0|7|",
        "|L1|ours-data|torch-ddp|1.00 (0.75 to 1.12)|",
        "|L1|torch-ddp|78%|10%|10%|2%|more compute|",
        "* L1 torch-tp: losses differ by 2.0e-02",
        "|L1|torch-tp|2e-02|a page|",
        "* maxtext: no CPU",
        "None is below 1.",
        "jax 1.",
    ],
)
def test_a_page_says_what_was_recorded(text, line):
    assert line in text.splitlines()


def test_shares_of_a_step_are_one_together(work):
    shares = split(work, "torch-ddp")
    assert sum(shares.values()) == pytest.approx(1)
    assert shares["compute"] == pytest.approx(1.95 / 2.5)  # half of what the serial program computes
    assert shares["kernel"] == pytest.approx(0.1)


def test_a_ratio_below_one_is_said(work):
    work["ratios"][0]["rounds"] = in_rounds([{"seconds": 2.0}] * 3, [{"seconds": 1.8}] * 3)
    figures = {"workloads": {"L1": work}, "device": "", "load": 0, "not_run": {}, "command": "", "versions": {}}
    assert "Below 1: L1 ours-data over torch-ddp." in page(figures)


def test_contestants_stand_in_heats_with_their_peers():
    everyone = found()
    assert sum("L1" in one.workloads for one in everyone.values()) >= 14
    for workload in ("L1", "V1"):
        those = [one for one in everyone.values() if workload in one.workloads]
        groups = heats(those)
        assert {one.name for group in groups for one in group} == {one.name for one in those}
        assert "torch-serial" in [one.name for one in groups[0]]  # the reference of the check
        for one in those:
            assert set(one.peers) <= set(everyone)
            assert one.serial in (*everyone, "")
    assert all(len(path.read_text().splitlines()) <= 150 for path in FOLDER.glob("*.py"))


def counted():
    """Not a statement."""
    # Nor is this.
    x = [
        1,
    ]

    if x:
        x.clear()
    return x


def test_lines_are_those_of_statements():
    assert lines_of_code((counted,)) == 7


def test_rate_rises_then_falls():
    rates = [float(rate(step)) for step in range(400)]
    assert rates[0] == pytest.approx(RATE / WARM_UP)
    assert np.argmax(rates) == WARM_UP - 1
    assert rates[-1] == pytest.approx(LEAST * RATE)


@pytest.fixture
def refused(monkeypatch, capsys, tmp_path):
    def check(*words, parts):
        monkeypatch.setattr(sys, "argv", ["survey", *words, "--out", str(tmp_path)])
        with pytest.raises(SystemExit) as ended:
            run_path(str(SCRIPT), run_name="__main__")
        out, err = capsys.readouterr()
        assert (ended.value.code, out, err.count("\n")) == (2, "", 1), err
        for part in parts:
            assert part in err

    return check


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        ("--only torch-dpd", ["--only = 'torch-dpd'", "torch-ddp"]),
        ("--only ours-pipe --workloads V1", ["--only = 'ours-pipe'", "V1"]),
        ("--workloads L7", ["--workloads = 'L7'", "L1"]),
        ("--rounds 0", ["--rounds = 0"]),
    ],
)
def test_bad_input_is_one_line(refused, line, parts):
    refused(*line.split(), parts=parts)


def test_a_busy_machine_and_a_single_core_are_refused(refused, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    monkeypatch.setattr(os, "getloadavg", lambda: (3.0, 0.0, 0.0))
    refused(parts=["load of this machine = '3.00'", "--load"])
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})
    refused(parts=["cores = 1"])


def test_without_torch_it_says_what_to_install(refused, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    refused(parts=["pip install torch"])


def test_figures_of_another_form_are_kept_aside(tmp_path):
    kept_aside = run_path(str(SCRIPT))["_kept_aside"]
    assert kept_aside(tmp_path) is None
    path = tmp_path / "survey.json"
    path.write_text(json.dumps({"version": 1}))
    assert kept_aside(tmp_path) is None
    path.write_text(json.dumps({"version": 0}))
    kept = kept_aside(tmp_path)
    assert json.loads(kept.read_text()) == {"version": 0}
    assert not path.exists()
