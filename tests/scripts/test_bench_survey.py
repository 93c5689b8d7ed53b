"""The survey's judge, on figures recorded by hand, its heats, and bad input; no contestant runs."""

import json
import os
import sys
from pathlib import Path
from runpy import run_path

import numpy as np
import pytest
from race import Failed, take_turns
from surveying.contestant import FOLDER, first_peers, found, lines_of_code
from surveying.efficiency import TARGET, fastest_of_each, reach
from surveying.figures import formula, parts_of
from surveying.judge import page
from surveying.plots import draw
from surveying.race import heats, in_rounds
from surveying.workloads import LEAST, WARM_UP, WORKLOADS

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "bench" / "survey"


def row(seconds, user, system=0.0, state=2**20):
    steps = [{"seconds": s, "user": user, "system": system, "sent": 2e6} for s in seconds]
    sizes = {"state": state, "resident": 2**28, "with_start": 2**29}
    return {"steps": steps, "start_s": 1.0, "first_s": 2.0, **sizes}


def fact(framework, ranks, serial="", **more):
    return {
        "framework": framework, "ranks": ranks, "serial": serial, "follows": "a page", "lines": 7,
        "mpi": False, "weights": 1.0, "moments": 1.0, **more,
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
            "ours-zero": row([2.0, 2.0, 2.0], 1.9, state=800_000),
            "torch-zero": row([3.0, 3.0, 3.0], 1.9, state=1_000_000),
            "deepspeed-1": row([4.0, 4.0, 4.0], 1.9),
        },
        "failed": {"torch-tp": "losses differ by 2.0e-02"},
        "facts": {
            "torch-serial": fact("torch", 1), "torch-ddp": fact("torch", 2, "torch-serial"),
            "ours-data": fact("axonn_jax", 2), "ours-best": fact("axonn_jax", 2, mpi=True),
            "torch-tp": fact("torch", 2), "deepspeed-1": fact("deepspeed", 2),
            "ours-zero": fact("axonn_jax", 2, moments=1 / 2),
            "torch-zero": fact("torch", 2, "torch-serial", moments=1 / 2),
        },
        "parameters": 100_000, "choice": {"axes": {"data": 2}, "microbatches": 4},
        "ratios": [
            {"ours": "ours-data", "peer": "torch-ddp", "rounds": [1.25, 1.0, 0.5]},
            {"ours": "ours-best", "peer": "ours-data", "rounds": [1.0, 1.25, 2.5]},
            {"ours": "ours-best", "peer": "ours-zero", "rounds": [1.0, 1.0, 1.0]},
        ],
        "differences": {"torch-serial": 0.0, "torch-ddp": 5e-7, "ours-data": 5e-7, "torch-tp": 2e-2},
    }  # fmt: skip


CURVES = [
    {"name": "ours-data", "seed": seed, "rows": rows, "points": points, "reached": reach(points)}
    for seed in range(3)
    for rows in (8, 16)
    for points in [[{"tokens": 1000.0 * n, "seconds": 2.0 * n, "loss": TARGET + (3 - n)} for n in range(4 + seed)]]
]


def survey_of(work):
    row = {
        "source": "SC 24", "machine": "alps", "unit": "% of peak", "model": "gpt-5b", "devices": 512, "span": "",
        "published": 50.0, "predicted": 55.0, "error": 0.1,
    }  # fmt: skip
    return {
        "workloads": {"L1": work}, "device": "two cores", "load": 0.1, "not_run": {"maxtext": "no CPU"},
        "command": "scripts/bench/survey", "versions": {"jax": "1"}, "efficiency": CURVES,
        "simulated": {"rows": [row], "others": [], "ratios": {"over another": 1.25}},
    }  # fmt: skip


@pytest.fixture
def text(work):
    return page(survey_of(work))


@pytest.mark.parametrize(
    "line",
    [
        "|torch-ddp|400 (400 to 400)|1.60|2.0|1.0 + 2.0|7|",  # 4 s alone, 2.5 s on two
        "|ours-data|400 (267 to 444)|-|2.0|1.0 + 2.0|7|",
        "|ours-data|torch-ddp|1.00 (0.75, 1.12)|",
        "|the fastest of ours|the best DeepSpeed stage|2.00 (ours-best, deepspeed-1)|",
        "`plan` picks data 2, microbatches 4 for L1: 1.00 (1.00, 1.00) of the speed of ours-zero, round by round, the "
        "fastest beside it of ours-data, ours-zero; 1.00 by the medians of all heats below.",
        "|L1|ours-zero 256 / 512 (1.00); torch-zero 256 / 512 (1.25); deepspeed-1 256 / 512 (0.87)|",
        "|ours-data|8|3,000 (3,000 to 3,000)|6 (6 to 6)|3 of 3|",
        "|torch-ddp|1.95|0.25|0.25|0.05|more compute|",
        "|SC 24|alps|gpt-5b on 512 to gpt-5b on 512|% of peak|50 to 50|55 to 55|10.0%|",
        "* L1 torch-tp: losses differ by 2.0e-02",
        "|L1|torch-tp|2e-02|a page|",
        "* maxtext: no CPU",
        "None is below 1.",
        "jax 1.",
    ],
)
def test_a_page_says_what_was_recorded(text, line):
    assert line in text.splitlines()


def test_a_page_of_the_real_size_fits_two_screens_before_its_appendix(work):
    figures = survey_of(work)
    names = [(one.name, peer) for one in found().values() for peer in one.peers]
    work["ratios"] = [{"ours": "ours-data", "peer": "torch-ddp", "rounds": [1.0]}] * len(names)
    assert len(names) < 30
    assert page(figures).split("## Appendix")[0].count("\n") < 110


def test_parts_of_a_step_are_the_step_together(work):
    parts = parts_of(work, "torch-ddp")
    assert sum(parts.values()) == pytest.approx(2.5)
    assert parts["compute"] == pytest.approx(1.95)  # half of what the serial program computes
    assert parts["kernel"] == pytest.approx(0.25)


def test_memory_by_formula_is_12_bytes_a_parameter_less_what_is_divided(work):
    assert formula(work, "ours-data") == 1_200_000
    assert formula(work, "ours-zero") == 800_000
    work["facts"]["ours-data"]["weights"] = None
    assert formula(work, "ours-data") is None


def test_a_ratio_below_one_is_said_with_what_takes_longer(work):
    work["ratios"][0] = {
        "ours": "torch-ddp", "peer": "ours-zero",
        "rounds": in_rounds([{"seconds": 2.5}] * 3, [{"seconds": 2.0}] * 3),
    }  # fmt: skip
    assert "* L1, more compute: torch-ddp over ours-zero (0.25, not 0.00)" in page(survey_of(work))


def test_the_target_is_reached_between_two_points():
    points = [{"tokens": 0.0, "seconds": 0.0, "loss": TARGET + 1}, {"tokens": 8.0, "seconds": 4.0, "loss": TARGET - 3}]
    assert reach(points) == pytest.approx({"tokens": 2.0, "seconds": 1.0})
    assert reach(points[:1]) is None


def test_the_fastest_of_each_framework_race_to_the_target_and_ours_is_first(work):
    names = [one.name for one in fastest_of_each(work, found())]
    assert names == ["ours-zero", "deepspeed-1", "torch-ddp"]  # the planner's choice stands for none


def test_curves_are_drawn(tmp_path):
    draw(CURVES, 16, tmp_path / "survey.png")
    assert (tmp_path / "survey.png").read_bytes().startswith(b"\x89PNG")


def test_contestants_stand_in_heats_with_their_peers():
    everyone = found()
    for workload, least in (("L1", 14), ("L2", 8), ("V1", 5), ("M1", 5)):
        those = [one for one in everyone.values() if workload in one.workloads]
        assert len(those) >= least
        groups = heats(those)
        assert {one.name for group in groups for one in group} == {one.name for one in those}
        assert "torch-serial" in [one.name for one in groups[0]]  # the reference of the check
        for one in those:
            assert set(one.peers) <= set(everyone)
            assert one.serial in (*everyone, "")
    assert all(len(path.read_text().splitlines()) <= 160 for path in FOLDER.glob("*.py"))


class Standing:
    """An entrant whose process ends in a step of this number."""

    def __init__(self, ends_at=0):
        self.left = ends_at

    def resume(self):
        self.left -= 1

    def step(self):
        if self.left == 0:
            raise Failed("it is gone")
        return {"seconds": 1.0}

    def pause(self):
        pass


def test_a_contestant_that_ends_is_failed_and_the_others_go_on():
    failed = {}
    taken = take_turns({"a": Standing(), "b": Standing(ends_at=2), "c": Standing()}, 2, failed)
    assert {name: len(steps) for name, steps in taken.items()} == {"a": 2, "c": 2}
    assert failed == {"b": "ends when others take turns: it is gone"}


def test_the_planners_choice_is_started_as_it_needs():
    best = found()["ours-best"]
    assert best.choosing({"axes": {"pipe": 2}}).mpi
    assert not best.choosing({"axes": {"data": 2}}).mpi  # jax.distributed takes a process that is stopped for dead
    assert found()["ours-pipe"].choosing({"axes": {"data": 2}}).mpi


def test_a_quick_survey_has_one_peer_of_each():
    names = first_peers(found())
    assert {"torch-serial", "ours-data", "torch-ddp", "ours-pipe", "torch-pp-1f1b"} <= names
    assert not {"ours-best", "jax-data", "deepspeed-0"} & names
    assert len(names) < 16


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
    rates = [float(WORKLOADS["L1"].rate(step)) for step in range(400)]
    assert rates[0] == pytest.approx(3e-4 / WARM_UP)
    assert np.argmax(rates) == WARM_UP - 1
    assert rates[-1] == pytest.approx(LEAST * 3e-4)


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
    missing = {"torch", "sklearn"}
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name in missing else object())
    refused("--workloads", "L1", "V1", parts=["pip install scikit-learn"])
    missing.discard("sklearn")
    refused(parts=["pip install torch==2.13.0+cpu", "for CPUs"])  # PyPI's brings CUDA
    missing.add("deepspeed")
    refused("--only", "deepspeed-1", parts=["--only = 'deepspeed-1'", "an environment with deepspeed"])


def test_figures_of_another_form_are_kept_aside(tmp_path):
    kept_aside = run_path(str(SCRIPT))["_kept_aside"]
    assert kept_aside(tmp_path) is None
    path = tmp_path / "survey.json"
    path.write_text(json.dumps({"version": 3}))
    assert kept_aside(tmp_path) is None
    path.write_text(json.dumps({"version": 1}))
    kept = kept_aside(tmp_path)
    assert json.loads(kept.read_text()) == {"version": 1}
    assert not path.exists()
