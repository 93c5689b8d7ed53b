"""Channel between stages on device slices of one process, where jax moves the arrays."""

from typing import ClassVar

import jax

from axonn_jax.pipe.channels.base import Channel, ChannelClosed, Deliver, Failed, Ports
from axonn_jax.pipe.schedule.tasks import Message


class LocalChannel(Channel):
    """Channel that copies every message to the destination's devices immediately.

    A delivered array may still be being computed or transferred; the device orders programs that read it after that.
    """

    name: ClassVar[str] = "local"

    def __init__(self, ports: Ports):
        self._ports = ports
        self._deliver: Deliver | None = None
        self._closed = False

    def start(self, deliver: Deliver, failed: Failed) -> None:  # noqa: D102
        if self._deliver is not None or self._closed:
            raise ChannelClosed("local channel: started twice, or after close")
        self._deliver = deliver

    def send(self, message: Message, value: jax.Array) -> None:  # noqa: D102
        if self._deliver is None or self._closed:
            raise ChannelClosed(f"local channel: not running, so no {message}")
        self._deliver(message, move(value, self._ports.form(message)))

    def busy(self, active: bool) -> None:  # noqa: D102
        pass

    def unsent(self) -> list[Message]:  # noqa: D102
        return []

    def flush(self, timeout: float) -> None:  # noqa: D102
        pass

    def close(self, timeout: float = 5.0) -> bool:  # noqa: D102
        self._closed = True
        return True

    def free(self) -> None:  # noqa: D102
        pass


def move(value: jax.Array, form: jax.ShapeDtypeStruct) -> jax.Array:
    """Move `value` to another stage's mesh, without waiting.

    Communication: each device sends its shard to its counterpart in the other mesh; replicas exchange nothing.

    Args:
        value: Array on the sending stage's mesh.
        form: Its shape, dtype and layout on the receiving stage's mesh, which has the same shape.

    Raises:
        ValueError: Shape or dtype differ.
    """
    if value.shape != form.shape or value.dtype != form.dtype:
        raise ValueError(f"{value.dtype}{value.shape} sent where {form.dtype}{form.shape} is expected")
    return jax.device_put(value, form.sharding)
