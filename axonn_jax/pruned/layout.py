"""Layout of pruned parameters on a mesh: kept entries per device, and conversions between dense and compressed."""

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

from axonn_jax.errors import UserError
from axonn_jax.pruned.masks import counting, rounds
from axonn_jax.tensor.params import Params, Specs
from axonn_jax.tensor.specs import shard_mapped, size_over, spec_axes
from axonn_jax.tensor.weight_gather import PrunedWeight, taken

_MOST = 2**31
"""Entries of a device's part of a parameter that an int32 index can name."""


@dataclass(frozen=True, eq=False)
class PrunedLayout:
    """Sizes of pruned parameters by name: `values` and `index` of one are [1, ..., slots] on every device.

    They have the parameter's own `PartitionSpec`. Devices keep different numbers of entries, but have as many slots:
    those of the one that keeps most, of all parameters of a shape and layout.
    """

    mesh: Mesh
    shapes: Mapping[str, tuple[int, ...]]
    """Dense shapes."""
    specs: Specs
    slots: Mapping[str, int]
    counts: Mapping[str, int]
    """Entries that are trained, of all devices together; of stacked parameters by their layers' names."""
    stacked: bool = False
    """True if a dim of layers, which is not sharded, is in front of dense and compressed arrays alike."""

    @property
    def kept(self) -> int:
        """Entries that are trained, of all parameters and devices together."""
        return sum(self.counts.values())

    @cached_property
    def value_shapes(self) -> dict[str, tuple[int, ...]]:
        """Global shapes of values and indices."""
        return {name: self._value_shape(name) for name in self.shapes}

    def _value_shape(self, name: str) -> tuple[int, ...]:
        sizes = [size_over(self.mesh, spec_axes(P(axes))) for axes in whole_spec(self.specs[name], self.shapes[name])]
        front = self.shapes[name][:1] if self.stacked else ()
        *rows, last = sizes[len(front) :]
        return (*front, *rows, last * self.slots[name])

    def over_layers(self, own: Mapping[str, tuple[str, ...]]) -> "PrunedLayout":
        """The layout of the same parameters stacked; `own` are the layers' names of each stacked one."""
        first = {name: layers[0] for name, layers in own.items() if layers[0] in self.shapes}
        if not first:
            return self
        return replace(
            self,
            shapes={name: (len(own[name]), *self.shapes[layer]) for name, layer in first.items()},
            specs={name: P(None, *self.specs[layer]) for name, layer in first.items()},
            slots={name: self.slots[layer] for name, layer in first.items()},
            stacked=True,
        )

    def indices_of(self, masks: Mapping[str, jax.Array]) -> Params:
        """The indices of global masks of booleans by name, laid out as the parameters are; no collectives."""
        positions: Params = {}
        for names in rounds(masks):
            own = tuple((self.specs[name], self.slots[name]) for name in names)
            indices = _places(self.mesh, own)([masks[name] for name in names])
            positions |= zip(names, jax.block_until_ready(indices), strict=True)
        return positions

    def compressed(self, name: str, dense: jax.Array, index: jax.Array) -> jax.Array:
        """The values of a global dense array; no collectives."""
        return self._run(taken, name)(dense, index)  # type: ignore[no-any-return]

    def expanded(self, name: str, values: jax.Array, index: jax.Array) -> jax.Array:
        """The global dense array of values, with zeros; no collectives."""
        shape = NamedSharding(self.mesh, self.specs[name]).shard_shape(self.shapes[name])
        return self._run(_on_zeros, name, shape=shape)(values, index)  # type: ignore[no-any-return]

    def first(self, extra: Params, dtype: jnp.dtype) -> dict[str, Any]:
        """Weights whose kept entries are at the positions `extra`, and zero; to be traced."""
        return {
            name: PrunedWeight(self._laid_out(name, jnp.zeros(shape, dtype)), self._laid_out(name, extra[name]))
            for name, shape in self.shapes.items()
        }

    def written(self, weights: Mapping[str, Any], values: Params) -> dict[str, Any]:
        """Weights with global values in the place of their kept entries; to be traced; no collectives."""

        def local(weights: dict[str, PrunedWeight], values: Params) -> Params:
            write = jax.vmap(put) if self.stacked else put
            return {name: write(weight.dense, weight.index, values[name]) for name, weight in weights.items()}

        specs = {name: self.specs[name] for name in weights}
        dense = shard_mapped(local, self.mesh, (specs,) * 2, specs, differentiated=False)(weights, values)
        return {name: PrunedWeight(dense[name], weight.index) for name, weight in weights.items()}

    def values(self, weights: Mapping[str, Any]) -> Params:
        """Global values of the weights' kept entries; to be traced; no collectives."""

        def local(weights: dict[str, PrunedWeight]) -> Params:
            return {name: taken(weight.dense, weight.index) for name, weight in weights.items()}

        specs = {name: self.specs[name] for name in weights}
        region = shard_mapped(local, self.mesh, (specs,), specs, differentiated=False, among_others=True)
        return region(weights)  # type: ignore[no-any-return]

    def extra(self, weights: Mapping[str, Any]) -> Params:
        """Positions of the weights' kept entries."""
        return {name: weights[name].index for name in self.shapes}

    def _laid_out(self, name: str, array: jax.Array) -> jax.Array:
        return jax.lax.with_sharding_constraint(array, NamedSharding(self.mesh, self.specs[name]))

    def _run(self, local: Callable[..., Any], name: str, **settings: Any) -> Callable[..., Any]:
        assert not self.stacked
        return _compiled(local, tuple(settings.items()), self.mesh, self.specs[name])


@cache  # one function object a form, so that jit compiles each once
def _compiled(
    local: Callable[..., Any], settings: tuple[tuple[str, Any], ...], mesh: Mesh, spec: P
) -> Callable[..., Any]:
    run = partial(local, **dict(settings))
    return jax.jit(
        shard_mapped(run, mesh, (spec, spec), spec, differentiated=False), out_shardings=NamedSharding(mesh, spec)
    )


def _on_zeros(values: jax.Array, index: jax.Array, *, shape: tuple[int, ...]) -> jax.Array:
    return put(jnp.zeros(shape, values.dtype), index, values)


def whole_spec(spec: P, shape: tuple[int, ...]) -> P:
    """A layout with an entry for every dim of a shape."""
    return P(*spec, *[None] * (len(shape) - len(spec)))


def lay_out(masks: Mapping[str, jax.Array], specs: Specs, mesh: Mesh, *, multiple: int = 1) -> PrunedLayout:
    """The layout for global masks, as parameters are laid out; slots are a multiple of `multiple`.

    Raises ``UserError`` where a device's part of a parameter has too many entries for an index. Collectives: two
    all-reduces of a number a parameter.
    """
    most: dict[tuple[tuple[int, ...], P], int] = {}
    counts: dict[str, int] = {}
    for name, mask in masks.items():
        local = prod(NamedSharding(mesh, specs[name]).shard_shape(mask.shape))
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
    """Return a program that counts each mask's entries on its fullest device, and on all devices: [masks] both."""

    def local(masks: list[jax.Array]) -> list[jax.Array]:
        return [jnp.sum(mask, dtype=jnp.int32).reshape((1,) * mask.ndim) for mask in masks]

    def both(masks: list[jax.Array]) -> tuple[jax.Array, jax.Array]:
        own = [whole_spec(spec, mask.shape) for spec, mask in zip(specs, masks, strict=True)]
        counts = shard_mapped(local, mesh, (list(specs),), own, differentiated=False)(masks)
        return jnp.stack([jnp.max(c) for c in counts]), jnp.stack([jnp.sum(c, dtype=jnp.int64) for c in counts])

    return counting(both, out_shardings=NamedSharding(mesh, P()))


@cache
def _places(mesh: Mesh, own: tuple[tuple[P, int], ...]) -> Callable[[list[jax.Array]], list[jax.Array]]:
    """Program that makes the indices of masks, of which each has a layout and a number of slots."""
    specs = [spec for spec, _ in own]

    def local(masks: list[jax.Array]) -> list[jax.Array]:
        return [places(mask, slots) for mask, (_, slots) in zip(masks, own, strict=True)]

    return jax.jit(
        shard_mapped(local, mesh, (specs,), specs, differentiated=False),
        out_shardings=[NamedSharding(mesh, spec) for spec in specs],
    )


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
