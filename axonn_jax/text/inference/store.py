"""Store of all layers' caches on the devices: allocated on first use, grown on demand, donated to every program."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from axonn_jax.core.errors import UserError
from axonn_jax.core.grid import Grid
from axonn_jax.core.memory.report import unused
from axonn_jax.core.models.config import ModelShape
from axonn_jax.core.tensor.params import Params
from axonn_jax.text.inference.attend import Extras
from axonn_jax.text.inference.cache import LayerCache, bucket, grown
from axonn_jax.text.inference.programs import Program, Programs
from axonn_jax.text.inference.slots import Slot


def ring_of(shape: ModelShape, length: int) -> int:
    """Return the number of tokens that a slot keeps at most, for texts of up to `length` tokens."""
    windows = [shape.attention_rule(layer).window for layer in range(shape.layers)]
    return bucket(min(max(window or length for window in windows), length))


def check_memory(shape: ModelShape, programs: Programs, slots: int, length: int, grid: Grid) -> None:
    """Check that the caches fit into free memory.

    Raises:
        UserError: `slots` slots of full length do not fit.
    """
    replicas, ring = grid.shape.batch_shards, ring_of(shape, length)
    arrays = [(count, kind or programs.dtype) for count, kind in programs.attention.features(shape.head_dim)]
    token = shape.layers * shape.kv_heads * sum(count * jnp.dtype(kind).itemsize for count, kind in arrays)
    slot_bytes = token * ring * replicas // grid.mesh.devices.size
    free = unused(grid.mesh, grid.size)
    if free and slots // replicas * slot_bytes > free:
        accepted = (
            f"at most {free // slot_bytes * replicas} of {ring:,} tokens: {free / 2**30:.1f} GiB are free on a device"
        )
        raise UserError("slots", slots, accepted)


class CacheStore:
    """Caches of a model's layers for all slots; a slot has at most `ring` tokens, the model's window or all."""

    def __init__(self, shape: ModelShape, programs: Programs, slots: Sequence[Slot], length: int):
        self._shape, self._programs, self._slots = shape, programs, slots
        self.ring = ring_of(shape, length)
        self.capacity = 0
        """Capacity of a slot in tokens."""
        self._caches: list[LayerCache] | None = None
        self._sharding = NamedSharding(programs.mesh, programs.cache_spec)
        self._grow = jax.jit(grown, static_argnums=1, out_shardings=self._sharding)

    def call(self, program: Program, params: Params, extras: Extras, *inputs: object) -> Sequence[np.ndarray]:
        """Run a program on the caches and return its other results on the host."""
        # Donated: if the program fails they are lost, and `reserve` allocates new ones.
        caches, self._caches = self._caches, None
        # Chunks of a long prompt return nothing to read, so nothing else limits the calls in flight
        # (`distributed.bounded`).
        jax.block_until_ready(caches)
        self._caches, *results = program(params, extras, caches, *inputs)
        return jax.device_get(results)  # type: ignore[no-any-return]

    def reserve(self, tokens: int) -> None:
        """Make room for `tokens` tokens per slot."""
        capacity = min(bucket(tokens), self.ring)
        if self._caches is None:  # at first, or after a call that failed
            for slot in self._slots:
                slot.cached = ()
            self.capacity = max(capacity, self.capacity)
            self._caches = self._empty()
        elif capacity > self.capacity:
            # At least doubled: every capacity compiles the programs again.
            self.capacity = min(max(capacity, 2 * self.capacity), self.ring)
            # Layer by layer, so that only one layer's cache is in memory in both sizes.
            for layer, arrays in enumerate(self._caches):
                self._caches[layer] = self._grow(arrays, self.capacity)
                for array in arrays:
                    array.delete()

    def release(self) -> None:
        """Free the caches; new ones of the same capacity are allocated when needed."""
        self._caches = None

    def _empty(self) -> list[LayerCache]:
        lead = (len(self._slots), self._shape.kv_heads, self.capacity)
        features = self._programs.attention.features(self._shape.head_dim)
        sizes = tuple(((*lead, count), jnp.dtype(kind or self._programs.dtype)) for count, kind in features)
        make = jax.jit(_zeros, static_argnums=0, out_shardings=self._sharding)
        return [make(sizes) for _ in range(self._shape.layers)]


def _zeros(sizes: tuple[tuple[tuple[int, ...], jnp.dtype], ...]) -> LayerCache:
    return tuple(jnp.zeros(*size) for size in sizes)
