"""Tests that a change needs: those of its part and of the parts above it, as scripts/test runs them."""

import subprocess
import sys
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "_selection.py"
BELOW = {"core": (), "pipe": ("core",), "files": ("core",), "text": ("core", "files")}
BELOW |= {"cli": ("core", "pipe", "files", "text")}
RULES = "tests/test_*.py"


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """The script in a clone with a folder of tests for every part, whose branch is that of its origin."""
    loader = SourceFileLoader("selection", str(SCRIPT))
    module = module_from_spec(spec_from_loader("selection", loader))
    loader.exec_module(module)
    origin, clone = tmp_path / "origin", tmp_path / "clone"
    for folder in (*BELOW, "scripts", "examples"):
        (origin / "tests" / folder).mkdir(parents=True)
        (origin / "tests" / folder / "test_it.py").touch()
    git(origin, "init", "--quiet")
    git(origin, "add", ".")
    git(origin, "-c", "user.name=a", "-c", "user.email=a@b", "commit", "--quiet", "--message", "first")
    git(tmp_path, "clone", "--quiet", str(origin), str(clone))
    monkeypatch.setattr(module, "ROOT", clone)
    return module


def git(folder, *command):
    subprocess.run(["git", *command], cwd=folder, check=True)


@pytest.mark.parametrize(
    ("paths", "folders"),
    [
        (["axonn_jax/text/generator.py"], ["cli", "text"]),
        (["axonn_jax/files/data/read.py"], ["cli", "files", "text"]),
        (["axonn_jax/cli/main.py", "CHANGELOG.md"], ["cli"]),
        (["tests/pipe/test_it.py"], ["pipe/test_it.py"]),
        (["tests/pipe/worker.py", "scripts/house"], ["pipe", "scripts"]),
        (["docs/bring.md"], ["examples"]),
        (["tests/test_house.py"], []),
    ],
)
def test_a_change_needs_the_tests_of_its_part_and_of_those_above(checkout, paths, folders):
    assert checkout.selection(paths, BELOW) == {*(f"tests/{folder}" for folder in folders), RULES}


@pytest.mark.parametrize(
    "path", ["axonn_jax/__init__.py", "tests/conftest.py", "tests/hlo/program.py", "pyproject.toml", ".ci/run"]
)
def test_what_all_parts_stand_on_needs_all_tests(checkout, path):
    assert checkout.selection([path, "axonn_jax/cli/main.py"], BELOW) == set()


def test_changes_are_those_since_the_branch_left_its_upstream(checkout):
    clone = checkout.ROOT
    assert checkout.changed() == []
    (clone / "tests" / "new.py").touch()
    (clone / "tests" / "core" / "test_it.py").write_text("a = 1\n")
    assert sorted(checkout.changed()) == ["tests/core/test_it.py", "tests/new.py"]
    git(clone, "add", ".")
    git(clone, "-c", "user.name=a", "-c", "user.email=a@b", "commit", "--quiet", "--message", "second")
    assert sorted(checkout.changed()) == ["tests/core/test_it.py", "tests/new.py"]
    git(clone, "remote", "remove", "origin")
    assert checkout.changed() == []


def test_the_script_knows_the_parts_of_this_checkout():
    done = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, check=True)
    assert all(path.startswith("tests/") for path in done.stdout.splitlines())
