"""Background work in bursts with rests between them, so that training keeps the cores that it computes on."""

import asyncio
import threading
import time
from collections import deque

SHARE = 0.04
"""Of the time. It leaves something of the tenth by which steps may get longer to the copying before."""
_LONGEST_S = 600
"""After so long a save takes what it needs: it holds memory, and other processes of its world may wait for it."""


class Pace:
    """How much of the time background work may take, until somebody waits for it."""

    def __init__(self) -> None:
        self.share, self._end = 1.0, 0.0
        self._hurried = threading.Event()

    def begin(self, share: float) -> None:
        """Sets the share of the time for what follows; 1: all of it."""
        self.share, self._end = share, time.monotonic() + _LONGEST_S
        self._hurried.clear()

    def hurry(self) -> None:
        """Ends the rest under way and all later ones, up to the next `begin`."""
        self._hurried.set()

    def rest(self, worked: float) -> None:
        """Waits for as long as `worked` seconds of work cost; to be called on the thread that works."""
        pause = min(worked * (1 / self.share - 1), self._end - time.monotonic())
        if pause > 0:
            self._hurried.wait(pause)


class Lots:
    """Orbax's limiter of the bytes that are being written: a lot at a time, and a rest after each.

    An array that alone is larger than a lot is a lot of its own. Its methods run on one event loop.
    """

    def __init__(self, size: int, pace: Pace):
        self._size, self._pace = size, pace
        self._admitted = self._writing = 0
        self._began = 0.0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def wait_for_bytes(self, requested_bytes: int) -> None:
        """Returns when so many bytes may be written."""
        self._loop = asyncio.get_running_loop()
        if self._fits(requested_bytes) and not self._waiting:
            return self._admit(requested_bytes)
        turn = self._loop.create_future()
        self._waiting.append((requested_bytes, turn))
        return await turn  # whoever ends the lot before admits it

    async def release_bytes(self, requested_bytes: int) -> None:
        """Tells that they are written; the last of a lot rests, and admits the next."""
        self._writing -= 1
        if self._writing or self._loop is None or self._loop.is_closed():
            return  # closed: another write has failed, and nobody waits for this one any more
        self._pace.rest(time.monotonic() - self._began)
        self._admitted = 0
        while self._waiting and self._fits(self._waiting[0][0]):
            size, turn = self._waiting.popleft()
            self._admit(size)
            turn.set_result(None)

    def _fits(self, size: int) -> bool:
        return not self._admitted or self._admitted + size <= self._size

    def _admit(self, size: int) -> None:
        if not self._writing:
            self._began = time.monotonic()
        self._admitted += size
        self._writing += 1
