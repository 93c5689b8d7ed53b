"""`axonn-jax bench`: its list of benchmarks, the accounting of collectives, bad input."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from axonn_jax.cli.main import BENCHES, main

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["bench", "collectives", "--model", "gpt-12b", "--layers", "1", "--devices", "4", "--grid.x", "2"]


def test_help_lists_every_benchmark(capsys):
    assert main(["bench", "--help"]) == 0
    out, _ = capsys.readouterr()
    for name in (bench.name for bench in BENCHES):
        assert f"  {name}  " in out


def test_collectives_as_json_and_table():
    environ = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "axonn_jax.cli.main", *SMALL]
    done = subprocess.run([*command, "--json"], env=environ, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert figures["ratio"] == 1.0
    assert figures["exact"] is True
    assert figures["grid"] == {"pipe": 1, "data": 2, "expert": 1, "z": 1, "y": 1, "x": 2}  # what is left goes to data
    sums = {(row["kind"], row["axes"]): row["compiled"] for row in figures["rows"]}
    assert set(sums) == {("all-reduce", axes) for axes in ("data", "x")}
    assert sum(one["bytes"] for one in figures["predicted"]) == sum(sums.values())


def test_vs_gspmd_as_json(capsys):
    # Equal losses and gradients are checked before anything is counted.
    argv = ["bench", "vs_gspmd", "--devices", "4", "--grids", "d2z2y1x1", "--rounds", "2", "--json"]
    assert main(argv) == 0
    figures = json.loads(capsys.readouterr().out)
    (row,) = figures["rows"]
    assert figures["ratios"] == {"small 4 d2z2y1x1 forward": row["ratio"]}
    assert figures["ratio"] == pytest.approx(row["ratio"])
    # The sum over data comes after the reduce-scatter over z: fewer bytes than one sum over both.
    assert row["ratio"] < 0.75
    assert row["ratio"] <= row["ratio_scattered"] <= 1
    assert row["chosen"]
    assert row["reason"] == ""
    assert len(row["rounds_s"][0]) == len(row["rounds_s"][1]) == 2
    assert row["step_ratio"] == pytest.approx(row["step_s"][0] / row["step_s"][1])
    assert sum(one["explicit"] for one in row["by"]) == pytest.approx(row["bytes"]["explicit"])


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        (["bench", "colectives"], ["NAME = 'colectives'", "did you mean", "collectives"]),
        (["bench", "collectives", "--model", "gpt-5c"], ["model.preset = 'gpt-5c'", "gpt-5b"]),
        (["bench", "collectives", "--devices", "6", "--grid.x", "4"], ["--devices = 6", "multiple", "4"]),
        (["bench", "collectives", "--grid.x", "3"], ["model.hidden = 2048", "nearest"]),
        (["bench", "collectives", "--grid.pipe", "2"], ["grid.pipe = 2"]),
        (["bench", "collectives", "--batch", "3", "--grid.data", "2"], ["train.global_batch = 3"]),
        (["bench", "vs_gspmd", "--grids", "d2z2"], ["--grids = 'd2z2'", "d2z2y1x1"]),
        (["bench", "vs_gspmd", "--devices", "4", "--grids", "d2z1y1x1"], ["--grids = 'd2z1y1x1'", "4 devices"]),
        (["bench", "vs_gspmd", "--devices", "0"], ["--devices = 0"]),
        (["bench", "vs_gspmd", "--models", "gpt-5c"], ["model.preset = 'gpt-5c'", "gpt-5b"]),
        (["bench", "vs_gspmd", "--rounds", "0"], ["--rounds = 0"]),
        (["bench", "vs_gspmd", "--microbatches", "0"], ["--microbatches = 0"]),
        (["bench", "vs_gspmd", "--gather", "always"], ["always", "forward", "backward", "step"]),
        (["bench", "experts", "--devices", "0"], ["--devices = 0"]),
        (["bench", "overlap", "--model", "gpt-5c"], ["model.preset = 'gpt-5c'", "gpt-5b"]),
        (["bench", "overlap", "--devices", "40"], ["--devices = 40", "multiple", "32"]),
        (["bench", "overlap", "--grid.data", "1", "--grid.z", "1"], ["--devices = 4", "multiple of 8"]),
        (["bench", "overlap", "--streams", "3"], ["--streams = 3", "divisor of --rows, which is 4"]),
        (["bench", "overlap", "--rows", "0"], ["--rows = 0"]),
        (["bench", "overlap", "--grid.pipe", "2", "--grid.data", "1"], ["grid.pipe = 2"]),
    ],
)
def test_bad_input_is_one_line(refused, argv, parts):
    refused(argv, *parts)


def test_overlap_without_a_compiler_for_gpus_says_what_to_install(refused, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    refused(["bench", "overlap", "--layers", "1"], "CUDA plugin", "pip install", "axonn_jax[aot]")


def test_facts_of_the_paper(capsys):
    assert main(["bench", "experts", "--paper"]) == 0
    heads, *rows = capsys.readouterr().out.splitlines()
    assert heads.split() == ["claim", "published", "here", "source"]
    assert len(rows) == 7


@pytest.mark.slow
def test_compile_as_json():
    argv = ["bench", "compile", "--model", "gpt2", "--scanned", "2", "3", "--unrolled", "3", "--rounds", "1", "--steps"]
    argv += ["0", "--grid.data", "1", "--grid.z", "1", "--grid.y", "1", "--grid.x", "1", "--microbatches", "1"]
    environ = os.environ | {"PYTHONPATH": str(ROOT)}  # a process of its own: it forgets what jax has traced
    command = [sys.executable, "-m", "axonn_jax.cli.main", *argv, "--json"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    two, three, unrolled = figures["compiled"]
    assert [one["layers"] for one in figures["compiled"]] == [2, 3, 3]
    assert figures["ratio"] == pytest.approx(three["median_s"] / two["median_s"])
    assert figures["instructions_ratio"] == pytest.approx(1.0, abs=0.02)
    assert unrolled["instructions"] > three["instructions"]
    assert two["argument_bytes"] < three["argument_bytes"] == pytest.approx(unrolled["argument_bytes"], abs=100)
    assert figures["steps"] is None


def test_matmuls_as_json_and_kept(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    argv = ["bench", "matmuls", "--rows", "1", "--rounds", "1", "--grid.x", "4", "--grid.y", "4"]
    assert main([*argv, "--keep", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert len(figures["rows"]) == 15  # qkv, out, up, down, head: forward, dX, dW
    assert sum(row["times"] for row in figures["rows"]) == 12 * 4 * 3 + 3
    assert figures["ratio"] == pytest.approx(figures["seconds"]["as written"] / figures["seconds"]["chosen"])
    for row in figures["rows"]:
        assert len(row["gain"]) == 8
        assert row["ratio"] == row["gain"][row["chosen"]]
        assert row["chosen"] == "as written" or row["ratio"] >= 1.05
    ((kept,),) = (json.loads(path.read_text()).values() for path in tmp_path.rglob("*.json"))
    assert kept == {r["product"]: r["chosen"] for r in figures["rows"]}


@pytest.mark.parametrize("flags", [["--rows", "0"], ["--rounds", "0"], ["--grid.x", "3"], ["--precision", "fp8"]])
def test_matmuls_refuses_what_it_cannot_do(refused, flags):
    refused(["bench", "matmuls", *flags], "model.hidden" if flags[0] == "--grid.x" else flags[0].removeprefix("--"))


@pytest.mark.parametrize("flags", [["--scanned", "1"], ["--unrolled", "0"], ["--rounds", "0"], ["--grid.pipe", "2"]])
def test_compile_refuses_what_it_cannot_do(flags, capsys):
    assert main(["bench", "compile", *flags]) == 2
    assert flags[0].removeprefix("--") in capsys.readouterr().err
