"""Channel between processes through mpi4jax: blocking transfers of device memory, in dedicated threads."""

import atexit
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping, MutableMapping
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, get_args

import jax
import jax.numpy as jnp
import numpy as np

from axonn_jax.core.backend.traits import computes_on_cores
from axonn_jax.core.distributed.shards import local_devices, local_shards, rebuild, shard_bytes
from axonn_jax.core.errors import UserError
from axonn_jax.pipe.channels.base import Channel, Deliver, Failed, Ports
from axonn_jax.pipe.channels.send_tracker import SendTracker
from axonn_jax.pipe.channels.wakeup import Wakeup
from axonn_jax.pipe.schedule.tasks import Direction, Message

if TYPE_CHECKING:
    from mpi4py import MPI

_POOL, _LEAST_THREADS = ("PJRT_NPROC", "NPROC"), 2
"""XLA's variables for the threads of its CPU pool, the first before the second; without them it has one a core."""
_Outgoing = tuple[int, Message, list[jax.Array]]


class Mpi4jaxChannel(Channel):
    """Channel with a sender and a receiver thread for each direction, which dispatch mpi4jax's blocking operations.

    jax orders the mpi4jax calls of one thread only, so the four threads run concurrently. A header of 16 bytes names a
    message's stage and microbatch; the shards of its array follow, on a communicator of their own. Between processes of
    one host the sender of a header notifies the receiver.

    Collective over `comm`, whose ranks are those of the pipe; `comm` is duplicated four times and otherwise unused.

    Raises:
        UserError: jax's CPU pool has a single thread.
    """

    name: ClassVar[str] = "mpi4jax"

    def __init__(self, comm: "MPI.Comm", ports: Ports):
        check_pool()
        self._tracker = SendTracker(self.name)
        # On CPU devices a blocked operation occupies a thread of jax's pool, which has one thread per core. If sends in
        # both directions could take all threads of all processes, nobody could receive: one send at a time.
        send_lock = threading.Lock()
        self._directions = {d: _DirectionThreads(d, comm, ports, self._tracker, send_lock) for d in get_args(Direction)}
        self._threads: list[threading.Thread] = []

    def start(self, deliver: Deliver, failed: Failed) -> None:  # noqa: D102
        self._tracker.open()

        def run(work: Callable[[], None]) -> None:
            try:
                work()
            except BaseException as error:
                if self._tracker.fail(error):
                    self._stop()
                    failed(error)

        for direction, threads in self._directions.items():
            for role, work in (("send", threads.send_all), ("receive", partial(threads.receive_all, deliver))):
                name = f"channel-mpi4jax-{direction}-{role}"
                self._threads.append(threading.Thread(target=run, args=(work,), name=name, daemon=True))
        atexit.register(self.close, 1.0)  # a thread that is inside MPI during finalization would crash
        for thread in self._threads:
            thread.start()

    def send(self, message: Message, value: jax.Array) -> None:  # noqa: D102
        shards = local_shards(value)
        self._directions[message.direction].messages.put((self._tracker.add(message), message, shards))

    def busy(self, active: bool) -> None:  # noqa: D102
        for threads in self._directions.values():
            threads.wakeup.computing(active)

    def unsent(self) -> list[Message]:  # noqa: D102
        return self._tracker.unsent()

    def flush(self, timeout: float) -> None:  # noqa: D102
        self._tracker.flush(timeout)

    def close(self, timeout: float = 5.0) -> bool:  # noqa: D102
        atexit.unregister(self.close)
        self._tracker.end()
        self._stop()
        end = time.monotonic() + timeout
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def free(self) -> None:  # noqa: D102
        for threads in self._directions.values():
            threads.free()

    def _stop(self) -> None:
        for threads in self._directions.values():
            threads.close()


class _DirectionThreads:
    """Sender and receiver thread of one direction, with their communicators and the queue of messages to send."""

    def __init__(
        self, direction: Direction, comm: "MPI.Comm", ports: Ports, tracker: SendTracker, send_lock: threading.Lock
    ):
        self.messages: queue.SimpleQueue[_Outgoing | None] = queue.SimpleQueue()
        self._direction, self._ports, self._size, self._tracker = direction, ports, comm.Get_size(), tracker
        self._headers, self._data, self._send_lock = comm.Dup(), comm.Dup(), send_lock
        self.wakeup = Wakeup()
        """Wakeup of the receiver thread."""
        self.wakeup.connect(comm, ports)
        self._closing = False

    def free(self) -> None:
        self._headers.Free()
        self._data.Free()

    def close(self) -> None:
        """Ask both threads to end; one that is inside mpi4jax does not."""
        self._closing = True
        self.wakeup.wake()
        self.messages.put(None)

    def send_all(self) -> None:
        programs: dict[tuple[int, int], Any] = {}
        while (outgoing := self.messages.get()) is not None:
            number, message, shards = outgoing
            # No header before the value is ready: its receiver starts to wait for the data immediately.
            jax.block_until_ready(shards)
            peer = message.stage % self._size
            self._headers.Send(np.asarray([message.stage, message.microbatch], np.int64), peer)
            self.wakeup.notify(peer)
            with self._send_lock:
                for index, shard in enumerate(shards):
                    key = (peer, index)
                    programs[key] = programs.get(key) or _sender(self._data, peer, index)
                    programs[key](shard)
                jax.effects_barrier()  # waits for this thread's calls only
            self._tracker.remove(number)

    def receive_all(self, deliver: Deliver) -> None:
        from mpi4py import MPI

        programs: dict[tuple[int, int, int], Any] = {}
        status = MPI.Status()
        header = np.empty(2, np.int64)
        while self._wait_for(self._headers, MPI.ANY_SOURCE, MPI.ANY_TAG, status, transferring=False):
            source = status.Get_source()
            self._headers.Recv(header, source)
            self.wakeup.progressed()
            message = Message(self._direction, int(header[0]), int(header[1]))
            form = self._ports.form(message)
            shards = []
            for index, device in enumerate(local_devices(form.sharding)):
                if not self._wait_for(self._data, source, index, status, transferring=True):
                    return
                received, expected = status.Get_count(MPI.BYTE), shard_bytes(form)
                if received != expected:
                    raise ValueError(f"{message}: a shard of {received} bytes came, {expected} are expected")
                # The tag is compiled into the program. As it is the device's number, and not the message's, a stage
                # needs one program per peer and device.
                key = (source, message.stage, index)
                programs[key] = programs.get(key) or _receiver(self._data, source, index, form, device)
                shards.append(programs[key]())
            jax.block_until_ready(shards)
            deliver(message, rebuild(form, shards))

    def _wait_for(self, comm: "MPI.Comm", source: int, tag: int, status: "MPI.Status", *, transferring: bool) -> bool:
        """Sleep until a message can be received; return False once the channel closes."""
        # A receive that is dispatched too early would spin on a core, and hold a thread of jax's pool.
        self.wakeup.progressed(more=True)
        while not comm.Iprobe(source, tag, status):
            if self._closing:
                return False
            self.wakeup.sleep(transferring=transferring)
        return True


def pool_threads(environ: Mapping[str, str] = os.environ) -> int:
    """Return the size of jax's CPU pool in this process, excluding threads that its devices need; see `widen_pool`."""
    for name in _POOL:
        if (text := environ.get(name, "")).isdecimal():
            return int(text)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def widen_pool(environ: MutableMapping[str, str] = os.environ) -> None:
    """Give jax's CPU pool the two threads that this channel needs.

    Call it before jax starts, which fixes the size of the pool. A process bound to one core, as mpirun binds each of
    two ranks, has a pool of one thread. A number set by the user is left alone.
    """
    if pool_threads(environ) < _LEAST_THREADS and not any(environ.get(name) for name in _POOL):
        environ[_POOL[-1]] = str(_LEAST_THREADS)


def check_pool() -> None:
    """Check that jax's CPU pool has a thread for receives while a send is blocked; starts jax.

    Raises:
        UserError: The pool has a single thread.
    """
    if not computes_on_cores(jax.default_backend()) or jax.local_device_count() >= _LEAST_THREADS:
        return
    if pool_threads() < _LEAST_THREADS:
        name = next((name for name in _POOL if os.environ.get(name)), _POOL[-1])
        hint = f"{name}={_LEAST_THREADS} in the environment, before jax starts, gives it a second one"
        raise UserError("pipeline.channel", "mpi4jax", f"mpi4py where jax's CPU pool has one thread ({hint})")


def _carrier(dtype: np.dtype) -> np.dtype:
    # MPI has no types for short floats: they travel as unsigned integers.
    return np.dtype(dtype if dtype.itemsize > 2 else f"uint{8 * dtype.itemsize}")


def _sender(comm: "MPI.Comm", peer: int, tag: int) -> Any:
    import mpi4jax

    def send(shard: jax.Array) -> None:
        mpi4jax.send(jax.lax.bitcast_convert_type(shard, _carrier(shard.dtype)), peer, tag=tag, comm=comm)

    return jax.jit(send)


def _receiver(comm: "MPI.Comm", source: int, tag: int, form: jax.ShapeDtypeStruct, device: jax.Device) -> Any:
    import mpi4jax

    def receive() -> jax.Array:
        template = jnp.zeros(form.sharding.shard_shape(form.shape), _carrier(np.dtype(form.dtype)))
        return jax.lax.bitcast_convert_type(mpi4jax.recv(template, source, tag=tag, comm=comm), form.dtype)

    return jax.jit(receive, out_shardings=jax.sharding.SingleDeviceSharding(device))
