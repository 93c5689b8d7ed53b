"""Interface of a channel: asynchronous sends, and a callback per arriving message."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import jax

from axonn_jax.pipe.schedule.tasks import Direction, Message

Deliver = Callable[[Message, jax.Array], None]
"""Callback for a message that has arrived; called from any thread, must not block."""

Failed = Callable[[BaseException], None]
"""Callback for the exception that broke a channel; called once, from any thread, must not block."""


class ChannelClosed(RuntimeError):
    """Error of a channel that is closed, has failed or was never started."""


@dataclass(frozen=True)
class Ports:
    """Shapes and layouts of the activations and gradients that arrive at this process."""

    arriving: Mapping[int, jax.ShapeDtypeStruct]
    """Global shape, dtype and `NamedSharding` of a stage's incoming activations, by destination stage. `local` needs
    all stages, the other channels only this process's."""
    stages: int
    """Virtual stages of the whole pipeline."""
    returning: Mapping[int, jax.ShapeDtypeStruct] = field(default_factory=dict)
    """Form of the gradients of a stage's outgoing activations; where it is missing, that of the incoming ones."""

    def of(self, direction: Direction) -> Mapping[int, jax.ShapeDtypeStruct]:
        """Return the form of the messages of a direction, by the stage that receives them."""
        return {**self.arriving, **self.returning} if direction == "backward" else self.arriving

    def form(self, message: Message) -> jax.ShapeDtypeStruct:
        """Return the shape and layout of the array that `message` carries.

        Raises:
            KeyError: The receiving stage does not live in this process.
        """
        try:
            return self.of(message.direction)[message.stage]
        except KeyError:
            raise KeyError(f"{message}: this process receives for stages {sorted(self.arriving)}") from None


class Channel(ABC):
    """Asynchronous transport between neighbouring stages, one array per message.

    Messages between two stages may overtake each other, but messages of the same name (from successive steps) arrive
    in order. The sender must not donate or delete a value before its message has left `unsent`; a program that donates
    it before then makes a copy.
    """

    name: ClassVar[str]
    """Name of the channel in `pipeline.channel`."""

    @abstractmethod
    def start(self, deliver: Deliver, failed: Failed) -> None:
        """Start to receive.

        Args:
            deliver: Called with each message and its array, laid out on the receiving stage's mesh.
            failed: Called once, with the first exception in the channel's threads, which may come from `deliver`. The
                channel carries nothing afterwards.

        Raises:
            ChannelClosed: The channel was started before, or has been closed.
        """

    @abstractmethod
    def send(self, message: Message, value: jax.Array) -> None:
        """Send an array without blocking.

        Args:
            message: The message that names it.
            value: Array on the sending stage's mesh. It may still be being computed, and leaves once it is ready.

        Raises:
            ChannelClosed: The channel is not running.
            UserError: MPI has no tag for the microbatch.
        """

    @abstractmethod
    def busy(self, active: bool) -> None:
        """Record whether programs of this process occupy the CPU cores.

        Call it whenever a program has been started or none is running any more: polling for messages is nearly free at
        that moment, so the channel polls right away, and rarely until the next call.
        """

    @abstractmethod
    def unsent(self) -> list[Message]:
        """Return the messages that have not left yet, for error messages."""

    @abstractmethod
    def flush(self, timeout: float) -> None:
        """Wait until every message has left.

        Raises:
            TimeoutError: Messages remain after `timeout` seconds; the error names them.
            ChannelClosed: The channel has failed.
        """

    @abstractmethod
    def close(self, timeout: float = 5.0) -> bool:
        """Send as much as possible and stop the channel, within about `timeout` seconds; may be called twice.

        Returns:
            False if a thread or a transfer still hangs on a peer. An orderly exit could then wait forever in MPI or
            jax, so the process should leave with `os._exit`.
        """

    @abstractmethod
    def free(self) -> None:
        """Free the channel's communicators after `close`; collective over the ranks of the pipe."""
