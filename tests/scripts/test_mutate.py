"""scripts/mutate: what it draws from a small package, and that what the tests find is told from what they miss."""

import os
import subprocess
import sys
from pathlib import Path
from runpy import run_path
from types import SimpleNamespace

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
SOURCE = '''"""Sums of 7."""
from jax import lax
FEATURE_AXIS = "x"
def area(width: "int | 3", height: int = 2) -> int:
    """The 9 of `width + height`."""
    if width < 0:
        raise ValueError("width + 1", width + 1)
    return width * height
def total(x, y):
    """Sums."""
    assert x, "x + 1"
    return lax.psum(x, "y"), lax.all_gather(y, FEATURE_AXIS, axis=0), f"{x + 1}", print(x + 1), max(1, x)
'''


@pytest.fixture
def mutate(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return SimpleNamespace(**run_path(str(SCRIPTS / "mutate")))


def test_every_site(mutate):
    files = {"axonn_jax/room/area.py": SOURCE.encode(), "axonn_jax/top.py": b"SIZE = 1.5\n"}
    found = mutate.drawn(files, 3, 100)
    assert found == mutate.drawn(files, 3, 100)
    assert {one.room for one in found[:2]} == {"room", "the root"}
    assert {one.line for one in found if one.room == "room"} == {3, 4, 6, 8, 12}
    changed = {(one.kind, one.before, one.after) for one in found}
    values = 'return lax.psum(x, "y"), lax.all_gather(y, FEATURE_AXIS, axis=0), f"{x + 1}", print(x + 1), max(1, x)'
    pairs = {
        '"y"': '"x"', "FEATURE_AXIS": '"y"', "axis=0": "axis=1", 'lax.psum(x, "y")': "x", "max(1, x)": "x",
        "lax.all_gather(y, FEATURE_AXIS, axis=0)": "y", "max(1": "max(2", "y, FEATURE_AXIS": "FEATURE_AXIS, y",
    }  # fmt: skip
    at_values = {after for _, before, after in changed if before == values}
    assert at_values == {values.replace(*pair) for pair in pairs.items()}
    assert {kind for kind, *_ in changed} == {"operator", "constant", "axis", "swap", "reduction"}
    assert {("operator", "if width < 0:", "if width <= 0:"), ("constant", "SIZE = 1.5", "SIZE = 3.0")} <= changed


def test_found_and_missed(mutate, tmp_path):
    root = tmp_path / "a"
    package, test = root / "axonn_jax/room/area.py", root / "tests/room/test_area.py"
    package.parent.mkdir(parents=True)
    test.parent.mkdir(parents=True)
    package.write_text("def area(width):\n    return width * 2 if width else 0\n")
    test.write_text("from axonn_jax.room.area import area\ndef test_area(): assert area(2) == 4\n")
    subprocess.run("git init -q && git add .", shell=True, cwd=root, check=True)
    files = {"axonn_jax/room/area.py": package.read_bytes()}
    environ = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    suite = mutate.Suite(tmp_path / "b", root, root, "not slow", 60.0, environ)
    suite.python, suite.groups = sys.executable, (("not mpi", False, ()),)
    drawn = {one.after.partition("return ")[2]: one for one in mutate.drawn(files, 1, 9)}
    found, missed = suite.judge(drawn["width * 3 if width else 0"]), suite.judge(drawn["width * 2 if width else 1"])
    assert [found["outcome"], found["test"]] == ["found", "tests/room/test_area.py::test_area"]
    assert missed["outcome"] == "MISSED"
    assert {"axonn_jax/room/area.py": package.read_bytes()} == files


def test_every_room_has_tests(mutate):
    package = SCRIPTS.parent / mutate.PACKAGE
    rooms = {"/".join(each.relative_to(package).parts[:-1][:2]) for each in package.glob("*/**/__init__.py")}
    names = " ".join([*mutate.TESTS.values(), *map(mutate.tests_of, rooms)]).split()
    assert [name for name in names if not list(SCRIPTS.parent.glob(f"tests/{name}"))] == []


def test_bad_input_is_one_line(mutate, capsys):
    with pytest.raises(SystemExit) as done:
        mutate.arguments(["--seed", "1", "--count", "0"])
    assert done.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1
