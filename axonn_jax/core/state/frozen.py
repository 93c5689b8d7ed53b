"""Frozen weights on one mesh: layers read them, no step changes them, and they have no gradients or moments."""

import math
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import DTypeLike

from axonn_jax.core.adapters.checksum import numbers_of, read_numbered
from axonn_jax.core.checkpoint.naming import shapes
from axonn_jax.core.memory.host_arrays import LazyArray
from axonn_jax.core.models.stacked import Stack
from axonn_jax.core.state.scanned import unstack_params
from axonn_jax.core.tensor.params import Params


class FrozenWeights:
    """Frozen weights as the compiled programs read them, stacked and in one dtype; those with a role stay float32.

    Args:
        params: Float32 parameters on the mesh, under per-layer names.
        stack: Model with its layers both stacked and separate.
        mesh: Mesh of the parameters.
        dtype: Dtype of the stored weights.
        owned: True if `params` may be freed, one array after another.
    """

    def __init__(self, params: Params, stack: Stack, mesh: Mesh, dtype: DTypeLike, *, owned: bool):
        self._stack, self._mesh, self._dtype = stack, mesh, dtype
        # Compute the checksums before rounding to float16, which loses bits that the bfloat16 checksum needs.
        self._rounded = numbers_of(params, {}) if dtype == jnp.float16 else {}
        self.arrays = self._in_program_form(params, owned=owned)
        """Stacked arrays, under the names that the programs use."""

    @property
    def per_layer(self) -> Mapping[str, jax.Array | LazyArray]:
        """Weights under per-layer names, scanned ones as `LayerSlice`s; nothing is copied."""
        return unstack_params(self._stack, self.arrays)

    def numbers(self) -> dict[str, int]:
        """Return the weights' numbers for `adapters.checksum`, under per-layer names."""
        return numbers_of(self.per_layer, self._rounded)

    @property
    def bytes(self) -> int:
        """Bytes per device."""
        return sum(math.prod(a.sharding.shard_shape(a.shape)) * a.dtype.itemsize for a in self.arrays.values())

    def load(self, read: Callable[[Mapping[str, object]], Params]) -> None:
        """Replace the weights by those `read` returns for their abstract arrays; the old ones are freed first."""
        abstract = shapes(self.per_layer)
        for array in self.arrays.values():
            array.delete()
        params, self._rounded = read_numbered(read, abstract)
        self.arrays = self._in_program_form(params, owned=True)

    def _in_program_form(self, params: Params, *, owned: bool) -> Params:
        stacked = self._stack.join(params, self._mesh, used_up=owned)
        arrays: Params = {}
        for name in list(stacked):
            value = stacked.pop(name)
            arrays[name] = value if name in self._stack.parts.roles else value.astype(self._dtype)
            # Dispatch runs ahead: without the wait every input would stay allocated until its cast has run.
            if owned and arrays[name].dtype != value.dtype:
                jax.block_until_ready(arrays[name])
                value.delete()
        return arrays
