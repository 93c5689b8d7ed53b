"""Numbers of an optimizer, in its state as `optax.inject_hyperparams` keeps them."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.tree_util import tree_map_with_path

from axonn_jax.errors import UserError


def with_hyperparams(state: Any, numbers: Mapping[str, float]) -> Any:
    """Return an optimizer's state with other numbers, by name; raises ``UserError`` for one that it does not keep."""
    kept = set[str]()

    def replaced(path: Any, leaf: Any) -> Any:
        if len(path) < 2 or getattr(path[-2], "name", None) != "hyperparams":
            return leaf
        kept.add(name := path[-1].key)
        return jax.device_put(np.asarray(numbers.get(name, leaf), leaf.dtype), leaf.sharding)

    state = tree_map_with_path(replaced, state)
    for name in numbers.keys() - kept:
        raise UserError("set", name, ", ".join(sorted(kept)) or "none; optax.inject_hyperparams keeps them")
    return state
