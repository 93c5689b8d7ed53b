"""Buffers in device memory, which the CPU devices' own stands in for, and who decides that MPI is given them."""

import ctypes
import os
import shutil
import subprocess
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axonn_jax.channels.buffers import DeviceBuffers, HostBuffers, choose_buffers, takes_device_memory

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
        target.held.block_until_ready()
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
    buffer.held.block_until_ready()
    assert buffers.writable(buffer)


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
from axonn_jax.channels.buffers import enter_context
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
