"""All of a module's weights gathered at once, for several calls that share them."""

from typing import Any, TypeVar

import jax.numpy as jnp
from flax import nnx

from axonn_jax.tensor.collectives import Gathered, axis_size, gather_weight
from axonn_jax.tensor.params import layout

Module = TypeVar("Module", bound=nnx.Module)


def gather_weights(module: Module, dtype: jnp.dtype) -> Module:
    """The module with its weights gathered over `z` in `dtype`, inside a manual region: its layers gather no more.

    However often it is called, each weight travels once and its gradient is reduce-scattered once. Collectives: an
    all-gather a weight, as in `gather_weight`; none where `z` is of size one.
    """
    if axis_size("z") == 1:
        return module
    split: Any = nnx.split(module, nnx.Param, ...)
    graphdef, state, rest = split

    def gathered(var: Any) -> Any:
        first = (layout(var.get_metadata()) or (None,))[0]
        if first is None or "z" not in ((first,) if isinstance(first, str) else first):
            return var
        return var.replace(Gathered(gather_weight(var.get_value(), dtype)))

    pairs = [(path, gathered(var)) for path, var in nnx.to_flat_state(state)]
    return nnx.merge(graphdef, nnx.from_flat_state(pairs), rest)  # type: ignore[no-any-return]
