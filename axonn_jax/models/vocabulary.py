"""A vocabulary that does not divide over a grid: rows beyond it in the table and the head, which nothing ever chooses.

They are zero and stay so: a lookup never reads them, their scores are minus infinity, and decay of zero is zero. Sizes
that people and checkpoints see (`ModelShape.vocab`, a checkpoint's manifest) are without them.
"""

from collections.abc import Mapping
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx

from axonn_jax.grid import GridShape
from axonn_jax.models.transformer import Transformer
from axonn_jax.tensor.params import split_module

Module = TypeVar("Module", bound=nnx.Module)

_DIMS = {"embedding.table": 0, "head.kernel": 1}


class Padded(NamedTuple):
    """A parameter with rows or columns beyond the vocabulary."""

    dim: int
    size: int
    used: int


def fit_vocabulary(model: Module, grid: GridShape) -> Module:
    """The model with table and head padded to a multiple of `y * z`, or itself where they divide; no collectives."""
    multiple = grid.y * grid.z
    if not isinstance(model, Transformer) or model.embedding.table.get_value().shape[0] % multiple == 0:
        return model
    parts = split_module(model)
    params = dict(parts.params)
    for name, dim in _DIMS.items():
        if name in params:
            params[name] = _grown(params[name], dim, model.shape.padded_vocab(multiple))
    return parts.merge(params)  # type: ignore[return-value]


def _grown(value: jax.Array, dim: int, size: int) -> jax.Array:
    widths = [(0, size - own if at == dim else 0) for at, own in enumerate(value.shape)]
    if isinstance(value, jax.ShapeDtypeStruct):
        return jax.eval_shape(lambda a: jnp.pad(a, widths), value)  # type: ignore[return-value]
    return jnp.pad(value, widths)


def padding_of(model: nnx.Module) -> dict[str, Padded]:
    """The parameters that are larger than the vocabulary, by name; none of another model than `Transformer`."""
    if not isinstance(model, Transformer):
        return {}
    params, used = split_module(model).params, model.shape.vocab
    sizes = {name: params[name].shape[dim] for name, dim in _DIMS.items() if name in params}
    return {name: Padded(_DIMS[name], size, used) for name, size in sizes.items() if size > used}


def without_padding(sizes: Mapping[str, tuple[int, ...]], padding: Mapping[str, Padded]) -> dict[str, tuple[int, ...]]:
    """Shapes of state by name, parameters or optimizer state of the same shape, as if no vocabulary were padded."""
    true = dict(sizes)
    for parameter, padded in padding.items():
        for name, size in sizes.items():
            if name.endswith(f".{parameter}") and len(size) > padded.dim and size[padded.dim] == padded.size:
                true[name] = (*size[: padded.dim], padded.used, *size[padded.dim + 1 :])
    return true
