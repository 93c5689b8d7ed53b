"""Pruned weight in a layer's form: dense, with zeros, and with gradients of its kept entries alone."""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from axonn_jax import compat
from axonn_jax.tensor.collectives import axis_size, mark_varying


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PrunedWeight:
    """A device's part of a pruned weight, in the weight's own place in a module."""

    dense: jax.Array
    """The part itself, whose entries that are not kept are zero."""
    index: jax.Array
    """Positions of the kept entries, row by row: [1, ..., slots] int32, ascending; spare slots lie beyond the last."""
    tap: jax.Array | None = None
    """[1, ..., slots], of any value: gradients arrive here, in its dtype. None where there are none."""

    def shard(self) -> jax.Array:
        """The dense part, of whose gradient the kept entries alone go on, as soon as it is there; no collectives.

        Source: SAMO (Singh and Bhatele, IPDPS 23), section on compressing gradients layer by layer.
        """
        if self.tap is None:
            return self.dense
        return _tapped(self.tap, mark_varying(self.dense, compat.varying_axes(self.tap)), self.index)

    def trained(self, dtype: jnp.dtype) -> jax.Array:
        """Return a tap in `dtype`, the array that is differentiated."""
        return mark_varying(jnp.zeros(self.index.shape, dtype), compat.varying_axes(self.index))

    def holding(self, dense: jax.Array) -> "PrunedWeight":
        """Return the weight with another array, as of gradients, in the place of the dense part."""
        return replace(self, dense=dense)

    def training(self, trained: jax.Array, dtype: jnp.dtype) -> "PrunedWeight":
        """Return the weight with `trained` as its tap; a gradient that is reduced over `z` is so in `dtype`."""
        return replace(self, dense=self.dense.astype(dtype) if axis_size("z") > 1 else self.dense, tap=trained)


@jax.custom_vjp
def _tapped(tap: jax.Array, dense: jax.Array, index: jax.Array) -> jax.Array:
    return dense


def _forward(tap: jax.Array, dense: jax.Array, index: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return dense, (tap, index)


def _backward(kept: tuple[jax.Array, jax.Array], grad: jax.Array) -> tuple[jax.Array, None, None]:
    tap, index = kept
    return taken(grad, index).astype(tap.dtype), None, None


_tapped.defvjp(_forward, _backward)


def taken(dense: jax.Array, index: jax.Array) -> jax.Array:
    """The kept entries [1, ..., slots] of a local dense array; 0 in slots to spare."""
    kept = dense.reshape(-1).at[index.reshape(-1)]
    entries = kept.get(mode="fill", fill_value=0, unique_indices=True, indices_are_sorted=True)
    return entries.reshape(index.shape)


def put(dense: jax.Array, index: jax.Array, values: jax.Array) -> jax.Array:
    """A local dense array with values [1, ..., slots] in the place of its kept entries."""
    kept = dense.reshape(-1).at[index.reshape(-1)]
    entries = values.reshape(-1).astype(dense.dtype)
    return kept.set(entries, mode="drop", unique_indices=True, indices_are_sorted=True).reshape(dense.shape)


def places(mask: jax.Array, slots: int) -> jax.Array:
    """Return the index [1, ..., slots] of the entries that a local mask keeps; spare slots point behind the end."""
    kept = jnp.nonzero(mask.reshape(-1), size=slots, fill_value=0)[0].astype(jnp.int32)
    number = jnp.arange(slots, dtype=jnp.int32)
    filled = jnp.where(number < jnp.sum(mask, dtype=jnp.int32), kept, mask.size + number)
    return filled.reshape((1,) * (mask.ndim - 1) + (slots,))
