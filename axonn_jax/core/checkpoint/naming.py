"""Checkpoint names: a trainer's state as a flat mapping of dotted names that do not depend on the grid."""

from collections.abc import Mapping
from typing import Any

import jax

from axonn_jax.core.memory.precision import Scale

State = dict[str, Any]
"""Arrays or abstract arrays by name: `params.<parameter>`, `optimizer.<path in the optax state>`."""

PARAMS, OPTIMIZER, SCALE, MASKS, CARRIED = "params.", "optimizer.", "scale.", "masks.", "state."
AVERAGE = OPTIMIZER + "average."
"""Prefixes of names.

`AVERAGE` is present in a run with `train.ema`. `CARRIED` is model state that is no parameter, such as BatchNorm
statistics. `SCALE` has the loss scale (fp16) and the count of skipped steps: reset if missing, ignored if unused.
`MASKS` mark the trained entries of pruned parameters; a dense run ignores them.
"""


def flatten(params: Mapping[str, object], optimizer: object, scale: Scale | None = None) -> State:
    """Return every array under its checkpoint name, such as `optimizer.0.mu.blocks.3.attention.qkv.kernel`."""
    # Optimizer names are paths in the optax state, which has the same structure on every grid.
    state = {PARAMS + name: value for name, value in params.items()}
    if scale is not None:
        state |= {SCALE + field: value for field, value in scale._asdict().items() if value is not None}
    for path, leaf in jax.tree_util.tree_leaves_with_path(optimizer):
        state[_name(path)] = leaf
    return state


def unflatten(
    state: Mapping[str, object], params: Mapping[str, object], optimizer: object
) -> tuple[dict[str, Any], Any]:
    """Return parameters and optimizer state in the structure of `params` and `optimizer`, with values from `state`."""
    values = {name: state[PARAMS + name] for name in params}
    return values, jax.tree_util.tree_map_with_path(lambda path, _: state[_name(path)], optimizer)


def unflatten_scale(state: Mapping[str, Any], scale: Scale) -> Scale:
    """Return a loss scale with the values from `state`."""
    fields = [field for field, value in scale._asdict().items() if value is not None]
    return scale._replace(**{field: state[SCALE + field] for field in fields})


def shapes(state: Mapping[str, Any]) -> dict[str, jax.ShapeDtypeStruct]:
    """Return abstract arrays (shape, dtype, sharding) of a state, so that the arrays themselves can be freed."""
    return {name: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding) for name, a in state.items()}


def _name(path: tuple[object, ...]) -> str:
    return OPTIMIZER + jax.tree_util.keystr(path, simple=True, separator=".")
