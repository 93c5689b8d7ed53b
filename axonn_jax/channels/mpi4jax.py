"""Channel between processes through mpi4jax: blocking transfers of device memory, in threads of its own."""

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

from axonn_jax.backend.traits import computes_on_cores
from axonn_jax.channels.base import Channel, Deliver, Failed, Ports
from axonn_jax.channels.send_tracker import SendTracker
from axonn_jax.channels.wakeup import Wakeup
from axonn_jax.distributed.shards import local_devices, local_shards, rebuild, shard_bytes
from axonn_jax.errors import UserError
from axonn_jax.schedule.tasks import Direction, Message

if TYPE_CHECKING:
    from mpi4py import MPI

_POOL, _LEAST_THREADS = ("PJRT_NPROC", "NPROC"), 2
"""XLA's variables for the threads of its CPU pool, the first before the second; without them it has one a core."""
_Outgoing = tuple[int, Message, list[jax.Array]]


class Mpi4jaxChannel(Channel):
    """Channel with a sender and a receiver thread for each direction, which dispatch mpi4jax's blocking operations.

    jax orders the mpi4jax calls of one thread only, so the four run side by side. A tag is part of a compiled program;
    so the tag of a shard's data is the device's number, the same program serves every message, and a header of 16 bytes
    in front names stage and microbatch. Header and data have a communicator each. The data's communicator is mpi4jax's
    alone, but a receiver looks there (`Iprobe`) before dispatching a receive, which would otherwise spin on a core.
    Between processes of one host who sends a header notifies the receiver.

    On CPU devices a blocked operation occupies a thread of jax's pool, which has one a core. So a process runs one send
    at a time, and receives only arrived messages; else sends both ways could take all threads of all processes, and
    nobody could receive. Raises ``UserError`` where the pool has one thread.

    Collective over `comm`, whose ranks are the pipe's; `comm` is duplicated four times and otherwise unused.
    """

    name: ClassVar[str] = "mpi4jax"

    def __init__(self, comm: "MPI.Comm", ports: Ports):
        check_pool()
        self._tracker = SendTracker(self.name)
        turn = threading.Lock()
        self._directions = {d: _DirectionThreads(d, comm, ports, self._tracker, turn) for d in get_args(Direction)}
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
        atexit.register(self.close, 1.0)  # a thread inside MPI while the interpreter finalises it would crash
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
        self, direction: Direction, comm: "MPI.Comm", ports: Ports, tracker: SendTracker, turn: threading.Lock
    ):
        self.messages: queue.SimpleQueue[_Outgoing | None] = queue.SimpleQueue()
        self._direction, self._ports, self._size, self._tracker = direction, ports, comm.Get_size(), tracker
        self._headers, self._data, self._turn = comm.Dup(), comm.Dup(), turn
        self.wakeup = Wakeup()
        """Wakeup of the receiver thread."""
        self.wakeup.connect(comm, ports)
        self._closing = False

    def free(self) -> None:
        """Free both communicators."""
        self._headers.Free()
        self._data.Free()

    def close(self) -> None:
        """End both threads, unless one is in mpi4jax."""
        self._closing = True
        self.wakeup.wake()
        self.messages.put(None)

    def send_all(self) -> None:
        """Send messages in order until the channel closes."""
        programs: dict[tuple[int, int], Any] = {}
        while (outgoing := self.messages.get()) is not None:
            number, message, shards = outgoing
            # Not before the value is there: the receiver starts to wait for the data once it has the header.
            jax.block_until_ready(shards)
            peer = message.stage % self._size
            self._headers.Send(np.asarray([message.stage, message.microbatch], np.int64), peer)
            self.wakeup.notify(peer)
            with self._turn:
                for index, shard in enumerate(shards):
                    key = (peer, index)
                    programs[key] = programs.get(key) or _sender(self._data, peer, index)
                    programs[key](shard)
                jax.effects_barrier()  # of this thread's calls only
            self._tracker.remove(number)

    def receive_all(self, deliver: Deliver) -> None:
        """Receive and deliver until the channel closes."""
        from mpi4py import MPI

        programs: dict[tuple[int, int, int], Any] = {}
        status = MPI.Status()
        header = np.empty(2, np.int64)
        while self._wait_for(self._headers, MPI.ANY_SOURCE, MPI.ANY_TAG, status, transferring=False):
            source = status.Get_source()
            self._headers.Recv(header, source)
            self.wakeup.found()
            message = Message(self._direction, int(header[0]), int(header[1]))
            form = self._ports.form(message)
            shards = []
            for index, device in enumerate(local_devices(form.sharding)):
                if not self._wait_for(self._data, source, index, status, transferring=True):
                    return
                got, expected = status.Get_count(MPI.BYTE), shard_bytes(form)
                if got != expected:
                    raise ValueError(f"{message}: a shard of {got} bytes came, {expected} are expected")
                key = (source, message.stage, index)
                programs[key] = programs.get(key) or _receiver(self._data, source, index, form, device)
                shards.append(programs[key]())
            jax.block_until_ready(shards)
            deliver(message, rebuild(form, shards))

    def _wait_for(self, comm: "MPI.Comm", source: int, tag: int, status: "MPI.Status", *, transferring: bool) -> bool:
        """Sleep until a message is there to be received; False once the channel closes."""
        self.wakeup.found(more=True)
        while not comm.Iprobe(source, tag, status):
            if self._closing:
                return False
            self.wakeup.sleep(transferring=transferring)
        return True


def pool_threads(environ: Mapping[str, str] = os.environ) -> int:
    """Return the threads of jax's CPU pool in this process, beside those that its devices need; see `widen_pool`."""
    for name in _POOL:
        if (text := environ.get(name, "")).isdecimal():
            return int(text)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def widen_pool(environ: MutableMapping[str, str] = os.environ) -> None:
    """Give jax's CPU pool the two threads that this channel needs; call before jax starts, which fixes their number.

    The pool of a process of one core, as mpirun binds each of two ranks, has one. A number set by the user stays.
    """
    if pool_threads(environ) < _LEAST_THREADS and not any(environ.get(name) for name in _POOL):
        environ[_POOL[-1]] = str(_LEAST_THREADS)


def check_pool() -> None:
    """Raise ``UserError`` if jax's CPU pool has one thread: a blocked send would stop all receives. Starts jax."""
    if not computes_on_cores(jax.default_backend()) or jax.local_device_count() >= _LEAST_THREADS:
        return
    if pool_threads() < _LEAST_THREADS:
        name = next((name for name in _POOL if os.environ.get(name)), _POOL[-1])
        hint = f"{name}={_LEAST_THREADS} in the environment, before jax starts, gives it a second one"
        raise UserError("pipeline.channel", "mpi4jax", f"mpi4py where jax's CPU pool has one thread ({hint})")


def _carrier(dtype: np.dtype) -> np.dtype:
    """Return the carrier of `dtype` through MPI: unsigned integers for short floats, which MPI lacks."""
    return np.dtype(dtype if dtype.itemsize > 2 else f"uint{8 * dtype.itemsize}")


def _sender(comm: "MPI.Comm", peer: int, tag: int) -> Any:
    """Return the compiled send of a shard to rank `peer`."""
    import mpi4jax

    def send(shard: jax.Array) -> None:
        mpi4jax.send(jax.lax.bitcast_convert_type(shard, _carrier(shard.dtype)), peer, tag=tag, comm=comm)

    return jax.jit(send)


def _receiver(comm: "MPI.Comm", source: int, tag: int, form: jax.ShapeDtypeStruct, device: jax.Device) -> Any:
    """Return the compiled receive of a shard of `form` onto `device`."""
    import mpi4jax

    def receive() -> jax.Array:
        like = jnp.zeros(form.sharding.shard_shape(form.shape), _carrier(np.dtype(form.dtype)))
        return jax.lax.bitcast_convert_type(mpi4jax.recv(like, source, tag=tag, comm=comm), form.dtype)

    return jax.jit(receive, out_shardings=jax.sharding.SingleDeviceSharding(device))
