"""Which channel a run uses, and what is said where it cannot be had."""

import subprocess
import sys
from importlib.util import find_spec
from types import SimpleNamespace

import pytest

from axonn_jax.channels import choose, open_channel
from axonn_jax.channels.base import Ports
from axonn_jax.errors import UserError


def fake_mpi(level="MULTIPLE"):
    levels = {f"THREAD_{word}": place for place, word in enumerate(("SINGLE", "FUNNELED", "SERIALIZED", "MULTIPLE"))}
    return SimpleNamespace(
        **levels, Query_thread=lambda: levels[f"THREAD_{level}"], Get_library_version=lambda: "Test MPI v1.2, more"
    )


@pytest.fixture
def packages(monkeypatch):
    """mpi4py and mpi4jax as this test wants them, without starting MPI in the test's process."""

    def provide(level="MULTIPLE", cuda=False):
        monkeypatch.setitem(sys.modules, "mpi4py", SimpleNamespace())
        monkeypatch.setitem(sys.modules, "mpi4py.MPI", fake_mpi(level))
        monkeypatch.setitem(sys.modules, "mpi4jax", SimpleNamespace(has_cuda_support=lambda: cuda))

    return provide


def test_one_process_is_local():
    assert choose("auto", 1) == "local"
    assert choose("local", 1) == "local"


def test_several_processes_take_mpi4py_whatever_mpi4jax_can_do(packages, monkeypatch):
    packages(cuda=True)  # its CUDA operations would wait for the tasks in the device's queue
    monkeypatch.setenv("MPI4JAX_USE_CUDA_MPI", "1")
    assert choose("auto", 4) == "mpi4py"


@pytest.mark.parametrize("name", ["mpi4py", "mpi4jax"])
def test_what_is_asked_for_is_taken(packages, name):
    packages()
    assert choose(name, 2) == name


@pytest.mark.parametrize("name", ["auto", "mpi4py", "mpi4jax"])
def test_threads_have_to_be_allowed(packages, name):
    packages(level="SERIALIZED")
    with pytest.raises(UserError, match=r"THREAD_MULTIPLE; this one gave MPI_THREAD_SERIALIZED \(Test MPI v1.2\)"):
        choose(name, 2)


def test_local_in_several_processes_is_refused():
    with pytest.raises(UserError, match=r"pipeline.channel = 'local': mpi4py, mpi4jax or auto in a run of 3 processes"):
        choose("local", 3)
    with pytest.raises(UserError, match="communicator"):
        open_channel("mpi4py", Ports({}, 1))


@pytest.mark.parametrize("name", ["mpi4py", "mpi4jax"])
def test_a_channel_of_mpi_in_one_process_is_refused_without_starting_mpi(monkeypatch, name):
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(UserError, match=rf"pipeline.channel = '{name}': local or auto in a run of one process"):
        choose(name, 1)


def test_an_unknown_name_suggests_a_known_one():
    with pytest.raises(UserError, match=r"one of auto, local, mpi4jax, mpi4py; did you mean 'mpi4jax'\?"):
        choose("mpijax", 2)


@pytest.mark.parametrize(
    ("name", "missing"),
    [("auto", "mpi4py"), ("mpi4py", "mpi4py"), ("mpi4jax", "mpi4jax")],
)
def test_a_missing_package_is_one_line_that_says_how_to_get_it(name, missing):
    if missing == "mpi4jax" and find_spec("mpi4py") is None:
        pytest.skip("no mpi4py")
    code = (
        f"import sys; sys.modules[{missing!r}] = None\n"
        "from axonn_jax.channels import choose\n"
        "from axonn_jax.errors import UserError\n"
        "try:\n"
        f"    choose({name!r}, 2)\n"
        "except UserError as error:\n"
        "    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith(f"pipeline.channel = {name!r}: ")
    assert done.stdout.count("\n") == 1
    for part in (f"{missing} does not", "extra `mpi`", "scripts/setup", "axonn-jax doctor"):
        assert part in done.stdout
