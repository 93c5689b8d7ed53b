"""A trainer's state as one flat mapping of dotted names without the grid, and back."""

from collections.abc import Mapping
from typing import Any

import jax

State = dict[str, Any]
"""Arrays, or their shapes, by name: `params.<parameter>`, `optimizer.<path in the optax state>`."""

PARAMS, OPTIMIZER, SCALE, MASKS, CARRIED = "params.", "optimizer.", "scale.", "masks.", "state."
AVERAGE = OPTIMIZER + "average."
"""Prefixes of names; averages are of a run with `train.ema`. State that is no parameter is a model's own, as the
statistics of a BatchNorm. A missing count of skipped steps or loss scale (fp16) begins anew, an unused one is ignored.
Masks say which entries of pruned parameters are trained; a run that trains all ignores them."""


def flatten(params: Mapping[str, Any], optimizer: Any, scale: Any = None) -> State:
    """Name every array of parameters and optimizer state, such as `optimizer.0.mu.blocks.3.attention.qkv.kernel`.

    An optax state's own structure gives the path, so the names do not depend on the grid.
    """
    named = {PARAMS + name: value for name, value in params.items()}
    if scale is not None:
        named |= {SCALE + field: value for field, value in scale._asdict().items() if value is not None}
    for path, leaf in jax.tree_util.tree_leaves_with_path(optimizer):
        named[_name(path)] = leaf
    return named


def unflatten(state: Mapping[str, Any], params: Mapping[str, Any], optimizer: Any) -> tuple[dict[str, Any], Any]:
    """Return parameters and optimizer state in the given structure, with the mapping's values."""
    values = {name: state[PARAMS + name] for name in params}
    return values, jax.tree_util.tree_map_with_path(lambda path, _: state[_name(path)], optimizer)


def unflatten_scale(state: Mapping[str, Any], scale: Any) -> Any:
    """Return a loss scale, or a count, with the mapping's values."""
    fields = [field for field, value in scale._asdict().items() if value is not None]
    return scale._replace(**{field: state[SCALE + field] for field in fields})


def shapes(state: Mapping[str, Any]) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the same names with shape, dtype and sharding alone, so that the arrays can be freed."""
    return {name: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding) for name, a in state.items()}


def _name(path: tuple[Any, ...]) -> str:
    return OPTIMIZER + jax.tree_util.keystr(path, simple=True, separator=".")
