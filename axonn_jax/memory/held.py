"""Arrays that exist in other forms, in parts or as part of a larger one, and moves between host and devices."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from axonn_jax.memory.placement import on_host


@dataclass(frozen=True)
class Held:
    """An array that is kept in parts, cut along `dim` of every device's shard, and put together when asked for."""

    parts: Sequence[jax.Array]
    dim: int
    shape: tuple[int, ...]
    sharding: NamedSharding

    @property
    def dtype(self) -> np.dtype[Any]:
        """That of its parts."""
        return self.parts[0].dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the global array."""
        return sum(part.nbytes for part in self.parts)

    def whole(self) -> jax.Array:
        """One array, a copy."""
        shards = zip(*(part.addressable_shards for part in self.parts), strict=True)
        found = {s[0].device: np.concatenate([np.asarray(part.data) for part in s], axis=self.dim) for s in shards}
        return from_shards(self.shape, self.sharding, found)

    def delete(self) -> None:
        """Frees the parts."""
        for part in self.parts:
            part.delete()


@dataclass(frozen=True)
class HostShard:
    """A device's part of an array, in memory of the host that is that of the array itself."""

    index: tuple[slice, ...]
    device: jax.Device
    data: np.ndarray


@dataclass(frozen=True)
class LayerSlice:
    """A layer's part of the array that has those of all layers, of which it is cut out when asked for."""

    stacked: jax.Array
    """[layers, ...], of which the layers' dim is not sharded."""
    layer: int

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the layer's part."""
        return self.stacked.shape[1:]

    @property
    def dtype(self) -> np.dtype[Any]:
        """That of the stacked array."""
        return self.stacked.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the layer's part."""
        return self.stacked.nbytes // len(self.stacked)

    @property
    def sharding(self) -> Any:
        """The layout that it has as an array."""
        sharding: Any = self.stacked.sharding
        if not isinstance(sharding, NamedSharding):
            return sharding
        return NamedSharding(sharding.mesh, P(*sharding.spec[1:]), memory_kind=sharding.memory_kind)

    @property
    def addressable_shards(self) -> list[HostShard]:
        """Its parts in this process: on the CPU backend views, elsewhere copies on the host of all layers."""
        shards = self.stacked.addressable_shards
        return [HostShard(shard.index[1:], shard.device, np.asarray(shard.data)[self.layer]) for shard in shards]

    def whole(self) -> jax.Array:
        """One array, a copy."""
        return _cut_out(self.stacked, np.int32(self.layer), self.sharding)

    def on_host(self) -> jax.Array:
        """One array, a copy in host memory: what it takes on the devices is free again on return."""
        copy = self.whole()
        (there,) = jax.block_until_ready(moved([copy], [on_host(self.sharding)]))
        copy.delete()
        return there

    def delete(self) -> None:
        """Frees the stacked array, the parts of all layers."""
        self.stacked.delete()


@partial(jax.jit, static_argnames="sharding")
def _cut_out(stacked: jax.Array, layer: jax.Array, sharding: NamedSharding) -> jax.Array:
    return lax.with_sharding_constraint(lax.dynamic_index_in_dim(stacked, layer, keepdims=False), sharding)


def whole(tree: Any) -> Any:
    """A tree with arrays in the place of what exists in another form."""
    return jax.tree.map(lambda leaf: leaf.whole() if isinstance(leaf, (Held, LayerSlice)) else leaf, tree)


def take_part(array: jax.Array, dim: int, start: int, rows: int) -> jax.Array:
    """A copy of some rows along `dim` of every device's shard."""
    sharding: Any = array.sharding
    local = sharding.shard_shape(array.shape)
    shape = tuple(size // local[at] * rows if at == dim else size for at, size in enumerate(array.shape))
    cut = (slice(None),) * dim + (slice(start, start + rows),)
    found = {shard.device: np.asarray(shard.data)[cut].copy() for shard in array.addressable_shards}
    return from_shards(shape, sharding, found)


def from_shards(shape: tuple[int, ...], sharding: NamedSharding, shards: Mapping[jax.Device, np.ndarray]) -> jax.Array:
    """The global array that has these shards; a shard given as memory of the host may be taken over."""
    kind = sharding.memory_kind
    arrays = [jax.device_put(data, SingleDeviceSharding(at, memory_kind=kind)) for at, data in shards.items()]
    return jax.make_array_from_single_device_arrays(shape, sharding, arrays)


def moved(arrays: Sequence[jax.Array], shardings: Sequence[jax.sharding.Sharding]) -> list[jax.Array]:
    """Copies of arrays in other memory of the same devices, on their way when this returns.

    Shard by shard where other processes hold some of an array: `jax.device_put` of all of it would be a program, which
    waits its turn among the others.
    """
    if all(array.is_fully_addressable for array in arrays):
        return jax.device_put(list(arrays), list(shardings), may_alias=False)  # type: ignore[no-any-return]
    parts, places = [], []
    for array, sharding in zip(arrays, shardings, strict=True):
        for shard in array.addressable_shards:
            parts.append(shard.data)
            places.append(SingleDeviceSharding(shard.device, memory_kind=sharding.memory_kind))
    copies = iter(jax.device_put(parts, places, may_alias=False))
    return [
        jax.make_array_from_single_device_arrays(
            array.shape, sharding, [next(copies) for _ in array.addressable_shards]
        )
        for array, sharding in zip(arrays, shardings, strict=True)
    ]
