"""Buffers for MPI messages: host memory, or device memory where MPI accepts it."""

import ctypes
import os
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from axonn_jax.core.backend.traits import computes_on_cores
from axonn_jax.core.distributed.shards import empty_bytes, host_bytes, rebuild, shard_bytes

_USERS_WORD = "MPI4JAX_USE_CUDA_MPI"  # mpi4jax's variable, with the same meaning there
_STORED = 2
"""Buffers of a form that are kept for the next messages: one for either direction."""

_STORED_FROM = 1 << 17
"""Bytes from which host memory is kept: the C library keeps smaller pieces itself."""


class _Loan:
    """Memory that returns to its store once no array refers to it."""

    def __init__(self, memory: np.ndarray, store: deque[np.ndarray]):
        self._memory, self._store = memory, store
        self.__array_interface__ = memory.__array_interface__

    def __del__(self) -> None:
        self._store.append(self._memory)


class HostBuffers:
    """Buffers in host memory: the memory of CPU devices itself, copies of other devices' arrays."""

    def __init__(self, *, on_cores: bool = True) -> None:
        self._on_cores = on_cores
        # By size in bytes. The first writes to new memory take longer than the transfer, so it is used again.
        self._stores: dict[int, deque[np.ndarray]] = defaultdict(lambda: deque(maxlen=_STORED))

    def immediate(self, shards: Sequence[jax.Array]) -> bool:
        """Return True if any thread can take these shards' `outgoing` buffers without waiting."""
        return self._on_cores and all(shard.is_ready() for shard in shards)  # type: ignore[attr-defined]

    def enter(self) -> None:
        """Prepare the calling thread, which must be the one that makes all MPI calls."""

    def prepare(self, shard: jax.Array) -> None:
        """Start to copy a shard to the host before it is sent; the shard may still be being computed."""
        shard.copy_to_host_async()  # nothing to do on CPU devices

    def outgoing(self, shard: jax.Array) -> np.ndarray:
        """Return the buffer of a computed shard; the caller keeps the shard alive until the buffer has been sent."""
        return host_bytes(shard)

    def incoming(self, form: jax.ShapeDtypeStruct, device: jax.Device) -> np.ndarray:
        """Return a new buffer for a shard of `form`, which must not be written to until it is `writable`."""
        size = shard_bytes(form)
        if size < _STORED_FROM:
            return empty_bytes(size)
        store = self._stores[size]
        return np.asarray(_Loan(store.pop() if store else empty_bytes(size), store))

    def writable(self, buffer: np.ndarray) -> bool:
        """Return True once nothing else uses the buffer's memory."""
        return True

    def array(self, buffer: np.ndarray, form: jax.ShapeDtypeStruct, device: jax.Device) -> jax.Array:
        """Return the received shard as an array that owns `buffer`."""
        shape = form.sharding.shard_shape(form.shape)
        # `jax.device_put` does the same in three times the time.
        return jax.make_array_from_callback(
            shape, sharding_on(form, device), lambda _: buffer.view(form.dtype).reshape(shape)
        )


@dataclass(frozen=True, eq=False)
class DeviceBytes:
    """Memory of a single-device array as bytes; the CUDA array interface has no typestr for bfloat16."""

    array: jax.Array

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """Address and size for mpi4py; marked writable, which the array's own interface is not."""
        address = self.array.unsafe_buffer_pointer()  # type: ignore[attr-defined]
        return {"version": 3, "shape": (self.array.nbytes,), "typestr": "|u1", "data": (address, False)}


class DeviceBuffers:
    """Buffers in device memory, without a copy on either side; the methods are those of `HostBuffers`."""

    # Memory that XLA has just allocated may still be in use by programs started earlier. Buffers are therefore
    # allocated ahead of their use, for each form and device.

    def __init__(self, forms: Sequence[jax.ShapeDtypeStruct], devices: Sequence[jax.Device]):
        self._make: dict[tuple[Any, ...], Callable[[], jax.Array]] = {}
        self._store: dict[tuple[Any, ...], deque[jax.Array]] = defaultdict(deque)
        self._device = devices[0]
        for form in forms:
            for device in devices:
                self._fill(form, device)

    def immediate(self, shards: Sequence[jax.Array]) -> bool:  # noqa: D102
        return False  # the calls of MPI need the device's context, which `enter` gives to one thread

    def enter(self) -> None:
        """Enter the device's CUDA context; without it MPI takes device memory for host memory."""
        if not computes_on_cores(self._device.platform):
            enter_context(self._device.local_hardware_id)

    def prepare(self, shard: jax.Array) -> None:  # noqa: D102
        pass

    def outgoing(self, shard: jax.Array) -> DeviceBytes:  # noqa: D102
        return DeviceBytes(shard)

    def incoming(self, form: jax.ShapeDtypeStruct, device: jax.Device) -> DeviceBytes:  # noqa: D102
        array = self._store[self._key(form, device)].popleft()
        self._fill(form, device)
        return DeviceBytes(array)

    def writable(self, buffer: DeviceBytes) -> bool:  # noqa: D102
        return bool(buffer.array.is_ready())  # type: ignore[attr-defined]

    def array(self, buffer: DeviceBytes, form: jax.ShapeDtypeStruct, device: jax.Device) -> jax.Array:  # noqa: D102
        return buffer.array

    def _key(self, form: jax.ShapeDtypeStruct, device: jax.Device) -> tuple[Any, ...]:
        return form.sharding.shard_shape(form.shape), np.dtype(form.dtype), device

    def _fill(self, form: jax.ShapeDtypeStruct, device: jax.Device) -> None:
        """Allocate the missing buffers of a form."""
        key = shape, dtype, _ = self._key(form, device)
        if key not in self._make:
            # The result of a program: nothing but the store refers to it, so MPI may overwrite it.
            sharding = jax.sharding.SingleDeviceSharding(device)
            self._make[key] = jax.jit(lambda: jnp.zeros(shape, dtype), out_shardings=sharding)
        while len(self._store[key]) < _STORED:
            self._store[key].append(self._make[key]())


def sharding_on(form: jax.ShapeDtypeStruct, device: jax.Device) -> jax.sharding.Sharding:
    """Return the sharding of a device's shard: the form's if there are no others, so that it is the array."""
    return form.sharding if form.sharding.num_devices == 1 else jax.sharding.SingleDeviceSharding(device)


def assembled(form: jax.ShapeDtypeStruct, shards: Sequence[jax.Array]) -> jax.Array:
    """Return the array of this process's shards; one that is laid out as the form says is the array."""
    return shards[0] if shards[0].sharding == form.sharding else rebuild(form, shards)


def choose_buffers(
    forms: Sequence[jax.ShapeDtypeStruct], devices: Sequence[jax.Device], library: str
) -> HostBuffers | DeviceBuffers:
    """Return the buffers to use for messages.

    Args:
        forms: Shapes and layouts of the arrays that arrive.
        devices: Devices of this process.
        library: File whose symbols include MPI's.
    """
    if takes_device_memory(devices, library):
        return DeviceBuffers(forms, devices)
    return HostBuffers(on_cores=all(computes_on_cores(device.platform) for device in devices))


def takes_device_memory(devices: Sequence[jax.Device], library: str, environ: Mapping[str, str] = os.environ) -> bool:
    """Return True if MPI accepts these devices' memory: as `MPI4JAX_USE_CUDA_MPI` says, else as MPI reports.

    Args:
        devices: Devices of this process.
        library: File whose symbols include MPI's.
        environ: Environment variables.
    """
    if not devices or computes_on_cores(devices[0].platform):
        return False
    if answer := environ.get(_USERS_WORD, "").lower():
        return answer in ("1", "true", "on")
    # With several GPUs in the process, not every MPI can tell which of them owns the memory.
    if len(devices) > 1:
        return False
    query = getattr(ctypes.CDLL(library), "MPIX_Query_cuda_support", None)  # an extension that not every MPI has
    return query is not None and bool(query())


def enter_context(ordinal: int) -> None:
    """Make a CUDA device's primary context current in the calling thread, as XLA does in its own threads.

    Raises:
        RuntimeError: CUDA refuses.
    """
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:  # another vendor's device
        return
    device, context = ctypes.c_int(), ctypes.c_void_p()
    failed = (
        cuda.cuDeviceGet(ctypes.byref(device), ordinal)
        or cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
        or cuda.cuCtxSetCurrent(context)
    )
    if failed:
        raise RuntimeError(f"CUDA error {failed} while a channel's thread took the context of device {ordinal}")
