"""The caches of all layers on the devices: made when first needed, grown, and used up by every program."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from axonn_jax.errors import UserError
from axonn_jax.grid import Grid
from axonn_jax.inference.cache import LayerCache, bucket, grown
from axonn_jax.inference.programs import Programs
from axonn_jax.inference.slots import Slot
from axonn_jax.memory.report import unused
from axonn_jax.models.config import ModelShape


def ring_of(shape: ModelShape, length: int) -> int:
    """Return the most tokens kept in a slot, of texts of at most `length`."""
    windows = [shape.attention_rule(layer).window for layer in range(shape.layers)]
    return bucket(min(max(window or length for window in windows), length))


def check_memory(shape: ModelShape, programs: Programs, slots: int, length: int, grid: Grid) -> None:
    """Raise ``UserError`` if so many slots of full length do not fit into free memory."""
    replicas, ring = grid.shape.batch_shards, ring_of(shape, length)
    arrays = [(count, kind or programs.dtype) for count, kind in programs.attention.features(shape.head_dim)]
    token = shape.layers * shape.kv_heads * sum(count * jnp.dtype(kind).itemsize for count, kind in arrays)
    each = token * ring * replicas // grid.mesh.devices.size
    free = unused(grid.mesh, grid.size)
    if free and slots // replicas * each > free:
        accepted = f"at most {free // each * replicas} of {ring:,} tokens: {free / 2**30:.1f} GiB are free on a device"
        raise UserError("slots", slots, accepted)


class CacheStore:
    """Caches for so many slots of a model; `ring` tokens of a slot at most, the model's window or all."""

    def __init__(self, shape: ModelShape, programs: Programs, slots: Sequence[Slot], length: int):
        self._shape, self._programs, self._slots = shape, programs, slots
        self.ring = ring_of(shape, length)
        self.capacity = 0
        """Capacity of a slot in tokens."""
        self._caches: list[LayerCache] | None = None
        self._sharding = NamedSharding(programs.mesh, programs.cache_spec)
        self._grow = jax.jit(grown, static_argnums=1, out_shardings=self._sharding)

    def call(self, program: Any, params: Any, extras: Any, *given: Any) -> Sequence[Any]:
        """Run a program on the caches, one at a time; return the other results on the host."""
        caches, self._caches = self._caches, None  # used up, whatever happens
        jax.block_until_ready(caches)  # a long prompt's chunks read nothing (`distributed.bounded`)
        self._caches, *results = program(params, extras, caches, *given)
        return jax.device_get(results)  # type: ignore[no-any-return]

    def reserve(self, tokens: int) -> None:
        """Make room for `tokens` tokens a slot; growing caches at least double."""
        capacity = min(bucket(tokens), self.ring)
        if self._caches is None:  # at first, or behind a call that failed
            for slot in self._slots:
                slot.cached = ()
            self.capacity = max(capacity, self.capacity)
            self._caches = self._empty()
        elif capacity > self.capacity:
            self.capacity = min(max(capacity, 2 * self.capacity), self.ring)
            for layer, arrays in enumerate(self._caches):  # both sizes of only one layer take memory
                self._caches[layer] = self._grow(arrays, self.capacity)
                for array in arrays:
                    array.delete()

    def release(self) -> None:
        """Free the caches' memory; new caches of the same capacity are made when needed."""
        self._caches = None

    def _empty(self) -> list[LayerCache]:
        lead = (len(self._slots), self._shape.kv_heads, self.capacity)
        features = self._programs.attention.features(self._shape.head_dim)
        sizes = tuple(((*lead, count), jnp.dtype(kind or self._programs.dtype)) for count, kind in features)
        make = jax.jit(_zeros, static_argnums=0, out_shardings=self._sharding)
        return [make(sizes) for _ in range(self._shape.layers)]


def _zeros(sizes: tuple[tuple[tuple[int, ...], Any], ...]) -> LayerCache:
    return tuple(jnp.zeros(*size) for size in sizes)
