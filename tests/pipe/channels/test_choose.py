"""Which channel a run uses, what is said where it cannot be had, and who decides that MPI is given device memory."""

import ctypes
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axonn_jax.core.distributed.shards import empty_bytes, shard_bytes
from axonn_jax.core.errors import UserError
from axonn_jax.pipe.channels.base import Ports
from axonn_jax.pipe.channels.buffers import DeviceBuffers, HostBuffers, choose_buffers, takes_device_memory
from axonn_jax.pipe.channels.choice import choose, open_channel
from axonn_jax.pipe.channels.mpi4jax import pool_threads, widen_pool


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
        "from axonn_jax.pipe.channels.choice import choose\n"
        "from axonn_jax.core.errors import UserError\n"
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


GPU, CPU = SimpleNamespace(platform="gpu"), SimpleNamespace(platform="cpu")
NO_MPI = "libc.so.6"


def form_of(dtype, devices, shape=(8, 6)):
    mesh = jax.sharding.Mesh(np.asarray(devices), ("x",))
    return jax.ShapeDtypeStruct(shape, dtype, sharding=jax.NamedSharding(mesh, jax.P("x")))


def place(buffer):
    said = buffer.__cuda_array_interface__
    (count,), (address, readonly) = said["shape"], said["data"]
    assert said["typestr"] == "|u1"
    assert not readonly
    return address, count


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32, jnp.int8])
def test_bytes_go_from_one_devices_memory_into_anothers(dtype):
    devices = jax.devices()[:2]
    form = form_of(dtype, devices)
    buffers = DeviceBuffers([form], devices)
    received = []
    for number in range(5):  # more than the store holds
        sent = jax.device_put((np.arange(24) + 24 * number).reshape(4, 6).astype(dtype), devices[0]).block_until_ready()
        source, size = place(buffers.outgoing(sent))
        assert (source, size) == (sent.unsafe_buffer_pointer(), sent.nbytes)  # not a copy
        target = buffers.incoming(form, devices[1])
        target.array.block_until_ready()
        assert buffers.writable(target)
        address, room = place(target)
        assert room == size
        ctypes.memmove(address, source, size)
        array = buffers.array(target, form, devices[1])
        assert array.unsafe_buffer_pointer() == address  # nor this
        assert array.devices() == {devices[1]}
        received.append((sent, array))
    for sent, array in received:  # no buffer has been given out twice
        assert array.dtype == dtype
        assert np.asarray(array).tobytes() == np.asarray(sent).tobytes()


def test_a_buffer_is_not_to_be_written_before_the_program_that_makes_it_has_run():
    slow = jax.jit(lambda w: jax.lax.fori_loop(0, 60, lambda i, w: w @ w / 700, w))
    weights = jnp.ones((700, 700))
    slow(weights).block_until_ready()
    buffers = DeviceBuffers([], jax.devices()[:1])
    buffer = buffers.outgoing(slow(weights))
    assert not buffers.writable(buffer)
    buffer.array.block_until_ready()
    assert buffers.writable(buffer)


def test_host_memory_is_used_again_once_its_array_is_gone():
    device = jax.devices()[0]
    form = form_of(jnp.float32, [device], (1 << 20,))
    buffers = HostBuffers()
    array = buffers.array(buffers.incoming(form, device), form, device)
    first = array.unsafe_buffer_pointer()
    assert buffers.incoming(form, device).ctypes.data != first  # not while it is read
    sums = jnp.sum(array)
    del array
    sums.block_until_ready()
    (sums + 1).block_until_ready()  # jax lets go of memory when it is called again
    others = [empty_bytes(shard_bytes(form)) for _ in range(3)]  # would take memory that has only been freed
    kept = [buffers.incoming(form, device) for _ in range(2)]
    assert first in [buffer.ctypes.data for buffer in kept], len(others)


@pytest.mark.parametrize(
    ("devices", "environ", "takes"),
    [
        ([CPU], {"MPI4JAX_USE_CUDA_MPI": "1"}, False),
        ([GPU], {}, False),  # by MPI's word
        ([GPU], {"MPI4JAX_USE_CUDA_MPI": "1"}, True),
        ([GPU, GPU], {"MPI4JAX_USE_CUDA_MPI": "true"}, True),
    ],
)
def test_the_users_word(devices, environ, takes):
    assert takes_device_memory(devices, NO_MPI, environ) is takes


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
@pytest.mark.parametrize(("answer", "devices", "takes"), [(1, [GPU], True), (0, [GPU], False), (1, [GPU, GPU], False)])
def test_mpis_word(tmp_path, answer, devices, takes):
    library = tmp_path / "libmpi.so"
    source = f"int MPIX_Query_cuda_support(void) {{ return {answer}; }}\n"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, "-x", "c", "-"], input=source, text=True, check=True)
    assert takes_device_memory(devices, str(library), {}) is takes
    assert takes_device_memory(devices, str(library), {"MPI4JAX_USE_CUDA_MPI": "0"}) is False


DRIVER = """
int current = 0;
int cuDeviceGet(int *device, int ordinal) { *device = ordinal + 100; return ordinal > 7 ? 101 : 0; }
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = (void *)(0x100000000L + device); return 0; }
int cuCtxSetCurrent(void *context) { current = context == (void *)(0x100000000L + 103); return 0; }
"""
ENTER = """
import ctypes
from axonn_jax.pipe.channels.buffers import enter_context
enter_context(3)
assert ctypes.c_int.in_dll(ctypes.CDLL("libcuda.so.1"), "current").value
try:
    enter_context(8)
except RuntimeError as error:
    print(error)
"""


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_the_devices_context_becomes_the_threads(tmp_path):
    compile_ = ["cc", "-shared", "-fPIC", "-o", tmp_path / "libcuda.so.1", "-x", "c", "-"]
    subprocess.run(compile_, input=DRIVER, text=True, check=True)
    env = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", ENTER], env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "CUDA error 101 while a channel's thread took the context of device 8\n"


def test_cpu_devices_are_sent_from_as_before():
    assert isinstance(choose_buffers([], jax.devices()[:1], NO_MPI), HostBuffers)


@pytest.mark.parametrize(
    ("cores", "user", "threads", "then"),
    [
        ({0}, {}, 1, {"NPROC": "2"}),
        ({0}, {"NPROC": "1"}, 1, {"NPROC": "1"}),  # the user's number stays, and is refused by `check_pool`
        ({0, 1}, {"PJRT_NPROC": "1", "NPROC": "4"}, 1, {"PJRT_NPROC": "1", "NPROC": "4"}),
        ({0}, {"NPROC": "4"}, 4, {"NPROC": "4"}),
        ({0, 1}, {"NPROC": "many"}, 2, {"NPROC": "many"}),  # which XLA does not read
    ],
)
def test_mpi4jax_has_two_threads_unless_the_user_has_chosen(cores, user, threads, then, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: cores)
    environ = dict(user)
    assert pool_threads(environ) == threads
    widen_pool(environ)
    assert environ == then
