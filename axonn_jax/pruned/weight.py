"""Pruned weight in a layer's form: dense, with zeros, and with gradients of its kept entries alone."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

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


def trained(p: jax.Array | PrunedWeight, sums: jnp.dtype) -> jax.Array:
    """Return the differentiated array of a parameter: itself, or a pruned one's tap in dtype `sums`."""
    if isinstance(p, PrunedWeight):
        return mark_varying(jnp.zeros(p.index.shape, sums), compat.varying_axes(p.index))
    return p


def unpruned(params: Mapping[str, Any], among: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """Return the arrays of `among` whose parameters are not pruned."""
    return {name: value for name, value in among.items() if not isinstance(params[name], PrunedWeight)}


def tapping(params: Mapping[str, Any], held: Mapping[str, Any], sums: jnp.dtype) -> dict[str, Any]:
    """Return the weights for layers: `held` itself, or for a pruned parameter the dense weight with `held` as tap.

    Gradients that are reduce-scattered over `z` are so in the dtype `sums`, as for other weights.
    """

    def tapped(p: PrunedWeight, tap: jax.Array) -> PrunedWeight:
        return replace(p, dense=p.dense.astype(sums) if axis_size("z") > 1 else p.dense, tap=tap)

    return {
        name: tapped(params[name], value) if isinstance(params[name], PrunedWeight) else value
        for name, value in held.items()
    }
