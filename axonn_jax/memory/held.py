"""Arrays in host memory in parts, and moves between host and devices that need no program."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, SingleDeviceSharding


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


def whole(tree: Any) -> Any:
    """A tree with arrays in the place of those that are held in parts."""
    return jax.tree.map(lambda leaf: leaf.whole() if isinstance(leaf, Held) else leaf, tree)


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
