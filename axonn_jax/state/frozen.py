"""Frozen weights on one mesh: those that layers read and no step changes, without gradients or optimizer state."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from axonn_jax.adapters.checksum import numbers_of, read_numbered
from axonn_jax.checkpoint.naming import shapes
from axonn_jax.models.stacked import Stack
from axonn_jax.state.scanned import unstack_params
from axonn_jax.tensor.params import Params


class FrozenWeights:
    """Frozen weights in the programs' form, kept in one dtype but for those with a role.

    Args:
        params: Float32 parameters on the mesh, under the layers' own names.
        stack: Form of the model's parameters in its programs.
        mesh: Mesh of the parameters.
        dtype: Dtype in which they are kept.
        owned: True if `params` may be freed, one after another.
    """

    def __init__(self, params: Params, stack: Stack, mesh: Mesh, dtype: Any, *, owned: bool):
        self._stack, self._mesh, self._dtype = stack, mesh, dtype
        # Taken before weights are rounded to float16, whose rounding bfloat16's does not take back.
        self._rounded = numbers_of(params, {}) if dtype == jnp.float16 else {}
        self.arrays = self._kept(params, owned=owned)
        """Arrays by their names in the programs."""

    @property
    def own(self) -> Mapping[str, Any]:
        """The weights by the layers' own names, of scanned ones a `LayerSlice`; nothing is copied."""
        return unstack_params(self._stack, self.arrays)

    def numbers(self) -> dict[str, int]:
        """Return the numbers of the weights for `adapters.checksum`, by the layers' own names."""
        return numbers_of(self.own, self._rounded)

    @property
    def bytes(self) -> int:
        """Bytes of one device."""
        return sum(math.prod(a.sharding.shard_shape(a.shape)) * a.dtype.itemsize for a in self.arrays.values())

    def load(self, read: Callable[[Mapping[str, Any]], Params]) -> None:
        """Replace the weights by those that `read` makes for their shapes, types and layouts; old ones go first."""
        wanted = shapes(self.own)
        for array in self.arrays.values():
            array.delete()
        made, self._rounded = read_numbered(read, wanted)
        self.arrays = self._kept(made, owned=True)

    def _kept(self, params: Params, *, owned: bool) -> Params:
        joined = self._stack.join(params, self._mesh, used_up=owned)
        kept: Params = {}
        for name in list(joined):
            value = joined.pop(name)
            kept[name] = value if name in self._stack.parts.roles else value.astype(self._dtype)
            if owned and kept[name].dtype != value.dtype:
                jax.block_until_ready(kept[name])
                value.delete()
        return kept
