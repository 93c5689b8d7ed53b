"""Between processes through mpi4py: nonblocking, from and into host memory, or the devices' own."""

import atexit
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import jax

from axonn_jax.channels.base import Channel, Deliver, Failed, Pause, Ports
from axonn_jax.channels.bell import EARLY_S, Bell, exchange, from_all_neighbours
from axonn_jax.channels.buffers import choose_buffers
from axonn_jax.channels.outbox import Outbox
from axonn_jax.channels.shards import Tags, local_devices, local_shards, rebuild, shard_bytes
from axonn_jax.schedule.tasks import Direction, Message

if TYPE_CHECKING:
    from mpi4py import MPI

_DRAIN_S = 0.02  # between looks at transfers that a closed channel still waits for
_DIRECTIONS: tuple[Direction, Direction] = ("forward", "backward")


@dataclass(eq=False)
class _Sending:
    """A message on its way out, and the buffers MPI reads."""

    number: int
    message: Message
    shards: list[jax.Array]
    buffers: list[Any] = field(default_factory=list)
    requests: "list[MPI.Request]" = field(default_factory=list)


@dataclass(eq=False)
class _Arriving:
    """A message of which at least one shard has been matched."""

    message: Message
    form: jax.ShapeDtypeStruct
    buffers: dict[int, Any] = field(default_factory=dict)
    matched: "dict[int, MPI.Message]" = field(default_factory=dict)  # until their buffers are free to be written
    requests: "dict[int, MPI.Request]" = field(default_factory=dict)
    arrays: dict[int, jax.Array] = field(default_factory=dict)


class Mpi4pyChannel(Channel):
    """One progress thread makes all MPI calls; each shard is one message to the process at the same place.

    Between processes of one host who sends rings the receiver's bell, so that nobody has to look for what is not there.
    Collective over `comm`, whose ranks are the pipe's places: it is duplicated once a direction and not used otherwise.
    `rank_of_stage` gives the rank a virtual stage lives on, by default `stage % comm.Get_size()`.
    """

    name: ClassVar[str] = "mpi4py"

    def __init__(self, comm: "MPI.Comm", ports: Ports, rank_of_stage: Callable[[int], int] | None = None):
        from mpi4py import MPI

        self._mpi = MPI
        self._ports = ports
        self._devices = {stage: local_devices(form.sharding) for stage, form in ports.arriving.items()}
        size = comm.Get_size()
        self._rank_of = rank_of_stage or (lambda stage: stage % size)
        self._comms = {direction: comm.Dup() for direction in _DIRECTIONS}
        devices = next(iter(self._devices.values()))
        self._buffers = choose_buffers(list(ports.arriving.values()), devices, MPI.__file__)
        largest = comm.Get_attr(MPI.TAG_UB)
        self._tags = Tags(ports.stages, len(devices), 32767 if largest is None else int(largest))
        self._outbox = Outbox(self.name)
        self._posted: deque[_Sending] = deque()  # by send, for the thread
        self._waiting: list[_Sending] = []  # for their values
        self._sending: list[_Sending] = []
        self._arriving: list[_Arriving] = []
        self._bell = Bell()
        self._peers = exchange(comm, self._bell)
        self._rung = from_all_neighbours(self._peers, ports, self._rank_of)
        self._called = False  # by a peer, and not yet found what for
        self._busy = False
        self._closing = False
        self._draining = self._abandoned = False
        self._thread: threading.Thread | None = None

    def start(self, deliver: Deliver, failed: Failed) -> None:  # noqa: D102
        self._outbox.open()
        self._thread = threading.Thread(target=self._run, args=(deliver, failed), name="channel-mpi4py", daemon=True)
        atexit.register(self._exit)
        self._thread.start()

    def send(self, message: Message, value: jax.Array) -> None:  # noqa: D102
        self._tags.of(message)
        shards = local_shards(value)
        for shard in shards:
            self._buffers.prepare(shard)
        self._posted.append(_Sending(self._outbox.add(message), message, shards))
        self._bell.set()

    def busy(self, active: bool) -> None:  # noqa: D102
        self._busy = active
        if not self._rung:
            self._bell.set()

    def unsent(self) -> list[Message]:  # noqa: D102
        return self._outbox.unsent()

    def flush(self, timeout: float) -> None:  # noqa: D102
        self._outbox.flush(timeout)

    def close(self, timeout: float = 5.0) -> bool:  # noqa: D102
        self._outbox.end()
        self._closing = True
        self._bell.set()
        if self._thread is None:
            return True
        self._thread.join(timeout)
        self._draining = True  # the thread holds the buffers that MPI may still touch, and so has to live on
        if not self._thread.is_alive():
            atexit.unregister(self._exit)
        return not (self._thread.is_alive() or self._sending or self._arriving)

    def free(self) -> None:  # noqa: D102
        for comm in self._comms.values():
            comm.Free()

    def _exit(self) -> None:
        """Keeps the thread out of MPI when the interpreter ends it: that would crash."""
        if not self.close(1.0) and self._thread is not None:
            self._abandoned = True
            self._bell.set()
            self._thread.join(1.0)

    def _run(self, deliver: Deliver, failed: Failed) -> None:
        try:
            self._buffers.enter()
            self._progress(deliver)
        except BaseException as error:
            self._outbox.fail(error)
            failed(error)

    def _progress(self, deliver: Deliver) -> None:
        pause = Pause()
        while True:
            found = bool(self._posted or self._waiting) and self._post()
            found |= bool(self._sending) and self._finish_sends()
            found |= self._match()
            found |= bool(self._arriving) and self._finish_receives(deliver)
            if found:
                self._called = self._called and bool(self._sending)
                pause.restart()
                continue
            transferring = bool(self._sending or self._arriving)
            if self._abandoned or (self._closing and not (transferring or self._waiting or self._posted)):
                return
            if self._rung:  # a send that nobody has called for waits for its receiver, and so may this thread
                called = self._called and (bool(self._sending) or pause.waited() < EARLY_S)
                transferring = called or bool(self._arriving or self._waiting)
            waiting = pause.seconds(busy=self._busy, transferring=transferring, rung=self._rung)
            who = self._bell.wait(_DRAIN_S if self._draining else waiting)
            if who is not None:
                self._called = self._called or who == "peer"
                pause.restart()

    def _post(self) -> bool:
        """Starts the sends whose values are ready."""
        while self._posted:
            self._waiting.append(self._posted.popleft())
        waiting, self._waiting = self._waiting, []
        held: set[Message] = set()  # messages of which an older one of the same name has not left
        for sending in waiting:
            if sending.message in held or not all(map(_ready, sending.shards)):
                held.add(sending.message)
                self._waiting.append(sending)
                continue
            comm = self._comms[sending.message.direction]
            peer = self._rank_of(sending.message.stage)
            for place, shard in enumerate(sending.shards):
                sent = self._buffers.outgoing(shard)
                sending.buffers.append(sent)
                tag = self._tags.of(sending.message, place)
                sending.requests.append(comm.Isend([sent, self._mpi.BYTE], peer, tag))
            self._ring(peer)
            self._sending.append(sending)
        return len(self._waiting) < len(waiting)

    def _finish_sends(self) -> bool:
        done = [sending for sending in self._sending if all(request.Test() for request in sending.requests)]
        if not done:
            return False
        self._sending = [sending for sending in self._sending if sending not in done]
        for sending in done:
            self._outbox.remove(sending.number)
        return True

    def _match(self) -> bool:
        """Takes up what has come, each shard into fresh memory: the array made of it may be that memory."""
        if self._closing:
            return False
        found = False
        for direction, comm in self._comms.items():
            for matched, status in self._probe(comm):
                found = True
                stage, microbatch, place = self._tags.read(status.Get_tag())
                message = Message(direction, stage, microbatch)
                form = self._ports.form(message)
                expected, got = shard_bytes(form), status.Get_count(self._mpi.BYTE)
                if got != expected:
                    raise ValueError(f"{message}: a shard of {got} bytes came, {expected} are expected")
                arriving = self._open(message, form, place)
                arriving.buffers[place] = self._buffers.incoming(form, self._devices[stage][place])
                arriving.matched[place] = matched
                self._receive(arriving)
                if place in arriving.matched or not arriving.requests[place].Test():
                    self._ring(status.Get_source())  # who may have to go on with it
        return found

    def _receive(self, arriving: _Arriving) -> None:
        """Starts the receives whose buffers are free."""
        for place in [place for place in arriving.matched if self._buffers.writable(arriving.buffers[place])]:
            matched = arriving.matched.pop(place)
            arriving.requests[place] = matched.Irecv([arriving.buffers[place], self._mpi.BYTE])

    def _ring(self, peer: int) -> None:
        if peer in self._peers:
            self._bell.ring(self._peers[peer])

    def _probe(self, comm: "MPI.Comm") -> "Iterator[tuple[MPI.Message, MPI.Status]]":
        status = self._mpi.Status()
        while (matched := comm.Improbe(self._mpi.ANY_SOURCE, self._mpi.ANY_TAG, status)) is not None:
            yield matched, status

    def _open(self, message: Message, form: jax.ShapeDtypeStruct, place: int) -> _Arriving:
        """The oldest message of this name that lacks this shard: successive steps use the same names."""
        for arriving in self._arriving:
            if arriving.message == message and place not in arriving.buffers:
                return arriving
        self._arriving.append(_Arriving(message, form))
        return self._arriving[-1]

    def _finish_receives(self, deliver: Deliver) -> bool:
        found = False
        held: set[Message] = set()  # messages of which an older one of the same name is not complete
        for arriving in list(self._arriving):
            devices = self._devices[arriving.message.stage]
            self._receive(arriving)
            for place in [place for place, request in arriving.requests.items() if request.Test()]:
                del arriving.requests[place]
                arriving.arrays[place] = self._buffers.array(arriving.buffers[place], arriving.form, devices[place])
            if len(arriving.arrays) < len(devices) or arriving.message in held:
                held.add(arriving.message)
                continue
            found = True
            self._arriving.remove(arriving)
            if not self._closing:
                value = rebuild(arriving.form, [arriving.arrays[place] for place in range(len(devices))])
                deliver(arriving.message, value)
        return found


def _ready(shard: jax.Array) -> bool:
    return bool(shard.is_ready())  # type: ignore[attr-defined]
