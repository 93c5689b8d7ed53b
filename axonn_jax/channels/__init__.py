"""Channels that carry activations and their gradients between pipeline stages, asynchronously."""

from axonn_jax.channels.base import Channel, ChannelClosed, Ports
from axonn_jax.channels.choose import choose, open_channel

__all__ = ["Channel", "ChannelClosed", "Ports", "choose", "open_channel"]
