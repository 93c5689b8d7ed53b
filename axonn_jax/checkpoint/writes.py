"""Coordination of writes that fail together, in the event loop in which Orbax runs them."""

import asyncio
import contextlib
import sys

_OTHERS_S = 30
"""So long a write that failed waits for those beside it."""


class Writes:
    """Writes of arrays that fail together: when all have ended, and with the first one's error.

    At the first failure Orbax closes the event loop that the others still report to, and Python would tell of each.
    """

    def __init__(self, arrays: int) -> None:
        self._opening, self._writing = arrays, 0
        self._failure: Exception | None = None
        self._all_ended = asyncio.Event()

    def of_array(self) -> "_ArrayWrites":
        """What limits the writes of one array."""
        return _ArrayWrites(self)

    def opened(self) -> None:
        """Says that an array is about to be written."""
        self._opening -= 1

    async def begin(self) -> None:
        """Begins a write, of which an array has one or more; after a failure it fails too."""
        if self._failure is None:
            self._writing += 1
        else:
            await self._fail(self._failure)

    async def end(self) -> None:
        """Ends a write."""
        self._writing -= 1
        failure = sys.exc_info()[1]
        if isinstance(failure, Exception):
            self._failure = self._failure or failure
            await self._fail(self._failure)
        elif self._failure is not None:
            self._look()

    def _look(self) -> None:
        if not self._opening and not self._writing:
            self._all_ended.set()

    async def _fail(self, failure: Exception) -> None:
        self._look()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_OTHERS_S):
                await self._all_ended.wait()
        raise failure


class _ArrayWrites:
    """Orbax's limiter of bytes under way, used to know of the writes of one array."""

    def __init__(self, writes: Writes) -> None:
        self._writes, self._opened = writes, False

    async def wait_for_bytes(self, requested_bytes: int) -> None:
        """Begins a write."""
        if not self._opened:
            self._opened = True
            self._writes.opened()
        await self._writes.begin()

    async def release_bytes(self, requested_bytes: int) -> None:
        """Ends a write."""
        await self._writes.end()
