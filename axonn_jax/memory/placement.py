"""Where arrays live: a device's own memory, or its host's."""

from typing import Literal

from jax.sharding import Mesh, NamedSharding

Where = Literal["none", "optimizer"]
"""What is kept in host memory: nothing, or the optimizer's state with the float32 weights."""

HOST = "pinned_host"
"""The kind of host memory that devices copy from and to without a detour."""


def has_host_memory(mesh: Mesh) -> bool:
    """Whether the devices can address memory of their host, which arrays can live in."""
    kinds = {memory.kind for memory in mesh.local_devices[0].addressable_memories()}
    return HOST in kinds


def on_host(sharding: NamedSharding) -> NamedSharding:
    """The same layout in host memory; as it is where the backend has one memory only (`has_host_memory`)."""
    return sharding.with_memory_kind(HOST) if has_host_memory(sharding.mesh) else sharding  # type: ignore[arg-type]
