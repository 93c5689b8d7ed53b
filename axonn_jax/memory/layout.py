"""Where optimizer state lives: with the parameters it belongs to."""

from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import NamedSharding


def state_layout(
    state: Any, params: Mapping[str, Any], shardings: Mapping[str, NamedSharding], scalar: NamedSharding
) -> Any:
    """Optimizer state has its parameter's layout where it has its shape, and is replicated elsewhere."""

    def layout(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> NamedSharding:
        names = [key.key for key in path if isinstance(key, jax.tree_util.DictKey) and key.key in params]
        same = bool(names) and params[names[-1]].shape == leaf.shape
        return shardings[names[-1]] if same else scalar

    return jax.tree_util.tree_map_with_path(layout, state)
