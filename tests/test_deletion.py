"""Parts of the package (`scripts/house`): one works where every part that is not below it has been deleted."""

import ast
import os
import pkgutil
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from test_house import script

from axonn_jax.core.checkpoint.readers import READERS

HOUSE = script()
ROOT = Path(__file__).resolve().parents[1]
MOST_FILES_OF_CORE = 125

PUBLIC = """
import importlib, pkgutil, sys, types
import axonn_jax
for module in pkgutil.walk_packages(axonn_jax.__path__, "axonn_jax."):
    importlib.import_module(module.name)
for name in dir(axonn_jax) if len(sys.argv) == 1 else ():
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


TRAINS = """
import jax, numpy, optax
jax.config.update("jax_num_cpu_devices", 8)
import axonn_jax as ax
from flax import nnx

shape = ax.models.ModelShape(layers=2, hidden=32, heads=4, kv_heads=4, ffn=64, vocab=64, seq_len=16)
grid = ax.init(data=2, z=2, y=2)
batch = numpy.random.default_rng(0).integers(0, 64, (16, 17))
trainer, other = (
    ax.Trainer(lambda: ax.models.Transformer(shape, rngs=nnx.Rngs(seed)), optax.adamw(1e-3), grid, microbatches=2)
    for seed in (0, 1)
)
losses = [float(trainer.step(batch)["loss"]) for _ in range(2)]
path = trainer.save("saved", 2)
losses += [trainer.evaluate([batch]), float(trainer.step(batch)["loss"])]
assert other.load(path) == 2
assert [other.evaluate([batch]), float(other.step(batch)["loss"])] == losses[2:]
assert losses[0] > losses[1] > losses[3]
"""


def without_others(part, folder):
    """Copies the checkout without the parts that are not below one, and returns a function that runs Python there."""
    shutil.copytree(
        ROOT, folder, ignore=shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "runs", "site", "build")
    )
    for other in HOUSE.BELOW:
        if other not in (part, *HOUSE.BELOW[part]):
            shutil.rmtree(folder / "axonn_jax" / other)
            shutil.rmtree(folder / "tests" / other)

    def run(*words):
        environ = os.environ | {"PYTHONPATH": str(folder)}
        done = subprocess.run([sys.executable, *words], cwd=folder, env=environ, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]

    return run


@pytest.mark.parametrize("part", HOUSE.BELOW)
def test_a_part_imports_and_the_core_trains_without_what_is_not_below_it(part, tmp_path):
    run = without_others(part, tmp_path / "copy")
    run("-c", PUBLIC, "modules alone")
    run("-c", TRAINS)


@pytest.mark.slow
@pytest.mark.parametrize("part", HOUSE.BELOW)
def test_the_quick_tests_of_a_part_pass_without_what_is_not_below_it(part, tmp_path):
    run = without_others(part, tmp_path / "copy")
    run("-m", "pytest", "-m", "not slow and not long and not bits and not alone", f"tests/{part}")
