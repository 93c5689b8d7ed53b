"""Forms of parameters: the state of those that are not held as one plain array, of which other values are trained."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from axonn_jax.tensor.params import Params, Specs
from axonn_jax.tensor.weight_gather import Weight

Weights = dict[str, Weight]
"""Weights as layers read them, by name."""


class Forms(Protocol):
    """Parameters on one mesh in another form than one array each; `pruned.layout.PrunedLayout` is the package's.

    Three kinds of arrays make a parameter up: the weights that layers read, the values that are trained (gradients,
    masters and optimizer state have their shape), and `extra` arrays that no update changes. All have the layout of the
    dense parameter.
    """

    @property
    def mesh(self) -> Mesh:
        """Mesh of the arrays."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes of the dense parameters; their names are those of the parameters in another form."""

    @property
    def specs(self) -> Specs:
        """Layouts of the parameters."""

    @property
    def value_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Global shapes of the trained values, and of the extra arrays."""

    def first(self, extra: Params, dtype: jnp.dtype) -> Weights:
        """Return weights whose values are zero; to be traced."""

    def values(self, weights: Weights) -> Params:
        """Return the trained values of weights; to be traced; no collectives."""

    def written(self, weights: Weights, values: Params) -> Weights:
        """Return weights with new values; to be traced; no collectives."""

    def extra(self, weights: Weights) -> Params:
        """Return the extra arrays of weights."""

    def expanded(self, name: str, values: jax.Array, extra: jax.Array) -> jax.Array:
        """Return the dense global array of one parameter's values; no collectives."""

    def over_layers(self, own: Mapping[str, tuple[str, ...]]) -> "Forms":
        """Return the forms of the same parameters stacked; `own` are the layers' names of each stacked one."""


class Chosen(Protocol):
    """Forms with their extra arrays, as a `FormChoice` gives them."""

    @property
    def forms(self) -> Forms:
        """The forms."""

    @property
    def extra(self) -> Params:
        """Extra arrays of the parameters, by the layers' own names."""

    def compressed(self, params: Params, *, used_up: bool = False) -> Params:
        """Return dense arrays with those of `forms` as values, freed one by one if `used_up`."""


class FormChoice(Protocol):
    """Choice of the forms of the parameters on one mesh; `pruned.prune.Pruner` is the package's."""

    @property
    def names(self) -> tuple[str, ...]:
        """Parameters of the mesh that may get another form."""

    def masks(self, weights: Params) -> Params:
        """Return masks of booleans, of the entries of dense float32 weights that are to be trained."""

    def chosen(self, masks: Params) -> Chosen:
        """Return the forms in which the entries of masks alone are trained."""


@dataclass(frozen=True)
class FormArray:
    """Dense array of a parameter in another form, put together when asked for (`memory.host_arrays.joined`)."""

    forms: Forms
    name: str
    values: Any
    """An array, or another form of one (`memory.host_arrays.LayerSlice`); None: ones, as bytes, for a mask."""
    extra: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the dense array."""
        return self.forms.shapes[self.name]

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of the values."""
        return np.dtype(np.uint8) if self.values is None else np.dtype(self.values.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of the dense array."""
        return prod(self.shape) * self.dtype.itemsize

    @property
    def sharding(self) -> NamedSharding:
        """Layout of the dense array."""
        return NamedSharding(self.forms.mesh, self.forms.specs[self.name])

    def joined(self) -> jax.Array:
        """Return one array, a copy."""
        extra = self.extra if isinstance(self.extra, jax.Array) else self.extra.joined()
        values = self.values
        if values is None:
            values = jnp.ones_like(extra, jnp.uint8)
        elif not isinstance(values, jax.Array):
            values = values.joined()
        return self.forms.expanded(self.name, values, extra)

    def delete(self) -> None:
        """Free the values; the extra array stays."""
        if self.values is not None:
            self.values.delete()
