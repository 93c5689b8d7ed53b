"""Channel between processes through mpi4py: nonblocking transfers of host memory, or of device memory."""

import atexit
import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, get_args

import jax

from axonn_jax.core.distributed.shards import local_devices, local_shards, shard_bytes
from axonn_jax.pipe.channels.base import Channel, Deliver, Failed, Ports
from axonn_jax.pipe.channels.buffers import assembled, choose_buffers
from axonn_jax.pipe.channels.send_tracker import SendTracker
from axonn_jax.pipe.channels.tags import Tags
from axonn_jax.pipe.channels.wakeup import Wakeup
from axonn_jax.pipe.schedule.tasks import Direction, Message

if TYPE_CHECKING:
    from mpi4py import MPI

_DRAIN_S = 0.02  # between polls of transfers that a closed channel still waits for


@dataclass(eq=False)
class _Sending:
    """A message being sent, and the buffers that MPI reads."""

    number: int
    message: Message
    shards: list[jax.Array]
    buffers: list[Any] = field(default_factory=list)
    requests: "list[MPI.Request]" = field(default_factory=list)


@dataclass(eq=False)
class _Arriving:
    """A message of which MPI has matched at least one shard."""

    message: Message
    form: jax.ShapeDtypeStruct
    buffers: dict[int, Any] = field(default_factory=dict)
    matched: "dict[int, MPI.Message]" = field(default_factory=dict)  # until their buffers are writable
    requests: "dict[int, MPI.Request]" = field(default_factory=dict)
    arrays: dict[int, jax.Array] = field(default_factory=dict)


class Mpi4pyChannel(Channel):
    """Channel with one progress thread, which receives and completes transfers; each shard is a message to its peer.

    An array that is ready when it is given to `send` leaves from the calling thread, if its memory can be read there.
    Between processes of one host the sender notifies the receiver, so no process polls in vain. Collective over `comm`,
    whose ranks are those of the pipe; `comm` is duplicated once per direction and otherwise unused.
    """

    name: ClassVar[str] = "mpi4py"

    def __init__(self, comm: "MPI.Comm", ports: Ports):
        from mpi4py import MPI

        self._mpi = MPI
        self._ports = ports
        self._devices = {stage: local_devices(form.sharding) for stage, form in ports.arriving.items()}
        directions: tuple[Direction, ...] = ("forward", "backward")
        self._shard_bytes = {way: {n: shard_bytes(f) for n, f in ports.of(way).items()} for way in directions}
        self._size = comm.Get_size()
        self._comms = {direction: comm.Dup() for direction in get_args(Direction)}
        devices = next(iter(self._devices.values()))
        self._buffers = choose_buffers(list(ports.arriving.values()), devices, MPI.__file__)
        # The MPI standard guarantees tags up to 32,767.
        max_tag = comm.Get_attr(MPI.TAG_UB)
        self._tags = Tags(ports.stages, len(devices), 32767 if max_tag is None else int(max_tag))
        self._tracker = SendTracker(self.name)
        self._transfers = threading.Lock()
        """Lock of all MPI calls and of the lists below."""
        self._posted: deque[_Sending] = deque()  # from `send`, without the lock
        self._waiting: list[_Sending] = []  # for their values to be computed
        self._sending: list[_Sending] = []
        self._arriving: list[_Arriving] = []
        self._wakeup = Wakeup()
        self._wakeup.connect(comm, ports)
        self._closing = False
        self._draining = self._abandoned = False
        self._thread: threading.Thread | None = None

    def start(self, deliver: Deliver, failed: Failed) -> None:  # noqa: D102
        self._tracker.open()
        self._thread = threading.Thread(target=self._run, args=(deliver, failed), name="channel-mpi4py", daemon=True)
        atexit.register(self._exit)
        self._thread.start()

    def send(self, message: Message, value: jax.Array) -> None:  # noqa: D102
        self._tags.of(message)
        shards = [value.addressable_data(0)] if value.sharding.num_devices == 1 else local_shards(value)
        immediate = self._buffers.immediate(shards)
        for shard in () if immediate else shards:
            self._buffers.prepare(shard)
        self._posted.append(_Sending(self._tracker.add(message), message, shards))
        if not (immediate and self._send_now()):
            self._wakeup.wake()

    def _send_now(self) -> bool:
        """Send from the calling thread; return False if the progress thread has to."""
        # Waking the thread up takes longer than a small transfer, and both threads would want the interpreter.
        if not self._transfers.acquire(blocking=False):
            return False
        try:
            self._post()
            self._finish_sends()
        finally:
            self._transfers.release()
        # An unfinished send needs the thread only where its receiver could not wake it.
        return not (self._posted or self._waiting or (self._sending and not self._wakeup.notified))

    def busy(self, active: bool) -> None:  # noqa: D102
        self._wakeup.computing(active)

    def unsent(self) -> list[Message]:  # noqa: D102
        return self._tracker.unsent()

    def flush(self, timeout: float) -> None:  # noqa: D102
        self._wakeup.wake()
        self._tracker.flush(timeout)

    def close(self, timeout: float = 5.0) -> bool:  # noqa: D102
        self._tracker.end()
        self._closing = True
        self._wakeup.wake()
        if self._thread is None:
            return True
        self._thread.join(timeout)
        self._draining = True  # the thread owns buffers that MPI may still access, so it has to live on
        if not self._thread.is_alive():
            atexit.unregister(self._exit)
        return not (self._thread.is_alive() or self._sending or self._arriving)

    def free(self) -> None:  # noqa: D102
        for comm in self._comms.values():
            comm.Free()

    def _exit(self) -> None:
        """Keep the progress thread out of MPI while the interpreter exits: a call would crash then."""
        if not self.close(1.0) and self._thread is not None:
            self._abandoned = True
            self._wakeup.wake()
            self._thread.join(1.0)

    def _run(self, deliver: Deliver, failed: Failed) -> None:
        try:
            self._buffers.enter()
            self._progress(deliver)
        except BaseException as error:
            self._tracker.fail(error)
            failed(error)

    def _progress(self, deliver: Deliver) -> None:
        while True:
            with self._transfers:
                # Open MPI looks before it makes progress: what has come since is found by the second call.
                progressed = self._match() or self._match()
                progressed |= bool(self._arriving) and self._finish_receives(deliver)
                progressed |= bool(self._posted or self._waiting) and self._post()
                progressed |= bool(self._sending) and self._finish_sends()
            if progressed:
                self._wakeup.progressed(more=bool(self._sending))
                continue
            transferring = bool(self._sending or self._arriving)
            if self._abandoned or (self._closing and not (transferring or self._waiting or self._posted)):
                return
            if self._draining:
                self._wakeup.wait(_DRAIN_S)
            else:
                self._wakeup.sleep(transferring=bool(self._arriving or self._waiting), sending=bool(self._sending))

    def _post(self) -> bool:
        while self._posted:
            self._waiting.append(self._posted.popleft())
        waiting, self._waiting = self._waiting, []
        # Names whose oldest message has not left. Successive steps use the same names, so those must leave in order.
        blocked: set[Message] = set()
        for sending in waiting:
            if sending.message in blocked or not all(map(_ready, sending.shards)):
                blocked.add(sending.message)
                self._waiting.append(sending)
                continue
            comm = self._comms[sending.message.direction]
            peer = sending.message.stage % self._size
            for index, shard in enumerate(sending.shards):
                buffer = self._buffers.outgoing(shard)
                sending.buffers.append(buffer)
                tag = self._tags.of(sending.message, index)
                sending.requests.append(comm.Isend([buffer, self._mpi.BYTE], peer, tag))
            self._wakeup.notify(peer)
            self._sending.append(sending)
        return len(self._waiting) < len(waiting)

    def _finish_sends(self) -> bool:
        done = [sending for sending in self._sending if all(request.Test() for request in sending.requests)]
        if not done:
            return False
        self._sending = [sending for sending in self._sending if sending not in done]
        for sending in done:
            self._tracker.remove(sending.number)
        return True

    def _match(self) -> bool:
        """Start to receive messages that MPI can match, each shard into new memory, which its array may keep."""
        if self._closing:
            return False
        matched_any = False
        for direction, comm in self._comms.items():
            for matched, status in self._probe(comm):
                matched_any = True
                stage, microbatch, index = self._tags.read(status.Get_tag())
                message = Message(direction, stage, microbatch)
                form = self._ports.form(message)
                expected, received = self._shard_bytes[direction][stage], status.Get_count(self._mpi.BYTE)
                if received != expected:
                    raise ValueError(f"{message}: a shard of {received} bytes came, {expected} are expected")
                arriving = self._open(message, form, index)
                arriving.buffers[index] = self._buffers.incoming(form, self._devices[stage][index])
                arriving.matched[index] = matched
                self._receive(arriving)
                # A transfer that does not complete at once needs MPI calls at the sender too, which may be asleep.
                if index in arriving.matched or not arriving.requests[index].Test():
                    self._wakeup.notify(status.Get_source())
        return matched_any

    def _receive(self, arriving: _Arriving) -> None:
        """Start the receives whose buffers are writable."""
        for index in [index for index in arriving.matched if self._buffers.writable(arriving.buffers[index])]:
            matched = arriving.matched.pop(index)
            arriving.requests[index] = matched.Irecv([arriving.buffers[index], self._mpi.BYTE])

    def _probe(self, comm: "MPI.Comm") -> "Iterator[tuple[MPI.Message, MPI.Status]]":
        status = self._mpi.Status()
        while (matched := comm.Improbe(self._mpi.ANY_SOURCE, self._mpi.ANY_TAG, status)) is not None:
            yield matched, status

    def _open(self, message: Message, form: jax.ShapeDtypeStruct, index: int) -> _Arriving:
        """Return the oldest message of this name that lacks this shard: successive steps use the same names."""
        for arriving in self._arriving:
            if arriving.message == message and index not in arriving.buffers:
                return arriving
        self._arriving.append(_Arriving(message, form))
        return self._arriving[-1]

    def _finish_receives(self, deliver: Deliver) -> bool:
        finished = False
        blocked: set[Message] = set()  # names whose oldest message is not complete: they are delivered in order
        for arriving in list(self._arriving):
            devices = self._devices[arriving.message.stage]
            self._receive(arriving)
            for index in [index for index, request in arriving.requests.items() if request.Test()]:
                del arriving.requests[index]
                arriving.arrays[index] = self._buffers.array(arriving.buffers[index], arriving.form, devices[index])
            if len(arriving.arrays) < len(devices) or arriving.message in blocked:
                blocked.add(arriving.message)
                continue
            finished = True
            self._arriving.remove(arriving)
            if not self._closing:
                shards = [arriving.arrays[index] for index in range(len(devices))]
                deliver(arriving.message, assembled(arriving.form, shards))
        return finished


def _ready(shard: jax.Array) -> bool:
    return bool(shard.is_ready())  # type: ignore[attr-defined]
