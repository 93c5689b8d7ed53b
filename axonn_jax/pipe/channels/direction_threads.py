"""Threads of the mpi4jax channel in one direction, and the programs that they dispatch."""

import queue
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from axonn_jax.core.distributed.shards import empty_bytes, host_bytes, local_devices, shard_bytes
from axonn_jax.pipe.channels.base import Deliver, Ports
from axonn_jax.pipe.channels.buffers import HostBuffers, assembled, sharding_on
from axonn_jax.pipe.channels.send_tracker import SendTracker
from axonn_jax.pipe.channels.wakeup import Wakeup
from axonn_jax.pipe.schedule.tasks import Direction, Message

if TYPE_CHECKING:
    from mpi4py import MPI

_WITH_HEADER = 1 << 20
"""Bytes of an array in this process that travel with its header. To start jax's programs takes longer."""
_HEADER = 64
"""Bytes of a header, after which the first shard is aligned as jax wants it."""
_Outgoing = tuple[int, Message, list[jax.Array]]


class DirectionThreads:
    """Sender and receiver thread of one direction, with their communicators and the queue of messages to send."""

    def __init__(
        self, direction: Direction, comm: "MPI.Comm", ports: Ports, tracker: SendTracker, turn: threading.Lock
    ):
        self.messages: queue.SimpleQueue[_Outgoing | None] = queue.SimpleQueue()
        self._direction, self._ports, self._size, self._tracker = direction, ports, comm.Get_size(), tracker
        self._forms = ports.of(direction)
        self._devices = {stage: local_devices(form.sharding) for stage, form in self._forms.items()}
        self._shard_bytes = {stage: shard_bytes(form) for stage, form in self._forms.items()}
        self._large = {
            stage: form
            for stage, form in self._forms.items()
            if self._shard_bytes[stage] * len(self._devices[stage]) > _WITH_HEADER
        }
        self._step = 1 if direction == "forward" else -1
        self._send_programs: dict[tuple[Any, ...], Any] = {}
        self._receive_programs: dict[tuple[int, int], list[Any]] = {}
        self._headers, self._answers, self._data, self._turn = comm.Dup(), comm.Dup(), comm.Dup(), turn
        self.wakeups = {"send": Wakeup(), "receive": Wakeup()}
        """Wakeups of the two threads, each of which notifies the peer's thread of the same name."""
        for wakeup in self.wakeups.values():
            wakeup.connect(comm, ports)
        self._computing = False
        self._closing = self._abandoned = False

    def free(self) -> None:
        """See `Channel.free`."""
        for comm in (self._headers, self._answers, self._data):
            comm.Free()

    def computing(self, active: bool) -> None:
        """See `Channel.busy`."""
        self._computing = active
        for wakeup in self.wakeups.values():
            wakeup.computing(active)

    def close(self) -> None:
        """Ask both threads to end once all messages are sent; one that is inside mpi4jax does not."""
        self._closing = True
        self.wakeups["receive"].wake()
        self.messages.put(None)

    def abandon(self) -> None:
        """Have the sender give up the messages that their receivers do not take."""
        self._abandoned = True
        self.wakeups["send"].wake()

    def send_all(self) -> None:
        """Send the messages of the queue until `close` has put its end there."""
        wakeup = self.wakeups["send"]
        # What a stage sends has the form of what it receives, as a rule. A program that is compiled when it is needed
        # keeps a receiver waiting, for long if its cores are busy.
        for stage, form in self._large.items():
            if 0 <= (receiver := stage + self._step) < self._ports.stages:
                for index, device in enumerate(self._devices[stage]):
                    on_device = jax.sharding.SingleDeviceSharding(device)
                    shape = form.sharding.shard_shape(form.shape)
                    shard = jax.ShapeDtypeStruct(shape, form.dtype, sharding=on_device)
                    self._sender(receiver % self._size, index, shard)
        while (outgoing := self.messages.get()) is not None:
            number, message, shards = outgoing
            jax.block_until_ready(shards)
            peer = message.stage % self._size
            header = np.zeros(_HEADER // 8, np.int64)
            small = sum(shard.nbytes for shard in shards) <= _WITH_HEADER
            header[:4] = message.stage, message.microbatch, shards[0].nbytes, small
            packet = [header.view(np.uint8), *map(host_bytes, shards if small else ())]
            sends = [] if small else [self._sender(peer, index, shard) for index, shard in enumerate(shards)]
            request = self._headers.Isend(np.concatenate(packet), peer)
            self.wakeups["receive"].notify(peer)
            if not self._wait_for(wakeup, self._answers, peer, lambda: self._abandoned, urgent=not wakeup.notified):
                return
            sent = [send(shard) for send, shard in zip(sends, shards, strict=not small)]  # at once: the receiver waits
            self._answers.Recv(np.empty(0, np.uint8), peer)
            request.Wait()
            jax.block_until_ready(sent)
            self._tracker.remove(number)

    def receive_all(self, deliver: Deliver) -> None:
        """Receive messages until `close`."""
        from mpi4py import MPI

        wakeup, buffers, status = self.wakeups["receive"], HostBuffers(), MPI.Status()
        for stage in self._large:
            if 0 <= (sender := stage - self._step) < self._ports.stages:
                self._receivers(sender % self._size, stage)

        def closing() -> bool:
            return self._closing

        while self._wait_for(wakeup, self._headers, MPI.ANY_SOURCE, closing, status, urgent=False):
            packet, source = empty_bytes(status.Get_count(MPI.BYTE)), status.Get_source()
            self._headers.Recv(packet, source)
            stage, microbatch, received, small = map(int, packet[:_HEADER].view(np.int64)[:4])
            message = Message(self._direction, stage, microbatch)
            try:
                form = self._ports.form(message)
                devices, expected = self._devices[stage], self._shard_bytes[stage]
                if received != expected:
                    raise ValueError(f"{message}: a shard of {received} bytes came, {expected} are expected")
                if small:
                    parts = packet[_HEADER:].reshape(len(devices), expected)
                    shards = [buffers.array(part, form, device) for part, device in zip(parts, devices, strict=True)]
                    deliver(message, assembled(form, shards))
            finally:  # even if it is of no use here, it has left the sender
                if small:
                    self._answer(source)
            if small:
                continue
            receives = self._receivers(source, stage)
            with self._turn:
                self._answer(source)
                # A receive that is dispatched too early would spin on a core, and hold a thread of jax's pool.
                if not self._wait_for(wakeup, self._data, source, closing, status, urgent=True):
                    return
                shards = [receive() for receive in receives]
                jax.block_until_ready(shards)
            deliver(message, assembled(form, shards))

    def _sender(self, peer: int, index: int, shard: jax.Array | jax.ShapeDtypeStruct) -> Any:
        key = (peer, index, shard.shape, shard.dtype, shard.sharding)
        if key not in self._send_programs:
            self._send_programs[key] = _sender(self._data, peer, index, shard)
        return self._send_programs[key]

    def _receivers(self, source: int, stage: int) -> list[Any]:
        # The tag is compiled into the program. As it is the device's number, and not the message's, a stage needs one
        # program per peer and device.
        if (source, stage) not in self._receive_programs:
            form, devices = self._forms[stage], self._devices[stage]
            self._receive_programs[source, stage] = [
                _receiver(self._data, source, index, form, device) for index, device in enumerate(devices)
            ]
        return self._receive_programs[source, stage]

    def _answer(self, source: int) -> None:
        self._answers.Send(np.empty(0, np.uint8), source)
        self.wakeups["send"].notify(source)

    def _wait_for(
        self,
        wakeup: Wakeup,
        comm: "MPI.Comm",
        source: int,
        ended: Callable[[], bool],
        status: "MPI.Status | None" = None,
        *,
        urgent: bool,
    ) -> bool:
        """Sleep until a message can be received; return False if it ends before."""
        wakeup.progressed(more=True)
        # Open MPI looks before it makes progress: what has come since is found by the second call.
        while not (comm.Iprobe(source, status=status) or comm.Iprobe(source, status=status)):
            if ended():
                return False
            wakeup.sleep(transferring=urgent)
        wakeup.progressed()
        return True


def _carrier(dtype: np.dtype) -> np.dtype:
    # MPI has no types for short floats: they travel as unsigned integers.
    return np.dtype(dtype if dtype.itemsize > 2 else f"uint{8 * dtype.itemsize}")


def _sender(comm: "MPI.Comm", peer: int, tag: int, like: jax.Array | jax.ShapeDtypeStruct) -> Any:
    """Compile a program that sends an array like this one, and whose result is ready once it is sent."""
    import mpi4jax

    def send(shard: jax.Array) -> jax.Array:
        mpi4jax.send(jax.lax.bitcast_convert_type(shard, _carrier(shard.dtype)), peer, tag=tag, comm=comm)
        # Waiting for it takes a third of the time of `jax.effects_barrier`, after which jax makes tokens anew.
        return jnp.zeros(())

    program = jax.jit(send)
    program.lower(like).compile()  # which calls of `program` use
    return program


def _receiver(comm: "MPI.Comm", source: int, tag: int, form: jax.ShapeDtypeStruct, device: jax.Device) -> Any:
    """Compile a program that receives a device's shard of an array."""
    import mpi4jax

    def receive() -> jax.Array:
        template = jnp.zeros(form.sharding.shard_shape(form.shape), _carrier(np.dtype(form.dtype)))
        return jax.lax.bitcast_convert_type(mpi4jax.recv(template, source, tag=tag, comm=comm), form.dtype)

    program = jax.jit(receive, out_shardings=sharding_on(form, device))
    program.lower().compile()
    return program
