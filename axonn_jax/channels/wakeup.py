"""Sleep of a channel's thread until there is something to look for, also from another process of the same host.

MPI has no sleeping wait: a receiver has to look for messages. A look takes a waking thread some 50 us of a computing
core, and looks every few milliseconds add up to 2 %. So a sender notifies the receiver.
"""

import contextlib
import os
import select
import socket
import sys
import time
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal

from axonn_jax.channels.base import Ports

if TYPE_CHECKING:
    from mpi4py import MPI

_EARLY_S = 0.02
"""Seconds by which a notice may precede its message."""
_GRAIN_S = 1e-3


class Wakeup:
    """Sleep of one thread; any thread of this process, or any process with `address`, may end the sleep.

    `connect` lets the peers of a communicator notify each other. Until then, and where some peer cannot (another host,
    a sandbox without sockets), sleeps are short, as nobody announces messages.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.address: bytes | None = None
        """Socket address at which other processes of this host notify; None without Linux or sockets."""
        self.peers: Mapping[int, bytes] = {}
        """Addresses of ranks that can notify this one and be notified."""
        self.notified = False
        """True if every sender to this process's stages notifies this process."""
        self._clock, self._since = clock, clock()
        self._called = False  # by a peer, whose message is not found yet
        self._computing = False
        self._own, self._hand = os.pipe()
        self._ear: socket.socket | None = None
        self._sleep = select.poll()
        for end in (self._own, self._hand):
            os.set_blocking(end, False)
            self._keep_open(os.close, end)
        self._sleep.register(self._own, select.POLLIN)
        if sys.platform == "linux":
            # A name without a file: it is gone with the process, and means nothing in another network namespace.
            address = b"\0axonn_jax-" + os.urandom(16).hex().encode()
            with contextlib.suppress(OSError):  # not every sandbox has such names, or such sockets
                ear = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
                self._keep_open(socket.socket.close, ear)
                ear.setblocking(False)
                ear.bind(address)
                self._sleep.register(ear, select.POLLIN)
                self._ear, self.address = ear, address

    def _keep_open(self, close: Callable[[Any], None], end: object) -> None:
        # When the interpreter ends a thread may still listen.
        weakref.finalize(self, close, end).atexit = False

    def connect(self, comm: "MPI.Comm", ports: Ports) -> None:
        """Find out which ranks of `comm` can notify each other; collective over `comm`."""
        addresses: list[bytes | None] = comm.allgather(self.address)
        heard = {rank: address for rank, address in enumerate(addresses) if address is not None and self.send(address)}
        mutual: list[set[int]] = comm.allgather(set(heard))
        self.peers = {rank: address for rank, address in heard.items() if comm.Get_rank() in mutual[rank]}
        neighbours = (stage + way for stage in ports.arriving for way in (-1, 1))
        senders = {stage % comm.Get_size() for stage in neighbours if 0 <= stage < ports.stages}
        self.notified = senders <= self.peers.keys()

    def wake(self) -> None:
        """End the sleep, or the next one if nobody sleeps."""
        with contextlib.suppress(BlockingIOError):  # full of unread bytes, so the sleep ends anyway
            os.write(self._hand, b"o")

    def notify(self, rank: int) -> None:
        """Notify a rank with an address on this host of a message."""
        if rank in self.peers:
            self.send(self.peers[rank])

    def send(self, address: bytes) -> bool:
        """End the sleep of the process at `address`; return False if nobody has that address."""
        if self._ear is None:
            return False
        try:
            self._ear.sendto(b"p", address)
        except BlockingIOError:  # unread notices fill its queue, so it is awake
            return True
        except OSError:  # nobody has this name, here or any more
            return False
        return True

    def computing(self, active: bool) -> None:
        """Record that the process has begun or stopped computing; see `Channel.busy`."""
        self._computing = active
        if not self.notified:
            self.wake()

    def found(self, *, more: bool = False) -> None:
        """Record that a look has found something; `more`: the message behind a peer's notice may still be to come."""
        self._called = self._called and more
        self._since = self._clock()

    def sleep(self, *, transferring: bool, sending: bool = False) -> None:
        """Sleep until the next look is due.

        `transferring`: a transfer is under way, and the peer waits for this end. `sending`: a send is under way, which
        needs looks only after the receiver's notice.
        """
        if self.notified:
            sending = sending and self._called
        soon = self._called and self._clock() - self._since < _EARLY_S
        if (who := self.wait(self.seconds(transferring=transferring or sending or soon))) is not None:
            self._called = self._called or who == "peer"
            self._since = self._clock()

    def seconds(self, *, transferring: bool) -> float:
        """Return the next sleep in seconds: a share of the wait so far, which bounds cost and delay.

        Idle: a hundredth of the wait, from 50 us to 1 ms. Beside a computation a wake-up costs 30 us of compute, and
        arrivals are not urgent, as the channel looks whenever a program has been started: a sixteenth, from 4 ms to 16
        ms; but a tenth, from 50 us to 1 ms, while a transfer is under way. Where peers notify: 20 ms, in case a notice
        preceded the message, and the tenth for transfers.
        """
        waited = self._clock() - self._since
        if self.notified and not transferring:
            return 20e-3
        if not (self._computing or self.notified):
            return min(1e-3, max(50e-6, waited / 100))
        if transferring:
            return min(1e-3, max(50e-6, waited / 10))
        return min(16e-3, max(4e-3, waited / 16))

    def wait(self, seconds: float) -> Literal["own", "peer"] | None:
        """Sleep at most `seconds`; return the origin of the wake-up, None at the time limit."""
        if seconds < _GRAIN_S:  # of a time limit
            time.sleep(seconds)
            seconds = 0.0
        ready = {file for file, _ in self._sleep.poll(seconds * 1e3)}
        if self._own in ready:
            os.read(self._own, 65_536)
        if self._ear is None or ready <= {self._own}:
            return "own" if ready else None
        with contextlib.suppress(BlockingIOError):
            while True:
                self._ear.recv(1)
        return "peer"
