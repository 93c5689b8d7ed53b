"""Wakes a channel's thread when there is something to look for, also from another process of the same host.

MPI has no sleeping wait: whoever wants to know of a message looks for it. A look takes a waking thread some 50 us of a
core that computes, and looks every few milliseconds add up to 2 % of it. Who has sent something therefore rings.
"""

import contextlib
import os
import socket
import sys
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal

from axonn_jax.channels.base import Ports

if TYPE_CHECKING:
    from mpi4py import MPI

EARLY_S = 0.02
"""A ring may come so much before its message can be seen."""
_GRAIN_S = 1e-3
_OWN, _PEER = b"o", b"p"


class Bell:
    """Ends one thread's sleep; any thread of this process and any process that knows its `address` may ring it."""

    def __init__(self) -> None:
        self.address: bytes | None = None
        """Where other processes of this host ring; None where they cannot (anywhere but on Linux)."""
        self._ear, self._hand = self._kept(*socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM))
        if sys.platform == "linux":
            # A name without a file: it is gone with the process, and means nothing in another network namespace.
            ear, hand = self._kept(*(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) for _ in range(2)))
            address = b"\0axonn_jax-" + os.urandom(16).hex().encode()
            with contextlib.suppress(OSError):  # not every sandbox has such names
                ear.bind(address)
                self._ear, self._hand, self.address = ear, hand, address

    def _kept(self, *ends: socket.socket) -> Sequence[socket.socket]:
        for end in ends:
            end.setblocking(False)
            # When the interpreter ends a thread may still listen.
            weakref.finalize(self, end.close).atexit = False
        return ends

    def set(self) -> None:
        """Ends the sleep, or the next one if nobody sleeps."""
        _send(self._hand, _OWN, self.address)

    def ring(self, address: bytes) -> bool:
        """Rings another bell, which says that a peer did; returns whether there is one."""
        return _send(self._hand, _PEER, address)

    def wait(self, seconds: float) -> Literal["own", "peer"] | None:
        """Sleeps; returns who rang, None if nobody did."""
        if seconds < _GRAIN_S:  # of a socket's time limit
            time.sleep(seconds)
            seconds = 0.0
        self._ear.settimeout(seconds)
        found = set()
        try:
            while True:
                found.add(self._ear.recv(1))
                self._ear.settimeout(0.0)
        except (TimeoutError, BlockingIOError):
            return "peer" if _PEER in found else "own" if found else None


def exchange(comm: "MPI.Comm", bell: Bell) -> Mapping[int, bytes]:
    """The addresses of all ranks that can ring each other and this one's bell; collective over `comm`."""
    addresses: list[bytes | None] = comm.allgather(bell.address)
    heard = {rank: address for rank, address in enumerate(addresses) if address is not None and bell.ring(address)}
    mutual: list[set[int]] = comm.allgather(set(heard))
    return {rank: address for rank, address in heard.items() if comm.Get_rank() in mutual[rank]}


def from_all_neighbours(addresses: Mapping[int, bytes], ports: Ports, rank_of: Callable[[int], int]) -> bool:
    """Whether every rank that sends to this process's stages can ring, so that nobody need look."""
    beside = (stage + way for stage in ports.arriving for way in (-1, 1))
    return {rank_of(stage) for stage in beside if 0 <= stage < ports.stages} <= addresses.keys()


def _send(hand: socket.socket, what: bytes, address: bytes | None) -> bool:
    try:
        hand.send(what) if address is None else hand.sendto(what, address)
    except BlockingIOError:  # rings that it has not heard yet fill its queue: it will look
        return True
    except OSError:  # nobody has this name, here or any more
        return False
    return True
