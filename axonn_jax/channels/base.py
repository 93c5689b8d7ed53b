"""Interface of a channel: asynchronous sends, and a callback for each arriving message."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import jax

from axonn_jax.schedule.tasks import Message

Deliver = Callable[[Message, jax.Array], None]
"""Callback for an arrived message; called from any thread, must not block."""

Failed = Callable[[BaseException], None]
"""Callback for the exception that broke a channel; called once, from any thread, must not block."""


class ChannelClosed(RuntimeError):
    """A message was given to a closed, failed or unstarted channel."""


@dataclass(frozen=True)
class Ports:
    """Forms of the activations and gradients arriving at this process."""

    arriving: Mapping[int, jax.ShapeDtypeStruct]
    """Global shape, dtype and `NamedSharding` of a stage's incoming activations, by destination stage; gradients of
    outgoing activations have the same form. `local` needs every stage, other channels this process's."""
    stages: int
    """Virtual stages of the whole pipeline."""

    def form(self, message: Message) -> jax.ShapeDtypeStruct:
        """Return the form of the array that `message` carries; ``KeyError`` for a stage that does not live here."""
        try:
            return self.arriving[message.stage]
        except KeyError:
            raise KeyError(f"{message}: this process receives for stages {sorted(self.arriving)}") from None


class Channel(ABC):
    """Asynchronous transport of one array a message between neighbouring stages.

    Messages between two stages in one direction arrive in any order, but messages of one name (from successive steps)
    keep their order. The sender must not donate or delete a value before the message has left `unsent`; a program that
    donates the value meanwhile makes a copy.
    """

    name: ClassVar[str]
    """Name of the channel in `pipeline.channel`."""

    @abstractmethod
    def start(self, deliver: Deliver, failed: Failed) -> None:
        """Begin to receive; arrays given to `deliver` are laid out on the receiving stage's mesh.

        Whatever goes wrong in the channel's threads, an exception of `deliver` included, goes to `failed` once, and the
        channel then carries nothing more. Raises ``ChannelClosed`` when started twice or after `close`.
        """

    @abstractmethod
    def send(self, message: Message, value: jax.Array) -> None:
        """Send `value`, laid out on the sending stage's mesh, without waiting for anything.

        `value` may still be in computation, and leaves when ready. Raises ``ChannelClosed`` where the channel does not
        run, ``UserError`` where MPI has no tag for the microbatch.
        """

    @abstractmethod
    def busy(self, active: bool) -> None:
        """Tell, each time a program has been started or none is left, whether this process computes on the cores.
        Looking for messages then costs (nearly) no time: the channel looks now, and seldom until the next call.
        """

    @abstractmethod
    def unsent(self) -> list[Message]:
        """Return the unsent messages, for error lines."""

    @abstractmethod
    def flush(self, timeout: float) -> None:
        """Wait until every message has left.

        Raises ``TimeoutError`` with the messages left after `timeout` seconds, ``ChannelClosed`` if the channel failed.
        """

    @abstractmethod
    def close(self, timeout: float = 5.0) -> bool:
        """Stop the channel within about `timeout` seconds, after sending as much as possible; may be called twice.

        Returns False where a thread or a transfer is left hanging on a peer: an orderly exit could then wait for ever
        in MPI or jax, so the process should leave with `os._exit`.
        """

    @abstractmethod
    def free(self) -> None:
        """Free the channel's communicators, after `close`; collective over the pipe's ranks."""
