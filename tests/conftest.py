"""Strictness for the whole suite: 8 virtual CPU devices, strict dtype promotion, warnings as errors."""

import ctypes
import gc
import os
import signal
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import pytest

jax.config.update("jax_num_cpu_devices", 8)
jax.devices()  # now: a command that a test calls would start another number of them
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "allow")
jax.config.update("jax_traceback_in_locations_limit", 1)  # of each operation traced: more is only for debugging
# Tracing makes millions of objects that nothing else holds: looking for circles among them took a tenth of the time.
gc.freeze()
gc.set_threshold(50_000, 20, 20)


LONG = frozenset(Path(__file__).with_name("long.txt").read_text().splitlines())
MEGABYTES = 1500  # of a worker, above which it drops its programs


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(config, items):
    """Marks the tests of long.txt, where a line is a file, a function or one of its cases."""
    names = {item: (item.location[0], item.nodeid.partition("[")[0], item.nodeid) for item in items}
    for item in items:
        if not LONG.isdisjoint(names[item]):
            item.add_marker("long")
    if not any("::" in word for word in config.args):  # these are whole files
        there = {name for item in items for name in names[item]}
        gone = {name.partition("[")[0] for name in LONG if name.partition("::")[0] in there} - there
        if gone:
            raise pytest.UsageError(f"tests/long.txt names no test: {', '.join(sorted(gone))}")


def resident():
    """Returns the memory of this process, MB."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") // 2**20


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item, nextitem):
    """Empties the caches of a file's functions behind its last test, and those of jax where the worker has grown."""
    yield
    if nextitem is None or nextitem.path != item.path:
        for value in vars(item.module).values():
            if hasattr(value, "cache_clear") and value.__module__ == item.module.__name__:
                value.cache_clear()
        if resident() > MEGABYTES:
            jax.clear_caches()
            gc.collect()
            ctypes.CDLL(None).malloc_trim(0)


@pytest.fixture(scope="session")
def prepared(tmp_path_factory):
    """A small prepared directory of a vocabulary of 300."""
    from axonn_jax.files.data.prepare import prepare

    folder = tmp_path_factory.mktemp("prepared")
    for part in range(4):
        lines = [f"def f{n}(x):\n    return x + {n * n % 97}\n" for n in range(part, 2000, 4)]
        (folder / f"{part}.py").write_text("\n".join(lines))
    prepare(folder, folder / "data", vocab=300, include=["*.py"], holdout=0.3)
    return folder / "data"


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """A directory with a tokenizer that has a chat template."""
    from instruction_data import tokenizer

    return tokenizer(tmp_path_factory.mktemp("instructions") / "tokenizer")


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """A folder with the checkpoints of steps 2 and 4, which tests copy and damage."""
    from saved import saver, state

    folder = tmp_path_factory.mktemp("two")
    with saver(folder) as made:
        for step in (2, 4):
            made.save(step, state(step), {"position": step})
    return folder


@pytest.fixture
def hangup():
    """SIGHUP as a terminal's programs have it, also where the suite runs under `nohup`, which ignores it."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


NO_MESH = jax.sharding.get_mesh()


def _forget_mesh():
    if jax.sharding.get_mesh() != NO_MESH:
        jax.set_mesh(NO_MESH)


@pytest.fixture(autouse=True)
def _no_mesh_left_behind():
    """What sets the mesh (as `init` does), a test or a fixture of its module, does not set it for the next test."""
    _forget_mesh()
    yield
    _forget_mesh()
