"""Channel between processes through mpi4jax: blocking transfers of device memory, in dedicated threads."""

import atexit
import os
import threading
import time
from collections.abc import Callable, Mapping, MutableMapping
from functools import partial
from typing import TYPE_CHECKING, ClassVar, get_args

import jax

from axonn_jax.core.backend.traits import computes_on_cores
from axonn_jax.core.distributed.shards import local_shards
from axonn_jax.core.errors import UserError
from axonn_jax.pipe.channels.base import Channel, Deliver, Failed, Ports
from axonn_jax.pipe.channels.direction_threads import DirectionThreads
from axonn_jax.pipe.channels.send_tracker import SendTracker
from axonn_jax.pipe.schedule.tasks import Direction, Message

if TYPE_CHECKING:
    from mpi4py import MPI

_POOL, _LEAST_THREADS = ("PJRT_NPROC", "NPROC"), 2
"""XLA's variables for the threads of its CPU pool, the first before the second; without them it has one a core."""


class Mpi4jaxChannel(Channel):
    """Channel with a sender and a receiver thread for each direction, which dispatch mpi4jax's blocking operations.

    jax orders the mpi4jax calls of one thread only, so the four threads run concurrently. A header names a message and
    the size of its shards, and small shards come with it. Its receiver answers once it has those, or is about to
    receive, and only then the sender sends: a peer that computes, or is stopped, holds up nothing but its own messages.
    Between processes of one host the sender of a header or an answer notifies the other.

    Collective over `comm`, whose ranks are those of the pipe; `comm` is duplicated six times and otherwise unused.

    Raises:
        UserError: jax's CPU pool has a single thread.
    """

    name: ClassVar[str] = "mpi4jax"

    def __init__(self, comm: "MPI.Comm", ports: Ports):
        check_pool()
        self._tracker = SendTracker(self.name)
        # On CPU devices a blocked operation occupies a thread of jax's pool, which has one thread per core. A process
        # answers one header at a time. Then there are at most as many sends as processes, and each to another one:
        # they cannot take all threads, two or more, of every process that is to receive them.
        turn = threading.Lock()
        self._directions = {d: DirectionThreads(d, comm, ports, self._tracker, turn) for d in get_args(Direction)}
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
            threads.computing(active)

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
        for threads in self._directions.values():
            threads.abandon()
        for thread in self._threads:
            thread.join(0.1)  # out of MPI, which may end now
        return not (any(thread.is_alive() for thread in self._threads) or self._tracker.unsent())

    def free(self) -> None:  # noqa: D102
        for threads in self._directions.values():
            threads.free()

    def _stop(self) -> None:
        for threads in self._directions.values():
            threads.close()


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
