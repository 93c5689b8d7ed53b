"""Vocabulary padding: extra zero rows in the table and the head, for a vocabulary that does not divide over a grid."""

from collections.abc import Mapping
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx

from axonn_jax.core.grid import GridShape
from axonn_jax.core.models.transformer import Transformer
from axonn_jax.core.tensor.params import split_module

Module = TypeVar("Module", bound=nnx.Module)

# Padding is zero and stays zero: lookups never read it, its logits are masked to minus infinity, and weight decay of
# zero is zero. Sizes that users and checkpoints see (`ModelShape.vocab`, a checkpoint's manifest) do not include it.
_DIMS = {"embedding.table": 0, "head.kernel": 1}


class Padded(NamedTuple):
    """Padded dim of a parameter: its index, its padded size and the vocabulary."""

    dim: int
    size: int
    used: int


def fit_vocabulary(model: Module, grid: GridShape) -> Module:
    """Return the model with table and head padded to a multiple of `y * z`, or the model itself; no collectives."""
    multiple = grid.y * grid.z
    if not isinstance(model, Transformer) or model.embedding.table.get_value().shape[0] % multiple == 0:
        return model
    parts = split_module(model)
    params = dict(parts.params)
    for name, dim in _DIMS.items():
        if name in params:
            params[name] = _pad(params[name], dim, model.shape.padded_vocab(multiple))
    return parts.merge(params)  # type: ignore[return-value]


def _pad(value: jax.Array, dim: int, size: int) -> jax.Array:
    widths = [(0, size - length if at == dim else 0) for at, length in enumerate(value.shape)]
    if isinstance(value, jax.ShapeDtypeStruct):
        return jax.eval_shape(lambda a: jnp.pad(a, widths), value)  # type: ignore[return-value]
    return jnp.pad(value, widths)


def padding_of(model: nnx.Module) -> dict[str, Padded]:
    """Return the padded parameters by name; empty for models other than `Transformer`."""
    if not isinstance(model, Transformer):
        return {}
    params, used = split_module(model).params, model.shape.vocab
    sizes = {name: params[name].shape[dim] for name, dim in _DIMS.items() if name in params}
    return {name: Padded(_DIMS[name], size, used) for name, size in sizes.items() if size > used}


def without_padding(sizes: Mapping[str, tuple[int, ...]], padding: Mapping[str, Padded]) -> dict[str, tuple[int, ...]]:
    """Return shapes by name, of parameters and optimizer state, with the padding of the vocabulary removed."""
    unpadded = dict(sizes)
    for parameter, padded in padding.items():
        for name, size in sizes.items():
            # Optimizer state is named after its parameter, but not all of it has the parameter's shape.
            if name.endswith(f".{parameter}") and len(size) > padded.dim and size[padded.dim] == padded.size:
                unpadded[name] = (*size[: padded.dim], padded.used, *size[padded.dim + 1 :])
    return unpadded
