"""Host-memory arrays, transfers to and from devices, and arrays stored cut, stacked or pruned."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, Sharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from axonn_jax.core.pruned.layout import PrunedLayout

T = TypeVar("T")

HOST = "pinned_host"
"""JAX's kind of host memory that devices read and write directly."""


def has_host_memory(mesh: Mesh) -> bool:
    """Return True if arrays can live in host memory that the mesh's devices address."""
    return _has(mesh.local_devices[0], HOST)


def on_host(sharding: NamedSharding) -> NamedSharding:
    """Return the same sharding in host memory, or unchanged if the backend has a single memory."""
    return sharding.with_memory_kind(HOST) if has_host_memory(sharding.mesh) else sharding  # type: ignore[arg-type]


@dataclass(frozen=True)
class LazyArray(ABC):
    """Array of the state that is stored as other arrays, its `parts`, and assembled by `materialize`."""

    parts: tuple[Any, ...]
    shape: tuple[int, ...]
    sharding: NamedSharding

    @property
    def dtype(self) -> np.dtype[np.generic]:
        """Dtype of the parts."""
        return np.dtype(self.parts[0].dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of the global array."""
        return prod(self.shape) * self.dtype.itemsize

    @abstractmethod
    def materialize(self) -> jax.Array:
        """Assemble the array; always a copy."""

    def delete(self) -> None:
        """Free the parts."""
        for part in self.parts:
            part.delete()


@dataclass(frozen=True)
class CutArray(LazyArray):
    """Array whose parts are pieces of every device's shard, cut along `dim`."""

    dim: int

    def materialize(self) -> jax.Array:
        """Concatenate the parts on the host; always a copy."""
        # Shard by shard: the parts' global arrays interleave along `dim` if it is sharded.
        shards = zip(*(part.addressable_shards for part in self.parts), strict=True)
        arrays = {s[0].device: np.concatenate([np.asarray(part.data) for part in s], axis=self.dim) for s in shards}
        return from_shards(self.shape, self.sharding, arrays)


@dataclass(frozen=True)
class PrunedArray(LazyArray):
    """Dense view of a pruned parameter; its part has the remaining values. A mask has no part: its values are ones."""

    layout: PrunedLayout
    name: str
    index: "jax.Array | LazyArray"
    """Positions of the remaining entries, an array or a `LazyArray`; `delete` leaves them alone."""

    @property
    def dtype(self) -> np.dtype[np.generic]:
        """Dtype of the values; uint8 for a mask."""
        return super().dtype if self.parts else np.dtype(np.uint8)

    def materialize(self) -> jax.Array:
        """Assemble the dense array, with zeros for pruned entries."""
        index = materialize(self.index)
        values = materialize(self.parts[0]) if self.parts else jnp.ones_like(index, jnp.uint8)
        return self.layout.expanded(self.name, values, index)


def unpruned(
    layout: PrunedLayout, name: str, index: "jax.Array | LazyArray", *values: "jax.Array | LazyArray"
) -> PrunedArray:
    """Return the dense view of a pruned parameter's values, or its mask if there are none."""
    sharding = NamedSharding(layout.mesh, layout.specs[name])
    return PrunedArray(values, layout.shapes[name], sharding, layout, name, index)


@dataclass(frozen=True)
class HostShard:
    """Shard of a device's array, as a view or copy in host memory."""

    index: tuple[slice, ...]
    device: jax.Device
    data: np.ndarray


@dataclass(frozen=True)
class LayerSlice(LazyArray):
    """One layer of its part, an array [layers, ...] whose leading dim is not sharded."""

    layer: int

    @property
    def addressable_shards(self) -> list[HostShard]:
        """This process's shards: views on the CPU backend, elsewhere parts of a host copy of all layers."""
        shards = self.parts[0].addressable_shards
        return [HostShard(shard.index[1:], shard.device, np.asarray(shard.data)[self.layer]) for shard in shards]

    def materialize(self) -> jax.Array:
        """Assemble the layer's array; always a copy."""
        # The index is an operand, so that all layers share a program.
        return _layer_slice(self.parts[0], np.int32(self.layer), self.sharding)

    def on_host(self) -> jax.Array:
        """Return a copy in host memory; temporary device memory is free again on return."""
        copy = self.materialize()
        (host_copy,) = jax.block_until_ready(transferred([copy], HOST))
        copy.delete()
        return host_copy


def layer_of(stacked: jax.Array, layer: int) -> LayerSlice:
    """Return one layer of an array that stacks all layers, without copying."""
    sharding: Any = stacked.sharding
    if isinstance(sharding, NamedSharding):
        sharding = NamedSharding(sharding.mesh, P(*sharding.spec[1:]), memory_kind=sharding.memory_kind)
    return LayerSlice((stacked,), stacked.shape[1:], sharding, layer)


@partial(jax.jit, static_argnames="sharding")
def _layer_slice(stacked: jax.Array, layer: jax.Array, sharding: NamedSharding) -> jax.Array:
    return lax.with_sharding_constraint(lax.dynamic_index_in_dim(stacked, layer, keepdims=False), sharding)


def materialize(tree: Any) -> Any:
    """Return a tree with every `LazyArray` assembled."""
    return jax.tree.map(lambda leaf: leaf.materialize() if isinstance(leaf, LazyArray) else leaf, tree)


def on_device(leaf: jax.Array | LazyArray) -> jax.Array:
    """Return a leaf of the state as an array in device memory, assembled or copied if necessary."""
    array: jax.Array = materialize(leaf)
    return transferred(array, "device") if array.sharding.memory_kind == HOST else array  # type: ignore[no-any-return]


def cut(array: jax.Array, dim: int, start: int, count: int) -> jax.Array:
    """Return a copy of `count` rows along `dim` of every device's shard."""
    sharding: Any = array.sharding
    local = sharding.shard_shape(array.shape)
    shape = tuple(size // local[axis] * count if axis == dim else size for axis, size in enumerate(array.shape))
    rows = (slice(None),) * dim + (slice(start, start + count),)
    return from_shards(shape, sharding, {s.device: np.asarray(s.data)[rows].copy() for s in array.addressable_shards})


def from_shards(shape: tuple[int, ...], sharding: NamedSharding, shards: Mapping[jax.Device, np.ndarray]) -> jax.Array:
    """Return the global array that has these shards; it may alias shards that are host memory."""
    kind = sharding.memory_kind
    arrays = [jax.device_put(data, SingleDeviceSharding(device, memory_kind=kind)) for device, data in shards.items()]
    return jax.make_array_from_single_device_arrays(shape, sharding, arrays)


def replicated(value: np.generic, sharding: NamedSharding) -> jax.Array:
    """Return a host number on every device of a mesh, which may span processes."""
    return jax.make_array_from_callback((), sharding, lambda _: np.asarray(value))


def transferred(tree: Any, kind: str = HOST) -> Any:
    """Start copying a tree's arrays to the host's memory, or to "device", that of their devices; return the copies.

    Scalars stay on the devices.
    """
    arrays, structure = jax.tree.flatten(tree)
    shardings = [_in_memory(array.sharding, kind if array.ndim else "device") for array in arrays]
    if all(array.is_fully_addressable for array in arrays):
        return jax.tree.unflatten(structure, jax.device_put(arrays, shardings, may_alias=False))
    # Copy shard by shard if other processes hold some of an array. `jax.device_put` of the global array would be a
    # program, which waits behind those already queued instead of overlapping with them.
    shards = [
        (shard.data, SingleDeviceSharding(shard.device, memory_kind=sharding.memory_kind))
        for array, sharding in zip(arrays, shardings, strict=True)
        for shard in array.addressable_shards
    ]
    copies = iter(jax.device_put(*map(list, zip(*shards, strict=True)), may_alias=False))
    assembled = [
        jax.make_array_from_single_device_arrays(
            array.shape, sharding, [next(copies) for _ in array.addressable_shards]
        )
        for array, sharding in zip(arrays, shardings, strict=True)
    ]
    return jax.tree.unflatten(structure, assembled)


def stream(states: list[T], update: Callable[[int, Any], T], staying: Collection[int] = ()) -> None:
    """Replace each state, a tree in host memory, by the result of `update(index, copy on the devices)`.

    States whose indices are in `staying` are already on the devices, and `update` gets them directly. Scalars stay on
    the devices. Returns before the updates have run; blocks only until the devices have room for the next state.
    """
    travelling = [number for number in range(len(states)) if number not in staying]
    arriving = transferred(states[travelling[0]], "device") if travelling else None
    position = 0
    for number, state in enumerate(states):
        if position == len(travelling) or number != travelling[position]:
            states[number] = update(number, state)
            continue
        current = arriving
        # Once the state of two updates ago is back on the host, its device memory has room for the next one. Waiting
        # any earlier would serialize copies with updates; any later, the devices would hold more than three states.
        if position >= 2:
            jax.block_until_ready(states[travelling[position - 2]])
        position += 1
        if position < len(travelling):
            arriving = transferred(states[travelling[position]], "device")
        states[number] = transferred(update(number, current), HOST)


def settle(states: list[T], staying: Collection[int]) -> None:
    """Move the states whose indices are in `staying` to the devices, one after another."""
    for number in sorted(staying):
        if not stays(states[number]):
            states[number] = jax.block_until_ready(transferred(states[number], "device"))


def stays(state: object) -> bool:
    """Return True if all arrays of a state are on the devices; False for a state of scalars only."""
    kinds = {array.sharding.memory_kind for array in jax.tree.leaves(state) if array.ndim}
    return bool(kinds) and HOST not in kinds


def _in_memory(sharding: Sharding, kind: str) -> Sharding:
    return sharding.with_memory_kind(kind) if _has(next(iter(sharding.addressable_devices)), kind) else sharding


def _has(device: jax.Device, kind: str) -> bool:
    return kind in {memory.kind for memory in device.addressable_memories()}
