"""Wakes a channel's thread when there is something to look for, also from another process of the same host.

MPI has no sleeping wait: whoever wants to know of a message looks for it. A look takes a waking thread some 50 us of a
core that computes, and looks every few milliseconds add up to 2 % of it. Who has sent something therefore rings.
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

EARLY_S = 0.02
"""A ring may come so much before its message can be seen."""
_GRAIN_S = 1e-3


class Bell:
    """Ends one thread's sleep; any thread of this process and any process that knows its `address` may ring it."""

    def __init__(self) -> None:
        self.address: bytes | None = None
        """Where other processes of this host ring; None where they cannot (no Linux, or a sandbox without sockets)."""
        self._own, self._hand = os.pipe()
        self._ear: socket.socket | None = None
        self._sleep = select.poll()
        for end in (self._own, self._hand):
            os.set_blocking(end, False)
            self._kept(os.close, end)
        self._sleep.register(self._own, select.POLLIN)
        if sys.platform == "linux":
            # A name without a file: it is gone with the process, and means nothing in another network namespace.
            address = b"\0axonn_jax-" + os.urandom(16).hex().encode()
            with contextlib.suppress(OSError):  # not every sandbox has such names, or such sockets
                ear = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
                self._kept(socket.socket.close, ear)
                ear.setblocking(False)
                ear.bind(address)
                self._sleep.register(ear, select.POLLIN)
                self._ear, self.address = ear, address

    def _kept(self, close: Callable[[Any], None], end: object) -> None:
        # When the interpreter ends a thread may still listen.
        weakref.finalize(self, close, end).atexit = False

    def set(self) -> None:
        """Ends the sleep, or the next one if nobody sleeps."""
        with contextlib.suppress(BlockingIOError):  # full of rings that it has not heard yet: it will look
            os.write(self._hand, b"o")

    def ring(self, address: bytes) -> bool:
        """Rings another bell, which says that a peer did; returns whether there is one."""
        if self._ear is None:
            return False
        try:
            self._ear.sendto(b"p", address)
        except BlockingIOError:  # rings that it has not heard yet fill its queue: it will look
            return True
        except OSError:  # nobody has this name, here or any more
            return False
        return True

    def wait(self, seconds: float) -> Literal["own", "peer"] | None:
        """Sleeps; returns who rang, None if nobody did."""
        if seconds < _GRAIN_S:  # of a time limit
            time.sleep(seconds)
            seconds = 0.0
        rang = {file for file, _ in self._sleep.poll(seconds * 1e3)}
        if self._own in rang:
            os.read(self._own, 65_536)
        if self._ear is None or rang <= {self._own}:
            return "own" if rang else None
        with contextlib.suppress(BlockingIOError):
            while True:
                self._ear.recv(1)
        return "peer"


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
