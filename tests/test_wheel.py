"""The installed package: a wheel of the source distribution, in its own environment, has all that commands need."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SDIST = "import sys; from setuptools.build_meta import build_sdist; build_sdist(sys.argv[1])"


@pytest.fixture(scope="module")
def axonn(tmp_path_factory):
    """Runs commands where a wheel is installed, in a directory of its own; the libraries are this environment's."""
    place = tmp_path_factory.mktemp("wheel")
    source, home, work = place / "source", place / "env", place / "work"
    work.mkdir()
    shutil.copytree(ROOT / "axonn_jax", source / "axonn_jax", ignore=shutil.ignore_patterns("__pycache__"))
    (source / "tests").mkdir()
    for name in ("pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "tests/test_wheel.py"):
        shutil.copy(ROOT / name, source / name)
    quiet = {"check": True, "stdout": subprocess.DEVNULL, "cwd": place}
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([sys.executable, "-c", SDIST, place], **quiet | {"cwd": source}, stderr=subprocess.DEVNULL)
    (sdist,) = place.glob("axonn_jax-*.tar.gz")
    with tarfile.open(sdist) as archive:
        assert not [name for name in archive.getnames() if "test" in name]  # setuptools takes tests/test_*.py
    subprocess.run([*pip, "wheel", "--no-build-isolation", "--no-deps", "-w", place, sdist], **quiet)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", home], **quiet)
    (wheel,) = place.glob("*.whl")
    subprocess.run([*pip, "--python", home / "bin/python", "install", "--no-deps", "--no-index", wheel], **quiet)
    (site,) = home.glob("lib/python*/site-packages")
    (site / "libraries.pth").write_text(sysconfig.get_path("purelib") + "\n")
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    environ["PATH"] = f"{home / 'bin'}{os.pathsep}{environ['PATH']}"

    def run(*words):
        done = subprocess.run(words, cwd=work, env=environ, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run, site


def test_plan_finds_its_machines(axonn):
    run, site = axonn
    words = ["--model", "gpt2", "--machine", "perlmutter", "--devices", "4", "--batch-tokens", "64Ki", "--json"]
    assert json.loads(run("axonn-jax", "plan", *words))["configs"]
    assert "axonn-jax" in run("axonn-jax", "--version")
    assert "RUN_DIR" in run("axonn-jax", "generate", "--help")  # texts of flags are read from the source
    assert {path.name for path in ROOT.glob("axonn_jax/planning/machines/*.toml")} == {
        path.name for path in site.glob("axonn_jax/planning/machines/*.toml")
    }
    assert not [path for room in ("hlo", "bench") for path in site.glob(f"axonn_jax/**/{room}")]
    assert (site / "axonn_jax/py.typed").exists()


@pytest.mark.slow
def test_a_release_does_what_it_is_tried_for(axonn):
    run, site = axonn
    said = run(ROOT / "scripts/release/try").splitlines()
    assert "everything required is there" in said
    assert said[-1].startswith("the")
    assert not list(site.glob("axonn_jax/**/*.part"))


def test_evaluate_finds_its_programs(axonn):
    _, site = axonn
    folder = Path("axonn_jax/judge/mini")
    assert {path.name for path in (site / folder).iterdir()} == {path.name for path in (ROOT / folder).iterdir()}
