"""Layout of pruned parameters on a mesh: trained entries per device, dense and compressed forms."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from axonn_jax.core.errors import UserError
from axonn_jax.core.pruned.masks import counting, rounds
from axonn_jax.core.tensor.params import Params, Specs
from axonn_jax.core.tensor.specs import shard_mapped, size_over, spec_axes
from axonn_jax.core.tensor.weight_gather import PrunedWeight, Weights, gather_entries

_MOST = 2**31  # entries of a device's shard that an int32 index can address


@dataclass(frozen=True, eq=False)
class PrunedLayout:
    """Sizes of pruned parameters by name; a parameter's values and index are [1, ..., slots] on every device.

    Both have the parameter's own `PartitionSpec`. The number of slots is that of the device that keeps the most
    entries, over all parameters with the same shape and layout.
    """

    # Masks keep different numbers of entries on each device, but shards of an array must have equal shapes. Sharing the
    # slots among parameters of one shape lets stacked layers and compiled programs share one form too.

    mesh: Mesh
    shapes: Mapping[str, tuple[int, ...]]
    """Dense shapes."""
    specs: Specs
    slots: Mapping[str, int]
    counts: Mapping[str, int]
    """Trained entries over all devices, by parameter; stacked parameters are counted by the names of their layers."""
    stacked: bool = False
    """True if dense and compressed arrays have a leading, unsharded dim of layers."""

    @property
    def trained_count(self) -> int:
        """Number of trained entries over all parameters and devices."""
        return sum(self.counts.values())

    @cached_property
    def value_shapes(self) -> dict[str, tuple[int, ...]]:
        """Global shapes of values and indices, by parameter."""
        return {name: self._value_shape(name) for name in self.shapes}

    def _value_shape(self, name: str) -> tuple[int, ...]:
        sizes = [size_over(self.mesh, spec_axes(P(axes))) for axes in full_spec(self.specs[name], self.shapes[name])]
        front = self.shapes[name][:1] if self.stacked else ()
        *rows, last = sizes[len(front) :]
        return (*front, *rows, last * self.slots[name])

    def over_layers(self, layer_names: Mapping[str, tuple[str, ...]]) -> "PrunedLayout":
        """Return the layout of the same parameters stacked; `layer_names` maps each stacked name to its layers'."""
        first = {name: layers[0] for name, layers in layer_names.items() if layers[0] in self.shapes}
        if not first:
            return self
        return replace(
            self,
            shapes={name: (len(layer_names[name]), *self.shapes[layer]) for name, layer in first.items()},
            specs={name: P(None, *self.specs[layer]) for name, layer in first.items()},
            slots={name: self.slots[layer] for name, layer in first.items()},
            stacked=True,
        )

    def indices_of(self, masks: Mapping[str, jax.Array]) -> Params:
        """Return the indices of global boolean masks, laid out like the parameters; no collectives."""
        positions: Params = {}
        for names in rounds(masks):
            layouts = tuple((self.specs[name], self.slots[name]) for name in names)
            indices = _places(self.mesh, layouts)([masks[name] for name in names])
            # Wait for each round: many programs in flight at once hang XLA's CPU devices (`masks`).
            positions |= zip(names, jax.block_until_ready(indices), strict=True)
        return positions

    def compressed(self, name: str, dense: jax.Array, index: jax.Array) -> jax.Array:
        """Return the kept values of a global dense array; no collectives."""
        return self._run(gather_entries, name)(dense, index)  # type: ignore[no-any-return]

    def expanded(self, name: str, values: jax.Array, index: jax.Array) -> jax.Array:
        """Return the global dense array of values, with zeros elsewhere; no collectives."""
        shape = NamedSharding(self.mesh, self.specs[name]).shard_shape(self.shapes[name])
        return self._run(_on_zeros, name, shape=shape)(values, index)  # type: ignore[no-any-return]

    def first(self, extra: Params, dtype: jnp.dtype) -> Weights:
        """Return all-zero weights with kept entries at the indices `extra`; for use inside a traced program."""
        return {
            name: PrunedWeight(self._sharded(name, jnp.zeros(shape, dtype)), self._sharded(name, extra[name]))
            for name, shape in self.shapes.items()
        }

    def written(self, weights: Mapping[str, Any], values: Params) -> Weights:
        """Return weights with kept entries replaced by global values; inside a traced program; no collectives."""

        def local(weights: Mapping[str, PrunedWeight], values: Params) -> Params:
            write = jax.vmap(put) if self.stacked else put
            return {name: write(weight.dense, weight.index, values[name]) for name, weight in weights.items()}

        specs = {name: self.specs[name] for name in weights}
        dense = shard_mapped(local, self.mesh, (specs,) * 2, specs, differentiated=False)(weights, values)
        return {name: PrunedWeight(dense[name], weight.index) for name, weight in weights.items()}

    def values(self, weights: Mapping[str, Any]) -> Params:
        """Return the global values of the weights' kept entries; inside a traced program; no collectives."""

        def local(weights: Mapping[str, PrunedWeight]) -> Params:
            return {name: gather_entries(weight.dense, weight.index) for name, weight in weights.items()}

        specs = {name: self.specs[name] for name in weights}
        region = shard_mapped(local, self.mesh, (specs,), specs, differentiated=False, keep_mesh=True)
        return region(weights)  # type: ignore[no-any-return]

    def extra(self, weights: Mapping[str, Any]) -> Params:
        """Return the indices of the weights' kept entries."""
        return {name: weights[name].index for name in self.shapes}

    def _sharded(self, name: str, array: jax.Array) -> jax.Array:
        return jax.lax.with_sharding_constraint(array, NamedSharding(self.mesh, self.specs[name]))

    def _run(self, local: Callable[..., object], name: str, **settings: object) -> Callable[..., Any]:
        assert not self.stacked
        return _compiled(local, tuple(settings.items()), self.mesh, self.specs[name])


# jit caches by function object, so return the same object for the same arguments.
@cache
def _compiled(
    local: Callable[..., object], settings: tuple[tuple[str, object], ...], mesh: Mesh, spec: P
) -> Callable[..., object]:
    run = partial(local, **dict(settings))
    return jax.jit(
        shard_mapped(run, mesh, (spec, spec), spec, differentiated=False), out_shardings=NamedSharding(mesh, spec)
    )


def _on_zeros(values: jax.Array, index: jax.Array, *, shape: tuple[int, ...]) -> jax.Array:
    return put(jnp.zeros(shape, values.dtype), index, values)


def full_spec(spec: P, shape: tuple[int, ...]) -> P:
    """Return the spec padded with None to one entry per dim of a shape."""
    return P(*spec, *[None] * (len(shape) - len(spec)))


def lay_out(masks: Mapping[str, jax.Array], specs: Specs, mesh: Mesh, *, multiple: int = 1) -> PrunedLayout:
    """Return the layout of the entries that global masks keep.

    Args:
        masks: Boolean masks by parameter, sharded like the parameters.
        specs: Layouts of the parameters.
        mesh: Mesh of the parameters.
        multiple: Number that the slots of every parameter are rounded up to a multiple of.

    Raises:
        UserError: A device's shard of a parameter has too many entries for an int32 index.

    Collectives: two all-reduces of one number per parameter.
    """
    most: dict[tuple[tuple[int, ...], P], int] = {}
    counts: dict[str, int] = {}
    for name, mask in masks.items():
        local = prod(NamedSharding(mesh, specs[name]).shard_shape(mask.shape))
        # Spare slots point behind the end of the shard, by up to as many entries again (`places`).
        if 2 * local >= _MOST:
            accepted = f"a grid on which a device holds fewer than {_MOST // 2:,} entries of it"
            raise UserError("prune.density", f"{name} with {local:,} entries on a device", accepted)
    for names in rounds(masks):
        largest, together = _counts(mesh, tuple(specs[name] for name in names))([masks[name] for name in names])
        for name, count in zip(names, np.asarray(largest).tolist(), strict=True):
            kind = (masks[name].shape, specs[name])
            most[kind] = max(most.get(kind, 1), count)
        counts |= zip(names, np.asarray(together).tolist(), strict=True)
    slots = {name: -(-most[mask.shape, specs[name]] // multiple) * multiple for name, mask in masks.items()}
    return PrunedLayout(mesh, {name: mask.shape for name, mask in masks.items()}, dict(specs), slots, counts)


@cache
def _counts(mesh: Mesh, specs: tuple[P, ...]) -> Callable[[list[jax.Array]], tuple[jax.Array, jax.Array]]:
    # The program returns the entries of each mask on its fullest device, and on all devices; both [masks].

    def local(masks: list[jax.Array]) -> list[jax.Array]:
        return [jnp.sum(mask, dtype=jnp.int32).reshape((1,) * mask.ndim) for mask in masks]

    def count(masks: list[jax.Array]) -> tuple[jax.Array, jax.Array]:
        out_specs = [full_spec(spec, mask.shape) for spec, mask in zip(specs, masks, strict=True)]
        counts = shard_mapped(local, mesh, (list(specs),), out_specs, differentiated=False)(masks)
        return jnp.stack([jnp.max(c) for c in counts]), jnp.stack([jnp.sum(c, dtype=jnp.int64) for c in counts])

    return counting(count, out_shardings=NamedSharding(mesh, P()))


@cache
def _places(mesh: Mesh, layouts: tuple[tuple[P, int], ...]) -> Callable[[list[jax.Array]], list[jax.Array]]:
    specs = [spec for spec, _ in layouts]

    def local(masks: list[jax.Array]) -> list[jax.Array]:
        return [places(mask, slots) for mask, (_, slots) in zip(masks, layouts, strict=True)]

    return jax.jit(
        shard_mapped(local, mesh, (specs,), specs, differentiated=False),
        out_shardings=[NamedSharding(mesh, spec) for spec in specs],
    )


def put(dense: jax.Array, index: jax.Array, values: jax.Array) -> jax.Array:
    """Return a local dense array with its kept entries replaced by values [1, ..., slots]."""
    slots = dense.reshape(-1).at[index.reshape(-1)]
    entries = values.reshape(-1).astype(dense.dtype)
    # Indices of spare slots are out of bounds and dropped. Sorted, unique indices allow XLA a cheaper scatter.
    return slots.set(entries, mode="drop", unique_indices=True, indices_are_sorted=True).reshape(dense.shape)


def places(mask: jax.Array, slots: int) -> jax.Array:
    """Return the flat indices [1, ..., slots] of the entries that a local mask keeps; spare ones are out of bounds."""
    indices = jnp.nonzero(mask.reshape(-1), size=slots, fill_value=0)[0].astype(jnp.int32)
    number = jnp.arange(slots, dtype=jnp.int32)
    # Give each spare slot a different index behind the end, so that indices stay sorted and unique for `put`.
    filled = jnp.where(number < jnp.sum(mask, dtype=jnp.int32), indices, mask.size + number)
    return filled.reshape((1,) * (mask.ndim - 1) + (slots,))
