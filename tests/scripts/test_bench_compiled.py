"""Benchmarks that compile steps (scripts/bench/collectives, vs_gspmd, overlap, ...): their JSON, and bad input."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from runpy import run_path

import pytest
from compiled.common import cuda_plugin_installed
from hlo.overlap import MAIN

BENCH = Path(__file__).resolve().parents[2] / "scripts" / "bench"


@pytest.fixture
def bench(monkeypatch, capsys):
    """Runs a script of a name in this process; gives status, output and errors."""

    def run(name, *words):
        monkeypatch.setattr(sys, "argv", [name, *words])
        with pytest.raises(SystemExit) as ended:
            run_path(str(BENCH / name), run_name="__main__")
        return (int(ended.value.code or 0), *capsys.readouterr())

    return run


@pytest.fixture
def refused(bench):
    def check(name, *words, parts):
        status, out, err = bench(name, *words)
        assert (status, out) == (2, ""), err
        assert err.startswith("error: ")
        assert err.count("\n") == 1
        for part in parts:
            assert part in err

    return check


def figures_of(name, *words, environ=None, timeout=300):
    """The JSON of a script in a process of its own."""
    command = [sys.executable, str(BENCH / name), *words, "--json"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=timeout, cwd="/")
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


NAMES = ("collectives", "compile", "experts_bytes", "memory", "overlap", "vs_gspmd")


@pytest.mark.parametrize("name", NAMES)
def test_help(bench, name):
    status, out, err = bench(name, "--help")
    assert (status, err) == (0, "")
    assert out.startswith(f"usage: scripts/bench/{name} ")
    assert "--json" in out


def test_collectives_as_json():
    figures = figures_of("collectives", "--model", "gpt-12b", "--layers", "1", "--devices", "4", "--grid.x", "2")
    assert figures["ratio"] == 1.0
    assert figures["exact"] is True
    assert figures["grid"] == {"pipe": 1, "data": 2, "expert": 1, "z": 1, "y": 1, "x": 2}  # what is left goes to data
    sums = {(row["kind"], row["axes"]): row["compiled"] for row in figures["rows"]}
    assert set(sums) == {("all-reduce", axes) for axes in ("data", "x")}
    assert sum(one["bytes"] for one in figures["predicted"]) == sum(sums.values())


def test_vs_gspmd_as_json(bench):
    # Equal losses and gradients are checked before anything is counted.
    status, out, _ = bench("vs_gspmd", "--devices", "4", "--grids", "d2z2y1x1", "--rounds", "2", "--json")
    assert status == 0
    figures = json.loads(out)
    (row,) = figures["rows"]
    assert figures["ratios"] == {"small 4 d2z2y1x1 forward": row["ratio"]}
    assert figures["ratio"] == pytest.approx(row["ratio"])
    # The sum over data comes after the reduce-scatter over z: fewer bytes than one sum over both.
    assert row["ratio"] < 0.75
    assert row["ratio"] <= row["ratio_scattered"] <= 1
    assert row["reason"] == ""
    assert len(row["rounds_s"][0]) == len(row["rounds_s"][1]) == 2
    assert row["step_ratio"] == pytest.approx(row["step_s"][0] / row["step_s"][1])
    assert sum(one["explicit"] for one in row["by"]) == pytest.approx(row["bytes"]["explicit"])


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        ("collectives --model gpt-5c", ["model.preset = 'gpt-5c'", "gpt-5b"]),
        ("collectives --devices 6 --grid.x 4", ["--devices = 6", "multiple", "4"]),
        ("collectives --grid.x 3", ["model.hidden = 2048", "or x*z one of 1, 2, 4"]),
        ("collectives --grid.pipe 2", ["grid.pipe = 2"]),
        ("collectives --batch 3 --grid.data 2", ["train.global_batch = 3"]),
        ("vs_gspmd --grids d2z2", ["--grids = 'd2z2'", "d2z2y1x1"]),
        ("vs_gspmd --devices 4 --grids d2z1y1x1", ["--grids = 'd2z1y1x1'", "4 devices"]),
        ("vs_gspmd --devices 0", ["--devices = 0"]),
        ("vs_gspmd --models gpt-5c", ["model.preset = 'gpt-5c'", "gpt-5b"]),
        ("vs_gspmd --rounds 0", ["--rounds = 0"]),
        ("vs_gspmd --microbatches 0", ["--microbatches = 0"]),
        ("vs_gspmd --reshard-after always", ["always", "forward", "backward", "step"]),
        ("experts_bytes --devices 0", ["--devices = 0"]),
        ("overlap --model gpt-5c", ["model.preset = 'gpt-5c'", "gpt-5b"]),
        ("overlap --devices 40", ["--devices = 40", "multiple", "32"]),
        ("overlap --grid.data 1 --grid.z 1", ["--devices = 4", "multiple of 8"]),
        ("overlap --sub-batches 3", ["--sub-batches = 3", "divisor of --rows, which is 4"]),
        ("overlap --rows 0", ["--rows = 0"]),
        ("overlap --grid.pipe 2 --grid.data 1", ["grid.pipe = 2"]),
        ("compile --scanned 1", ["scanned"]),
        ("compile --unrolled 0", ["unrolled"]),
        ("compile --rounds 0", ["rounds"]),
        ("compile --grid.pipe 2", ["grid.pipe"]),
        ("memory --grid.pipe 2", ["grid.pipe"]),
    ],
)
def test_bad_input_is_one_line(refused, line, parts):
    refused(*line.split(), parts=parts)


def test_overlap_without_a_compiler_for_gpus_says_what_to_install(refused, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    refused("overlap", "--layers", "1", parts=["CUDA plugin", "pip install", "axonn_jax[aot]"])


def test_facts_of_the_paper(bench):
    status, out, _ = bench("experts_bytes", "--paper")
    assert status == 0
    heads, *rows = out.splitlines()
    assert heads.split() == ["claim", "published", "here", "source"]
    assert len(rows) == 7


@pytest.mark.slow
def test_compile_as_json():
    flags = ["--model", "gpt2", "--scanned", "2", "3", "--unrolled", "3", "--rounds", "1", "--steps", "0"]
    ones = [word for name in ("grid.data", "grid.z", "grid.y", "grid.x", "microbatches") for word in (f"--{name}", "1")]
    figures = figures_of("compile", *flags, *ones)
    two, three, unrolled = figures["compiled"]
    assert [one["layers"] for one in figures["compiled"]] == [2, 3, 3]
    assert figures["ratio"] == pytest.approx(three["median_s"] / two["median_s"])
    assert figures["instructions_ratio"] == pytest.approx(1.0, abs=0.02)
    assert unrolled["instructions"] > three["instructions"]
    assert two["argument_bytes"] < three["argument_bytes"] == pytest.approx(unrolled["argument_bytes"], abs=100)
    assert figures["steps"] is None


@pytest.mark.slow
@pytest.mark.skipif(not cuda_plugin_installed(), reason="needs the CUDA plugin: pip install 'axonn_jax[aot]'")
def test_collectives_of_a_step_run_beside_matmuls():
    """Embedding and head have fewer matmuls beside them, and count more in 16 layers than in a whole model."""
    figures = figures_of("overlap", "--layers", "16", environ={**os.environ, "JAX_PLATFORMS": "cpu"}, timeout=900)
    assert figures["grid"] == {"pipe": 1, "data": 2, "expert": 1, "z": 4, "y": 2, "x": 2}
    on, off, automatic = (figures["ratios"][name] for name in ("on", "off", "automatic"))
    assert set(on) == set(off) == set(MAIN)
    for kind in MAIN:
        assert on[kind]["bytes"] >= 0.9, (kind, on)
    assert off["forward all-reduces"]["bytes"] < 0.5
    assert automatic["forward all-reduces"]["bytes"] < 0.5
    steps = {name: program["step_s"] for name, program in figures["programs"].items()}
    assert steps["on"] < min(steps["off"], steps["automatic"])
