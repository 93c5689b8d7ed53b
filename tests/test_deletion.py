"""Parts of the package (`scripts/house`): one works where every part that is not below it has been deleted."""

import ast
import pkgutil
import subprocess
import sys

import pytest
from test_house import script

from axonn_jax.readers import READERS

HOUSE = script()
MOST_FILES_OF_CORE = 125

PUBLIC = """
import importlib, pkgutil, types
import axonn_jax
for module in pkgutil.walk_packages(axonn_jax.__path__, "axonn_jax."):
    importlib.import_module(module.name)
for name in dir(axonn_jax):
    value = getattr(axonn_jax, name)
    assert isinstance(value, types.ModuleType) == (name == "models"), (name, value)
"""


@pytest.fixture(scope="module")
def tree():
    return HOUSE.Tree()


def test_parts_are_in_order_and_what_is_below_one_is_below_those_above_it():
    parts = [*HOUSE.BELOW]
    for part, below in HOUSE.BELOW.items():
        assert all(other == HOUSE.FACADE or parts.index(other) < parts.index(part) for other in below)
        assert {lower for other in below for lower in HOUSE.BELOW.get(other, ())} <= {*below}


def test_every_part_is_there(tree):
    assert {HOUSE.part(name) for name in tree.text} == {*HOUSE.BELOW, HOUSE.FACADE}


def test_no_module_imports_one_of_a_part_that_is_not_below_its_own(tree):
    assert tree.arrows_out() == []


def test_the_core_is_of_a_size_to_read(tree):
    assert sum(HOUSE.part(name) == "core" for name in tree.text) <= MOST_FILES_OF_CORE


def test_the_only_modules_that_parts_name_without_importing_them_are_readers(tree):
    """An import by a name is as much an arrow as a statement, and no rule sees it."""
    doors = set()
    for name, parsed in tree.parsed.items():
        for node in ast.walk(parsed):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("axonn_jax."):
                path = node.value.partition(":")[0].removeprefix("axonn_jax.").replace(".", "/")
                source = HOUSE.part(name)
                if path in tree.text and source in HOUSE.BELOW:
                    doors |= {node.value} if HOUSE.part(path) not in (source, *HOUSE.BELOW[source]) else set()
    assert doors == set(READERS.values())
    for door in doors:
        assert callable(pkgutil.resolve_name(door))


def test_no_module_takes_the_place_of_a_public_name():
    done = subprocess.run([sys.executable, "-c", PUBLIC], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
