"""Kernels held transposed on CPUs, which makes a few tokens times a weight up to three times as fast.

XLA's CPU compiler calls Eigen, which copies the weight of `X W` into panels for every product. For `W^T X^T`, with
`W^T` as in memory, Eigen copies the few tokens. Accelerators keep kernels unchanged.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from axonn_jax.tensor.embedding import Embedding
from axonn_jax.tensor.linear import Linear
from axonn_jax.tensor.params import Params, SplitModule

FEW = 64
"""Tokens. 12 products of 768 x 2,048 took 10 ms in place of 29 for 16 tokens, 32 in place of 36 for 64; for 512
longer."""


@dataclass(frozen=True)
class _Merge:
    """The way back to a module, whose layers know how their kernels are held."""

    parts: SplitModule

    def __call__(self, params: Mapping[str, jax.Array]) -> nnx.Module:
        model = self.parts.merge(params)
        for _, layer in nnx.iter_modules(model):
            if isinstance(layer, Linear | Embedding):
                layer.few = FEW
            if isinstance(layer, Linear):
                layer.turned = True
        return model


def _linears(model: nnx.Module) -> dict[str, Linear]:
    """Linear layers by the names of their kernels."""
    layers = ((".".join([*map(str, path), "kernel"]), layer) for path, layer in nnx.iter_modules(model))
    return {name: layer for name, layer in layers if isinstance(layer, Linear)}


def with_kernels_transposed(parts: SplitModule, params: Params, mesh: Mesh) -> tuple[SplitModule, Params]:
    """Parts of a model whose linear layers hold their kernels as [n, k], and such parameters; `params` is changed."""
    names = _linears(parts.merge(parts.params))
    specs = dict(parts.specs)
    shapes: Any = dict(parts.params)
    for name in names:  # both forms of only one are there at a time, if nothing else holds them
        specs[name] = P(*reversed((*specs[name], None, None)[:2]))
        shapes[name] = jax.ShapeDtypeStruct(shapes[name].shape[::-1], shapes[name].dtype)
        turn = jax.jit(jnp.transpose, out_shardings=NamedSharding(mesh, specs[name]))
        params[name] = turn(params.pop(name))
    return SplitModule(shapes, specs, _Merge(parts)), params
