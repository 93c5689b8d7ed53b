"""The installed package: a wheel in an environment of its own, outside the checkout, has all that commands need."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
CONFIG = """
[model]
layers = 1
hidden = 32
heads = 4
seq_len = 16
[data]
path = "data"
[train]
steps = 2
global_batch = 4
"""


@pytest.fixture(scope="module")
def axonn(tmp_path_factory):
    """Runs `axonn-jax` as installed from a wheel, in a directory of its own; its libraries are this environment's."""
    place = tmp_path_factory.mktemp("wheel")
    source, home, work = place / "source", place / "env", place / "work"
    work.mkdir()
    shutil.copytree(ROOT / "axonn_jax", source / "axonn_jax", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    quiet = {"check": True, "stdout": subprocess.DEVNULL, "cwd": place}
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "wheel", "--no-build-isolation", "--no-deps", "-w", place, source], **quiet)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", home], **quiet)
    (wheel,) = place.glob("*.whl")
    subprocess.run([*pip, "--python", home / "bin/python", "install", "--no-deps", "--no-index", wheel], **quiet)
    (site,) = home.glob("lib/python*/site-packages")
    (site / "libraries.pth").write_text(sysconfig.get_path("purelib") + "\n")
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}

    def run(*words):
        command = [home / "bin/axonn-jax", *words]
        done = subprocess.run(command, cwd=work, env=environ, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run, site, work


def test_plan_finds_its_machines(axonn):
    run, site, _ = axonn
    words = ["--model", "gpt2", "--machine", "perlmutter", "--devices", "4", "--batch-tokens", "64Ki", "--json"]
    assert json.loads(run("plan", *words))["configs"]
    assert "axonn-jax" in run("--version")
    assert "RUN_DIR" in run("generate", "--help")  # texts of flags are read from the source
    assert {path.name for path in ROOT.glob("axonn_jax/planner/machines/*.toml")} == {
        path.name for path in site.glob("axonn_jax/planner/machines/*.toml")
    }
    assert not [path for room in ("hlo", "bench") for path in site.glob(f"axonn_jax/**/{room}")]
    assert (site / "axonn_jax/py.typed").exists()


@pytest.mark.slow
def test_doctor_and_train(axonn):
    run, site, work = axonn
    assert json.loads(run("doctor", "--json"))["ok"]
    (work / "texts").mkdir()
    for number in range(3):
        (work / f"texts/{number}.txt").write_text("the same words and the same words again\n" * 50)
    (work / "run.toml").write_text(CONFIG)
    run("prepare", "texts", "data", "--vocab", "260")
    run("train", "run.toml")
    assert (work / "runs/run/metrics.jsonl").read_text().count('"loss"') >= 2
    assert run("generate", "runs/run", "--prompt", "the", "--tokens", "3").startswith("the")
    assert not list(site.glob("axonn_jax/**/*.part"))


def test_evaluate_finds_its_programs(axonn):
    _, site, _ = axonn
    folder = Path("axonn_jax/evaluate/mini")
    assert {path.name for path in (site / folder).iterdir()} == {path.name for path in (ROOT / folder).iterdir()}
