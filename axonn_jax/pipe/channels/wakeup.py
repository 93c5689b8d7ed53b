"""Sleep of a channel's thread until it has something to do, which another process of the host may announce.

MPI has no sleeping wait: a receiver must poll for messages. Waking up for one poll costs a computing core some 50 us,
and a poll every few milliseconds adds up to 2 %. Senders therefore notify the receiver.
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

from axonn_jax.pipe.channels.base import Ports

if TYPE_CHECKING:
    from mpi4py import MPI

_EARLY_S = 0.02
"""Seconds by which a notice may precede its message."""
_GRAIN_S = 1e-3


class Wakeup:
    """Interruptible sleep of one thread; any thread of this process, or any process that knows `address`, may end it.

    `connect` lets the peers of a communicator notify each other. Before that, and if some peer cannot (another host, a
    sandbox without sockets), sleeps are short, because messages arrive unannounced.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.address: bytes | None = None
        """Socket address at which other processes of this host notify; None without Linux or sockets."""
        self.peers: Mapping[int, bytes] = {}
        """Addresses of ranks that can notify this one and be notified."""
        self.notified = False
        """True if every sender to this process's stages notifies this process."""
        self._clock, self._since = clock, clock()
        self._notice_pending = False  # by a peer whose message has not been found yet
        self._computing = False
        self._pipe_read, self._pipe_write = os.pipe()
        self._socket: socket.socket | None = None
        self._poll = select.poll()
        for end in (self._pipe_read, self._pipe_write):
            os.set_blocking(end, False)
            self._keep_open(os.close, end)
        self._poll.register(self._pipe_read, select.POLLIN)
        if sys.platform == "linux":
            # An abstract name, without a file: it vanishes with the process, unseen by other network namespaces.
            address = b"\0axonn_jax-" + os.urandom(16).hex().encode()
            with contextlib.suppress(OSError):  # some sandboxes lack abstract names or Unix sockets
                listener = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
                self._keep_open(socket.socket.close, listener)
                listener.setblocking(False)
                listener.bind(address)
                self._poll.register(listener, select.POLLIN)
                self._socket, self.address = listener, address

    def _keep_open(self, close: Callable[[Any], None], end: object) -> None:
        # Not at interpreter exit: a daemon thread may still be polling the descriptor then.
        weakref.finalize(self, close, end).atexit = False

    def connect(self, comm: "MPI.Comm", ports: Ports) -> None:
        """Find out which ranks of `comm` can notify each other; collective over `comm`."""
        # Having an address is not enough: a rank on another host has one too. Only a datagram that gets through counts,
        # and both directions must work.
        addresses: list[bytes | None] = comm.allgather(self.address)
        heard = {rank: address for rank, address in enumerate(addresses) if address is not None and self.send(address)}
        mutual: list[set[int]] = comm.allgather(set(heard))
        self.peers = {rank: address for rank, address in heard.items() if comm.Get_rank() in mutual[rank]}
        neighbours = (stage + step for stage in ports.arriving for step in (-1, 1))
        senders = {stage % comm.Get_size() for stage in neighbours if 0 <= stage < ports.stages}
        self.notified = senders <= self.peers.keys()

    def wake(self) -> None:
        """End the current sleep, or the next one."""
        with contextlib.suppress(BlockingIOError):  # the pipe is full of unread bytes, so the sleep ends anyway
            os.write(self._pipe_write, b"o")

    def notify(self, rank: int) -> None:
        """Tell a rank that a message is on its way; does nothing for ranks that cannot be notified."""
        if rank in self.peers:
            self.send(self.peers[rank])

    def send(self, address: bytes) -> bool:
        """End the sleep of the process at `address`; return False if there is no such process."""
        if self._socket is None:
            return False
        try:
            self._socket.sendto(b"p", address)
        except BlockingIOError:  # its queue is full of unread notices, so it is awake
            return True
        except OSError:  # no process has this name, or none has it any more
            return False
        return True

    def computing(self, active: bool) -> None:
        """Record that the process has begun or stopped computing; see `Channel.busy`."""
        self._computing = active
        if not self.notified:
            self.wake()

    def progressed(self, *, more: bool = False) -> None:
        """Record that polling has found something.

        Args:
            more: True if the message that a peer has announced may still be missing.
        """
        self._notice_pending = self._notice_pending and more
        self._since = self._clock()

    def sleep(self, *, transferring: bool, sending: bool = False) -> None:
        """Sleep until the next poll is due.

        Args:
            transferring: True while a transfer is in progress on which the peer waits for this end.
            sending: True while a send is in progress; if peers notify, it is polled only after the receiver's notice.
        """
        if self.notified:
            sending = sending and self._notice_pending
        soon = self._notice_pending and self._clock() - self._since < _EARLY_S
        if (source := self.wait(self.seconds(transferring=transferring or sending or soon))) is not None:
            self._notice_pending = self._notice_pending or source == "peer"
            self._since = self._clock()

    def seconds(self, *, transferring: bool) -> float:
        """Return the duration of the next sleep in seconds.

        It is a share of the wait so far, which bounds both the cost of polling and the delay that it adds.
        """
        waited = self._clock() - self._since
        # Peers announce their messages: this only covers a notice that was heard before its message could be found.
        if self.notified and not transferring:
            return 20e-3
        if not (self._computing or self.notified):
            return min(1e-3, max(50e-6, waited / 100))
        if transferring:
            return min(1e-3, max(50e-6, waited / 10))
        # A wake-up costs 30 us of compute, and arrivals are not urgent: the channel polls at every start of a program.
        return min(16e-3, max(4e-3, waited / 16))

    def wait(self, seconds: float) -> Literal["own", "peer"] | None:
        """Sleep at most `seconds`.

        Returns:
            "own" if this process ended the sleep, "peer" if another one did, None at the time limit.
        """
        if seconds < _GRAIN_S:  # shorter than `poll` can time
            time.sleep(seconds)
            seconds = 0.0
        ready = {file for file, _ in self._poll.poll(seconds * 1e3)}
        if self._pipe_read in ready:
            os.read(self._pipe_read, 65_536)
        if self._socket is None or ready <= {self._pipe_read}:
            return "own" if ready else None
        with contextlib.suppress(BlockingIOError):
            while True:
                self._socket.recv(1)
        return "peer"
