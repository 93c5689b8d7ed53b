"""Arrays in host memory, arrays that are held cut, stacked or pruned, and moves between a host and its devices."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from axonn_jax.pruned.layout import PrunedLayout

HOST = "pinned_host"
"""The kind of host memory that devices copy from and to without a detour."""


def has_host_memory(mesh: Mesh) -> bool:
    """True if the devices can address memory of their host, which arrays can live in."""
    return _has(mesh.local_devices[0], HOST)


def on_host(sharding: NamedSharding) -> NamedSharding:
    """The same layout in host memory; as it is where the backend has one memory only (`has_host_memory`)."""
    return sharding.with_memory_kind(HOST) if has_host_memory(sharding.mesh) else sharding  # type: ignore[arg-type]


@dataclass(frozen=True)
class HeldArray(ABC):
    """Array of the state that is held as others, its `parts`, and made when asked for (`joined`)."""

    parts: tuple[Any, ...]
    shape: tuple[int, ...]
    sharding: NamedSharding

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of the parts."""
        return np.dtype(self.parts[0].dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of the global array."""
        return prod(self.shape) * self.dtype.itemsize

    @abstractmethod
    def joined(self) -> jax.Array:
        """Return one array, a copy."""

    def delete(self) -> None:
        """Free the parts."""
        for part in self.parts:
            part.delete()


@dataclass(frozen=True)
class CutArray(HeldArray):
    """Array whose parts are cut along `dim` of every device's shard."""

    dim: int

    def joined(self) -> jax.Array:
        """Return the parts joined to one array, a copy."""
        shards = zip(*(part.addressable_shards for part in self.parts), strict=True)
        arrays = {s[0].device: np.concatenate([np.asarray(part.data) for part in s], axis=self.dim) for s in shards}
        return from_shards(self.shape, self.sharding, arrays)


@dataclass(frozen=True)
class PrunedArray(HeldArray):
    """Dense array of a pruned parameter; its part are the kept values, none of a mask, whose values are ones."""

    layout: PrunedLayout
    name: str
    index: Any
    """Positions of the kept entries, which are not freed: an array or a `HeldArray`."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of the values; of a mask bytes."""
        return super().dtype if self.parts else np.dtype(np.uint8)

    def joined(self) -> jax.Array:
        """Return one array, a copy, with zeros for entries that are not kept."""
        index = joined(self.index)
        values = joined(self.parts[0]) if self.parts else jnp.ones_like(index, jnp.uint8)
        return self.layout.expanded(self.name, values, index)


def unpruned(layout: PrunedLayout, name: str, index: Any, *values: Any) -> PrunedArray:
    """Return the dense array of a pruned parameter's values, or without any its mask."""
    sharding = NamedSharding(layout.mesh, layout.specs[name])
    return PrunedArray(values, layout.shapes[name], sharding, layout, name, index)


@dataclass(frozen=True)
class HostShard:
    """Shard of an array on one device, as a view of it in host memory or a copy there."""

    index: tuple[slice, ...]
    device: jax.Device
    data: np.ndarray


@dataclass(frozen=True)
class LayerSlice(HeldArray):
    """Layer's slice of its part, an array [layers, ...] that stacks all layers, whose dim is not sharded."""

    layer: int

    @property
    def addressable_shards(self) -> list[HostShard]:
        """Shards of the slice in this process: views on the CPU backend, elsewhere copies on the host of all layers."""
        shards = self.parts[0].addressable_shards
        return [HostShard(shard.index[1:], shard.device, np.asarray(shard.data)[self.layer]) for shard in shards]

    def joined(self) -> jax.Array:
        """One array, a copy."""
        return _cut_out(self.parts[0], np.int32(self.layer), self.sharding)

    def on_host(self) -> jax.Array:
        """Return a copy in host memory as one array; temporary device memory is free again on return."""
        copy = self.joined()
        (kept,) = jax.block_until_ready(transferred([copy], HOST))
        copy.delete()
        return kept


def layer_of(stacked: jax.Array, layer: int) -> LayerSlice:
    """Return a layer's slice of an array that stacks all layers."""
    sharding: Any = stacked.sharding
    if isinstance(sharding, NamedSharding):
        sharding = NamedSharding(sharding.mesh, P(*sharding.spec[1:]), memory_kind=sharding.memory_kind)
    return LayerSlice((stacked,), stacked.shape[1:], sharding, layer)


@partial(jax.jit, static_argnames="sharding")
def _cut_out(stacked: jax.Array, layer: jax.Array, sharding: NamedSharding) -> jax.Array:
    return lax.with_sharding_constraint(lax.dynamic_index_in_dim(stacked, layer, keepdims=False), sharding)


def joined(tree: Any) -> Any:
    """Return a tree in which leaves with a method `joined` are replaced by its array."""
    return jax.tree.map(lambda leaf: leaf.joined() if hasattr(leaf, "joined") else leaf, tree)


def on_device(leaf: Any) -> jax.Array:
    """Return a leaf of the state as one array in device memory: itself, joined, or a copy of one in host memory."""
    array: jax.Array = joined(leaf)
    return transferred(array, "device") if array.sharding.memory_kind == HOST else array  # type: ignore[no-any-return]


def cut(array: jax.Array, dim: int, start: int, count: int) -> jax.Array:
    """A copy of `count` rows along `dim` of every device's shard."""
    sharding: Any = array.sharding
    local = sharding.shard_shape(array.shape)
    shape = tuple(size // local[at] * count if at == dim else size for at, size in enumerate(array.shape))
    rows = (slice(None),) * dim + (slice(start, start + count),)
    return from_shards(shape, sharding, {s.device: np.asarray(s.data)[rows].copy() for s in array.addressable_shards})


def from_shards(shape: tuple[int, ...], sharding: NamedSharding, shards: Mapping[jax.Device, np.ndarray]) -> jax.Array:
    """The global array that has these shards; a shard given as memory of the host may be taken over."""
    kind = sharding.memory_kind
    arrays = [jax.device_put(data, SingleDeviceSharding(at, memory_kind=kind)) for at, data in shards.items()]
    return jax.make_array_from_single_device_arrays(shape, sharding, arrays)


def replicated(value: np.generic, sharding: NamedSharding) -> jax.Array:
    """Return a host number on every device of a mesh, also where other processes hold some of the devices."""
    return jax.make_array_from_callback((), sharding, lambda _: np.asarray(value))


def transferred(tree: Any, kind: str) -> Any:
    """Copies of a tree's arrays in a kind of memory of the same devices ("device" or `HOST`), on their way on return.

    Numbers stay on the devices. Shard by shard where other processes hold some of an array: `jax.device_put` of all of
    it would be a program, which waits its turn among the others.
    """
    arrays, structure = jax.tree.flatten(tree)
    shardings = [_in_memory(array.sharding, kind if array.ndim else "device") for array in arrays]
    if all(array.is_fully_addressable for array in arrays):
        return jax.tree.unflatten(structure, jax.device_put(arrays, shardings, may_alias=False))
    shards = [
        (shard.data, SingleDeviceSharding(shard.device, memory_kind=sharding.memory_kind))
        for array, sharding in zip(arrays, shardings, strict=True)
        for shard in array.addressable_shards
    ]
    copies = iter(jax.device_put(*map(list, zip(*shards, strict=True)), may_alias=False))
    made = [
        jax.make_array_from_single_device_arrays(
            array.shape, sharding, [next(copies) for _ in array.addressable_shards]
        )
        for array, sharding in zip(arrays, shardings, strict=True)
    ]
    return jax.tree.unflatten(structure, made)


def stream(states: list[Any], update: Callable[[int, Any], Any], staying: Collection[int] = ()) -> None:
    """Replace each state, a tree in host memory, by `update(number, its copy on the devices)`; numbers stay there.

    States whose numbers are `staying` are on the devices: `update` gets them themselves. Returns early: waits only for
    the host's copy of a state where the devices have no room for another one.
    """
    travelling = [number for number in range(len(states)) if number not in staying]
    arriving = transferred(states[travelling[0]], "device") if travelling else None
    position = 0
    for number, state in enumerate(states):
        if position == len(travelling) or number != travelling[position]:
            states[number] = update(number, state)
            continue
        current = arriving
        if position >= 2:  # its place on the device is free: room for the next
            jax.block_until_ready(states[travelling[position - 2]])
        position += 1
        if position < len(travelling):
            arriving = transferred(states[travelling[position]], "device")
        states[number] = transferred(update(number, current), HOST)


def settle(states: list[Any], staying: Collection[int]) -> None:
    """Move the states whose numbers are `staying` to the devices, one after another."""
    for number in sorted(staying):
        if not stays(states[number]):
            states[number] = jax.block_until_ready(transferred(states[number], "device"))


def stays(state: Any) -> bool:
    """True if all arrays of a state are on the devices; False for a state of numbers alone."""
    kinds = {array.sharding.memory_kind for array in jax.tree.leaves(state) if array.ndim}
    return bool(kinds) and HOST not in kinds


def _in_memory(sharding: Any, kind: str) -> Any:
    return sharding.with_memory_kind(kind) if _has(next(iter(sharding.addressable_devices)), kind) else sharding


def _has(device: Any, kind: str) -> bool:
    return kind in {memory.kind for memory in device.addressable_memories()}
