"""Record of a channel's unsent messages and first error, shared by the channel's threads and its caller."""

import itertools
import threading

from axonn_jax.core.errors import first_of
from axonn_jax.core.terminal import counted
from axonn_jax.pipe.channels.base import ChannelClosed
from axonn_jax.pipe.schedule.tasks import Message


class SendTracker:
    """Unsent messages of a channel and its first error; thread-safe."""

    def __init__(self, name: str):
        self._name = name
        self._changed = threading.Condition()
        self._unsent: dict[int, Message] = {}
        self._numbers = itertools.count()
        self._open = False
        self._ended = False
        self._error: BaseException | None = None

    def open(self) -> None:
        """Accept messages from now on.

        Raises:
            ChannelClosed: The tracker was opened before, or has ended.
        """
        with self._changed:
            if self._open or self._ended:
                raise ChannelClosed(f"{self._name} channel: started twice, or after close")
            self._open = True

    def end(self) -> None:
        """Accept no more messages."""
        with self._changed:
            self._open, self._ended = False, True

    def fail(self, error: BaseException) -> bool:
        """Record an exception that broke the channel; return True if it is the first one."""
        with self._changed:
            first = self._error is None
            if first:
                self._error = error
            self._changed.notify_all()
        return first

    def add(self, message: Message) -> int:
        """Record a message to send and return its number.

        Raises:
            ChannelClosed: The channel is not running.
        """
        with self._changed:
            if not self._open or self._error is not None:
                raise ChannelClosed(f"{self._name} channel: not running, so no {message}") from self._error
            number = next(self._numbers)
            self._unsent[number] = message
        return number

    def remove(self, number: int) -> None:
        """Record a message as sent."""
        with self._changed:
            del self._unsent[number]
            self._changed.notify_all()

    def unsent(self) -> list[Message]:
        """Return the unsent messages, oldest first."""
        with self._changed:
            return list(self._unsent.values())

    def flush(self, timeout: float) -> None:
        """Wait until every message has left; see `Channel.flush`."""
        with self._changed:
            done = self._changed.wait_for(lambda: not self._unsent or self._error is not None, timeout)
            remaining = list(self._unsent.values())
        if self._error is not None:
            unsent = f"{counted(len(remaining), 'message')} unsent"
            raise ChannelClosed(f"{self._name} channel: failed, {unsent}") from self._error
        if not done:
            reason = f"not taken by their receivers within {timeout:g} s: {first_of(remaining, '; ')}"
            raise TimeoutError(f"{self._name} channel: {counted(len(remaining), 'message')} {reason}")
